"""Reader that parses files with a user's data generator in this process.

Text in a slot is hashed, a number is a key. The rows equal those that the multi-slot reader makes of the
generator's output, with values="text" for a MultiSlotStringDataGenerator and values="keys" otherwise.
"""

import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, counted
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, Reader
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import MakeReader
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.text.multislot import ColumnOrder, Kind
from ctr_ps.ps_worker.data.text.text_reader import (
    line_blocks,
    line_number,
    line_splits,
    lines_before,
)
from ctr_ps.ps_worker.data.user_code.data_generator import (
    Cells,
    DataGenerator,
    GeneratorRun,
    has_batches,
    shown,
)
from ctr_ps.ps_worker.data.user_code.salted_hash import require_no_salted_hash
from ctr_ps.ps_worker.data.user_code.samples import Sample, SampleColumns

_BLOCK_ROWS = 1024
_MAX_SAMPLES = 1 << 16  # that a line completes, so that each has a position of its own


def generated(generator: DataGenerator) -> MakeReader:
    """Returns a format for datasets that parses files with a generator; DataError if it uses `hash()`."""
    require_no_salted_hash(generator, type(generator).__qualname__)
    seen = SlotValues()

    def make(schema: Schema, _: BadRows) -> Reader:
        return GeneratorReader(generator, schema, seen)

    return make


class GeneratorReader:
    """A `Reader` on top of a generator, which threads share.

    A line that the generator cannot parse and an invalid sample are errors: faults of code, to which no limit
    of malformed rows applies.
    """

    def __init__(
        self, generator: DataGenerator, schema: Schema, seen: SlotValues | None = None
    ) -> None:
        """Takes a generator of the columns of `ColumnOrder`, in any order.

        `seen` is told what the values of slots are, by all readers of a dataset.
        """
        self.slot_values = SlotValues() if seen is None else seen  # those so far
        self._generator = generator
        self._schema = schema

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Splits a file by bytes, unless it is compressed or samples depend on others (`has_batches`)."""
        return line_splits(path, 1 if has_batches(self._generator) else num_splits)

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split; offsets are in bytes of the content. See `Reader.blocks`.

        A block ends at the end of a batch of `generate_batch`, so that reading can resume after it.
        """
        rows = _Rows(self._generator, self._schema, self.slot_values, split.path)
        begin: int | None = None  # of the next block
        end = 0
        for block, position in line_blocks(split, offset):
            end = position
            for line in io.BytesIO(block.tobytes()):
                begin = end if begin is None else begin
                try:
                    rows.add(rows.run.samples_of(line), end)
                except DataError as error:
                    raise DataError(
                        f"{split.path}:{lines_before(split.path, end) + 1}: {error}"
                    ) from error
                end += len(line)
                if rows.size >= _BLOCK_ROWS and rows.run.is_between_batches:
                    yield rows.taken(begin)
                    begin = None
        if begin is None:
            return
        try:
            rows.add(rows.run.rest(), end)
        except DataError as error:
            raise DataError(f"{split.path}:{lines_before(split.path, end)}: {error}") from error
        if rows.size:
            yield rows.taken(begin)


class _Rows:
    """Rows from one pass of a generator over a split."""

    def __init__(
        self, generator: DataGenerator, schema: Schema, seen: SlotValues, path: str
    ) -> None:
        self._path = path
        self.run = GeneratorRun(generator)
        self._schema, self._seen = schema, seen
        self._order: ColumnOrder | None = None
        self._columns = SampleColumns(schema, seen=seen)
        self._row_offsets: list[int] = []

    @property
    def size(self) -> int:
        return self._columns.size

    def add(self, samples: Iterable[Cells], offset: int) -> None:
        """Adds the samples that the line at `offset` completes."""
        for number, cells in enumerate(samples):
            self._row_offsets.append(offset * _MAX_SAMPLES + number)
            if self._order is None:
                self._order = ColumnOrder(self._schema, self.run.names)
            self._columns.add(_sample(cells, self._order, self._schema))

    def taken(self, offset: int) -> Block:
        columns, self._columns = self._columns, SampleColumns(self._schema, seen=self._seen)
        row_offsets, self._row_offsets = self._row_offsets, []

        def place(row: int) -> str:
            return f"{self._path}:{line_number(self._path, row_offsets[row] // _MAX_SAMPLES)}"

        return Block(columns.batch(place), offset, np.array(row_offsets, np.int64))


def _sample(cells: Cells, order: ColumnOrder, schema: Schema) -> Sample:
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
        raise DataError(f"{name!r} has {counted(len(values), 'value')}, expected {expected}")


def _number(name: str, value: str | float) -> float:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    # float() accepts "1_000".
    if math.isinf(number) or "_" in value:
        raise DataError(f"{name!r} has {shown(value)}, expected a finite number")
    return number
