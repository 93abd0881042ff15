"""How large tables are, and what was removed from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatus:
    """Size of one table, or of one server's part of it.

    Attributes:
        rows: How many it has.
        size_bytes: Of rows, index and marks.
        candidates: Keys that are counted but have no row yet; 0 where a Bloom filter counts.
        candidate_bytes: Of what counts them.
        expired: Rows that shrinks have removed so far.
        evicted: Rows that made room for others in a table that was full, so far.
    """

    rows: int
    size_bytes: int
    candidates: int = 0
    candidate_bytes: int = 0
    expired: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What was removed from one table, or from one server's part of it, or would be.

    Attributes:
        rows: How many.
        size_bytes: By how much the table is smaller for it.
        left_rows: How many are left; with `rows` all that there were.
        candidates: Keys without a row that are no longer counted; 0 where a Bloom filter counts.
    """

    rows: int = 0
    size_bytes: int = 0
    left_rows: int = 0
    candidates: int = 0

    def __add__(self, other: "Shrunk") -> "Shrunk":
        """Returns what was removed in both parts."""
        return Shrunk(
            rows=self.rows + other.rows,
            size_bytes=self.size_bytes + other.size_bytes,
            left_rows=self.left_rows + other.left_rows,
            candidates=self.candidates + other.candidates,
        )
