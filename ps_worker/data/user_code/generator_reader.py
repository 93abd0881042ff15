"""A user's data generator as a reader of files: its samples become rows without being written as text.

What is text in a slot is hashed, what is a number is a key: the rows are those that the multi-slot reader
makes of the generator's text, with values="text" of a MultiSlotStringDataGenerator and values="keys" of the
other.
"""

import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import DataError
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.reader import Block, Reader
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.formats import MakeReader
from ps_worker.data.text.column_order import ColumnOrder, Kind
from ps_worker.data.text.line_blocks import LineNumbers, line_blocks, line_splits
from ps_worker.data.user_code.data_generator import (
    Cells,
    DataGenerator,
    GeneratorRun,
    has_batches,
    shown,
)
from ps_worker.data.user_code.samples import Sample, SampleColumns

_BLOCK_ROWS = 1024


def generated(generator: DataGenerator) -> MakeReader:
    """Returns the format of files that a generator parses, as a dataset takes it."""

    def make(schema: Schema, _: BadRows) -> Reader:
        return GeneratorReader(generator, schema)

    return make


class GeneratorReader:
    """Turns the lines of files into blocks of rows by a generator; a `Reader`.

    Threads share the generator. A line that it cannot parse, or a sample that is wrong, ends the run: that is
    a fault of code, so no limit of malformed rows applies.
    """

    def __init__(self, generator: DataGenerator, schema: Schema) -> None:
        """Calls nothing yet.

        Args:
            generator: Its columns are those that `ColumnOrder` takes, in any order.
            schema: The columns of a row.
        """
        self._generator = generator
        self._schema = schema

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Cuts a file by bytes; not at all if it is compressed, or if samples depend on those before."""
        return line_splits(path, 1 if has_batches(self._generator) else num_splits)

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split; offsets are bytes of the content. See `Reader.blocks`.

        A block ends where no sample waits for a batch, so that reading can begin after it.
        """
        lines: LineNumbers | None = None
        rows = _Rows(self._generator, self._schema)
        begin: int | None = None
        for block, position in line_blocks(split, offset):
            lines = lines or LineNumbers(split.path, position)
            for line, line_offset in _lines(block, position):
                begin = line_offset if begin is None else begin
                try:
                    rows.add_line(line)
                except DataError as error:
                    raise _placed(error, split.path, lines.number(0)) from error
                lines.passed += 1
                if rows.size >= _BLOCK_ROWS and rows.is_between_batches:
                    yield Block(rows.taken(), begin)
                    begin = None
        if lines is None or begin is None:
            return
        try:
            rows.add_rest()
        except DataError as error:
            raise _placed(error, split.path, lines.number(-1)) from error
        if rows.size:
            yield Block(rows.taken(), begin)


def _placed(error: DataError, path: str, line: int) -> DataError:
    return DataError(f"{path}:{line}: {error}")


def _lines(block: NDArray[np.uint8], position: int) -> Iterator[tuple[bytes, int]]:
    """Yields the lines of a block, which is at `position`, and where they begin."""
    for line in io.BytesIO(block.tobytes()):
        yield line, position
        position += len(line)


class _Rows:
    """The rows of one pass of a generator over a split."""

    def __init__(self, generator: DataGenerator, schema: Schema) -> None:
        self._run = GeneratorRun(generator)
        self._schema = schema
        self._order: ColumnOrder | None = None
        self._columns = SampleColumns(schema)

    @property
    def size(self) -> int:
        return self._columns.size

    @property
    def is_between_batches(self) -> bool:
        return self._run.is_between_batches

    def add_line(self, line: bytes) -> None:
        self._add(self._run.samples_of(line))

    def add_rest(self) -> None:
        self._add(self._run.rest())

    def taken(self) -> Batch:
        """Returns the rows so far, and begins anew."""
        columns, self._columns = self._columns, SampleColumns(self._schema)
        return columns.batch()

    def _add(self, samples: Iterable[Cells]) -> None:
        for cells in samples:
            if self._order is None:
                self._order = ColumnOrder(self._schema, self._run.names)
            self._columns.add(_sample(cells, self._order, self._schema))


def _sample(cells: Cells, order: ColumnOrder, schema: Schema) -> Sample:
    """Returns a generator's sample in the form of `ps_worker.data.user_code.samples`."""
    label: float | None = None
    dense: list[float | None] = [None] * len(schema.dense)
    slots: list[list[Any]] = [[]] * len(schema.slots)
    for (name, values), (kind, index) in zip(cells, order.columns, strict=True):
        if kind is Kind.SLOT:
            slots[index] = values
        elif kind is Kind.NUMBERS:
            _require_count(name, values, len(dense), len(dense))
            dense = [_number(name, value) for value in values]
        elif kind is Kind.NUMBER:
            _require_count(name, values, 0, 1)
            dense[index] = _number(name, values[0]) if values else None
        else:
            _require_count(name, values, 1, 1)
            label = _number(name, values[0])
    return label, dense, slots


def _require_count(name: str, values: list[Any], least: int, most: int) -> None:
    if not least <= len(values) <= most:
        expected = str(most) if least == most else f"{least} or {most}"
        raise DataError(f"{name!r} has {len(values)} values, expected {expected}")


def _number(name: str, value: str | float) -> float:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    # Python reads 1_000, too.
    if math.isinf(number) or "_" in value:
        raise DataError(f"{name!r} has {shown(value)}, expected a finite number")
    return number
