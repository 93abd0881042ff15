"""Readers, their blocks of rows, positions between rows, and batches of B rows made of blocks.

split     --Reader.blocks--> Block | Block | ...     in file order
blocks    | . . . . . | . . . | . . . . . . |
batches   |  view   |  copy   |  view   | . |        B = 4
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, counted
from ctr_ps.ps_worker.data.files.file_split import FileSplit

MAX_BATCH_KEYS = 2**31 - 1  # the largest number of keys that int32 offsets can address


@dataclass(frozen=True, slots=True)
class Block:
    """A block of rows from a reader."""

    rows: Batch  # at least one
    # position in the file, from which `Reader.blocks` can resume: bytes of the (decompressed)
    # content in text, rows in Parquet and ORC
    offset: int
    # int64[n], positions of the rows; None: offsets count rows, and these are consecutive
    row_offsets: NDArray[np.int64] | None = None

    def positions(self) -> NDArray[np.int64]:
        """Returns int64[n], numbers of the rows, unique in the file and the same in every reading."""
        if self.row_offsets is not None:
            return self.row_offsets
        return np.arange(self.offset, self.offset + self.rows.size, dtype=np.int64)


class Reader(Protocol):
    """Reads the files of one format. Thread-safe: several threads may read different splits."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Returns at most `num_splits` splits of a file, of similar size, ordered and disjoint."""
        ...

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split in file order, from `Block.offset` or its start.

        A DataError names the file that cannot be read, is damaged or does not match the schema; a BadRowError
        names file, place and fault of the malformed row that exceeded the limit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """A position between two rows of a pass: all rows before it were yielded, none after it."""

    epoch: int = 1  # number of the pass, from 1
    seed: int = 0  # seed of the order of splits
    split: int = 0  # index of the split in the order of the pass
    offset: int | None = None  # `Block.offset` in this split; None: its start
    skip: int = 0  # rows after `offset` that were already yielded
    files: str = ""  # digest of the files (`digest_of_files`)

    @property
    def partitions(self) -> Mapping[str, str]:
        """Of files there are none."""
        return {}

    def to_json(self) -> str:
        """Returns the position as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the position that `to_json` wrote; raises DataError for another text."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"data position {text!r} is not JSON: {error}") from error
        names = [field.name for field in fields(cls)]
        if isinstance(values, dict) and "part" in values:
            # Older checkpoints.
            values["split"] = values.pop("part")
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise DataError(f"data position {text!r}: expected an object with {', '.join(names)}")
        for name, value in values.items():
            is_count = type(value) is int and value >= 0  # True is an int, too
            if name == "files" and not isinstance(value, str):
                raise DataError(f"data position: files is {value!r}, expected a text")
            if name != "files" and not is_count and not (name == "offset" and value is None):
                raise DataError(
                    f"data position: {name} is {value!r}, expected a whole number of at least 0"
                )
        return cls(**values)


class Position(Protocol):
    """A position between two rows of a worker's data."""

    @property
    def epoch(self) -> int:
        """Number of the pass, from 1."""
        ...

    @property
    def partitions(self) -> Mapping[str, str]:
        """Places in a stream's partitions that have changed since the position before."""
        ...

    def to_json(self) -> str:
        """Returns the rest of the position."""
        ...


Batches = Iterable[Batch | tuple[Batch, Position]]
"""Training data: batches, each with the position after it if its source has positions."""


def digest_of_files(splits: Sequence[FileSplit], is_shuffled: bool) -> str:
    """Returns 16 hex digits over the splits, their order and `is_shuffled`."""
    text = json.dumps([is_shuffled, *([split.path, split.start, split.stop] for split in splits)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def batches(
    blocks: Iterable[tuple[int, Block]], batch_size: int, start: DataPosition
) -> Iterator[tuple[Batch, DataPosition]]:
    """Yields the rows of blocks in batches of B and a last, smaller one, each with the position after it.

    Batches may span blocks and splits. Blocks come with the index of their split; the first is that of
    `start`, whose first `start.skip` rows are skipped. Raises DataError if its split has fewer rows.
    """
    skip = start.skip
    pieces: list[Batch] = []
    held = 0
    position = start
    for split, block in blocks:
        if skip and split != start.split:
            break
        size = block.rows.size
        row = min(skip, size)
        skip -= row
        while row < size:
            stop = min(row + batch_size - held, size)
            pieces.append(rows_between(block.rows, row, stop))
            held += stop - row
            row = stop
            position = replace(start, split=split, offset=block.offset, skip=stop)
            if held == batch_size:
                yield joined(pieces), position
                pieces, held = [], 0
    if skip:
        raise DataError(
            f"{start} is beyond the end of its split by {counted(skip, 'row')}: it belongs to other files"
        )
    if pieces:
        yield joined(pieces), position


def rows_between(rows: Batch, start: int, stop: int) -> Batch:
    """Returns the rows [start, stop), as views where possible."""
    if start == 0 and stop == rows.size:
        return rows
    offsets = rows.offsets[start * rows.num_slots : stop * rows.num_slots + 1]
    first, last = offsets[0], offsets[-1]
    return Batch(
        **{name: column[start:stop] for name, column in rows.row_columns().items()},
        dense=rows.dense[start:stop],
        keys=rows.keys[first:last],
        offsets=offsets - first if first else offsets,
        num_slots=rows.num_slots,
    )


def rows_where(rows: Batch, is_wanted: NDArray[np.bool_]) -> Batch:
    """Returns copies of the rows selected by a mask, bool[B]."""
    lengths = np.diff(rows.offsets).reshape(rows.size, rows.num_slots)
    ends = rows.offsets[:: rows.num_slots]  # [B + 1]
    is_key_wanted = np.repeat(is_wanted, np.diff(ends))
    return Batch(
        **{name: column[is_wanted] for name, column in rows.row_columns().items()},
        dense=rows.dense[is_wanted],
        keys=rows.keys[is_key_wanted],
        offsets=offsets_of(lengths[is_wanted]),
        num_slots=rows.num_slots,
    )


def without_rows(
    rows: Batch, offsets: NDArray[np.int64], left_out: Iterable[int]
) -> tuple[Batch, NDArray[np.int64]]:
    """Returns copies of the rows, and of their offsets int64[B], without some."""
    is_wanted = np.ones(rows.size, np.bool_)
    is_wanted[list(left_out)] = False
    return rows_where(rows, is_wanted), offsets[is_wanted]


def offsets_of(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """Returns the offsets of a batch for the number of keys of each slot, int[B, S]; see `joined`."""
    _require_countable(int(lengths.sum(dtype=np.int64)), lengths.shape[0])
    offsets = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths.reshape(-1), out=offsets[1:])
    return offsets


def joined(pieces: Sequence[Batch]) -> Batch:
    """Concatenates batches with the same `ROW_COLUMNS`; raises DataError above `MAX_BATCH_KEYS` keys."""
    if len(pieces) == 1:
        return pieces[0]
    starts = np.cumsum([0, *(len(piece.keys) for piece in pieces)])
    _require_countable(int(starts[-1]), sum(piece.size for piece in pieces))
    offsets = [piece.offsets[1:] + start for piece, start in zip(pieces, starts, strict=False)]
    columns = [piece.row_columns() for piece in pieces]
    return Batch(
        **{name: np.concatenate([each[name] for each in columns]) for name in columns[0]},
        dense=np.concatenate([piece.dense for piece in pieces]),
        keys=np.concatenate([piece.keys for piece in pieces]),
        offsets=np.concatenate([pieces[0].offsets[:1], *offsets], dtype=np.int32),
        num_slots=pieces[0].num_slots,
    )


def _require_countable(num_keys: int, num_rows: int) -> None:
    if num_keys > MAX_BATCH_KEYS:
        raise DataError(
            f"{num_rows} rows have {num_keys} keys, expected up to {MAX_BATCH_KEYS} in a batch: use smaller "
            "batches"
        )


class RowColumnCheck:
    """Refuses a mix of files with and without labels or weights, and missing weights. Thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._lock = threading.Lock()
        self._first: tuple[str, frozenset[str]] | None = None

    def require(self, path: str, rows: Batch) -> None:
        """Compares the columns of a file's rows with those of the first file, and with the schema."""
        names = frozenset(rows.row_columns())
        with self._lock:
            first = self._first = self._first or (path, names)
        for name in sorted(first[1] ^ names):
            with_it, without = (path, first[0]) if name in names else (first[0], path)
            raise DataError(
                f"{without} has rows without {name}, but {with_it} has rows with {name}: read them "
                "separately"
            )
        for name, columns in self._schema.required_row_columns.items():
            if name in names:
                continue
            named = ", ".join(map(repr, columns))
            kind = name.replace("_", " ")
            raise DataError(
                f"{path}: the schema names {named} as column of {kind}, which this format does not have: "
                "use one with names of columns, such as CSV or Parquet"
            )
