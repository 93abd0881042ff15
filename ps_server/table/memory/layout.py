"""Layout of a row: key, weights, optimizer state, statistics.

    row = | key: 8 bytes | weights: dim x float32 | state: state_width x float32 | statistics | base | pad |

Statistics, 4 columns, are present if the table's spec has them (rows/statistics.py).
Only rows of a replica have a base, as wide as the weights (replica_table.py).
A row has an even number of columns, so that keys stay aligned. The key is in the row, not in the index, so
that finding a row and reading it touch the same memory (docs/decisions/0001).
"""

from dataclasses import dataclass

KEY_COLUMNS = 2
"""Width of the key, in float32 columns."""

STATISTICS_WIDTH = 4
"""Width of the statistics, in float32 columns."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Columns of a row, counted in float32."""

    dim: int
    state_width: int
    has_statistics: bool = False
    has_base: bool = False

    @property
    def weights(self) -> slice:
        """Columns of the weights."""
        return slice(KEY_COLUMNS, KEY_COLUMNS + self.dim)

    @property
    def state(self) -> slice:
        """Columns of the optimizer state."""
        return slice(KEY_COLUMNS + self.dim, KEY_COLUMNS + self.dim + self.state_width)

    @property
    def statistics_width(self) -> int:
        """Columns of statistics; 0 without."""
        return STATISTICS_WIDTH if self.has_statistics else 0

    @property
    def statistics(self) -> slice:
        """Columns of the statistics."""
        start = KEY_COLUMNS + self.dim + self.state_width
        return slice(start, start + self.statistics_width)

    @property
    def statistics_column(self) -> int:
        """First column of the statistics; 0 without."""
        return KEY_COLUMNS + self.dim + self.state_width if self.has_statistics else 0

    @property
    def base_column(self) -> int:
        """First column of the base; 0 without."""
        first = KEY_COLUMNS + self.dim + self.state_width + self.statistics_width
        return first if self.has_base else 0

    @property
    def stride(self) -> int:
        """Columns from one row to the next."""
        width = KEY_COLUMNS + self.dim + self.state_width + self.statistics_width
        width += self.has_base * self.dim
        return width + width % 2
