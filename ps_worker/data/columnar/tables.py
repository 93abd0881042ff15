"""Rows with named columns in memory: a DataFrame, an Arrow table, a dict of columns, a list of dicts."""

from collections.abc import Container, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import pyarrow as pa

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_matching import (
    HASH_VERSION_KEY,
    LABEL_NAMES,
    kinds_of_values,
)
from ctr_ps.ps_worker.data.columnar.column_values import (
    flat,
    is_list_type,
    is_number_type,
    is_text_type,
    type_of_values,
)
from ctr_ps.ps_worker.data.columnar.parquet_orc import require_valid
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.slot_values import SlotValues

_ABSENT = object()  # of a row without the column


class TableReader(ColumnReader):
    """Reads the columns of a schema by name from a table, whose name is the path. Thread-safe."""

    def __init__(self, table: pa.Table, schema: Schema, bad_rows: BadRows) -> None:
        super().__init__(schema, bad_rows)
        self._table = table

    @property
    def slot_values(self) -> SlotValues:
        """The kinds of values in slots."""
        fields = self._table.schema
        slots = [each for each in self._schema.slots if each in fields.names]
        return kinds_of_values(fields, slots, self._schema.split)

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return [FileSplit(path)]

    def fields(self, path: str) -> pa.Schema:
        return self._table.schema

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        decoder = Decoder(split.path, self._table.schema, self._schema, self._bad_rows)
        row = offset or 0
        rows = self._table.select(decoder.columns.stored).slice(row)
        for batch in rows.to_batches(max_chunksize=decoder.columns.read_rows):
            try:
                require_valid(batch)
            except pa.ArrowInvalid as error:
                raise DataError(f"{split.path}: {error}") from error
            yield decoder.decode(batch, np.arange(row, row + len(batch)))
            row += len(batch)


def arrow_table(
    data: Any, schema: Schema | None = None, *, ignore: Container[str] = ()
) -> pa.Table:
    """Returns the columns that `schema` may need, None: all but those to ignore; of others only the names.

    `data` is a `Table` of data/sources.py. Copies nothing that Arrow can read as it is. Raises DataError if a
    column cannot be read.
    """
    wanted: set[str | None] = set()
    if schema is not None:
        row_columns = (schema.label, *schema.other_labels, schema.weight, schema.id, schema.group)
        wanted = {*schema.features, *schema.vectors, *row_columns, *LABEL_NAMES}
    # Structs, of whose fields some are wanted; see `flat`.
    heads = {name[:end] for name in wanted if name for end in range(len(name)) if name[end] == "."}
    names: list[str] = []
    arrays: list[pa.Array | pa.ChunkedArray] = []
    columns, metadata = _columns_of(data)
    for each, values in columns:
        name = str(each)  # of a frame without a header a number
        if isinstance(values, str | bytes | Set) or not hasattr(values, "__len__"):
            raise DataError(
                f"column {name!r} of the table is a {type(values).__name__}, expected a list of values; "
                "for one row give a list of one dict"
            )
        is_read = name not in ignore if schema is None else name in wanted | heads
        if is_read and name in names:
            raise DataError(f"column {name!r} occurs twice in the table, expected once")
        if is_read and isinstance(values, list) and any(value is _ABSENT for value in values):
            row = next(place for place, value in enumerate(values, 1) if value is _ABSENT)
            raise DataError(f"row {row} of the table has no {name!r}; a missing value is None")
        array = _array(name, values) if is_read else pa.nulls(len(values))
        if len(array) and array.null_count == len(array):  # then its type is one by chance
            array = pa.nulls(len(array))
        own = [name]
        if name in heads and pa.types.is_null(array.type):  # missing objects
            own = sorted(each for each in wanted if each and each.startswith(f"{name}."))
        names += own
        arrays += [array] * len(own)
    lengths = sorted({len(array) for array in arrays})
    if len(lengths) > 1:
        raise DataError(f"the columns of the table have {lengths[0]} to {lengths[-1]} rows")
    return flat(pa.Table.from_arrays(arrays, names=names).replace_schema_metadata(metadata))


def _columns_of(data: Any) -> tuple[Iterable[tuple[object, Any]], Mapping[bytes, bytes] | None]:
    """Returns the columns by name, and Arrow's metadata."""
    if isinstance(data, list | tuple):
        names = dict.fromkeys(name for row in data for name in row)
        return [(name, [row.get(name, _ABSENT) for row in data]) for name in names], None
    if isinstance(data, Mapping):
        return data.items(), None
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas: any objects, any names
        return [(name, data.iloc[:, index]) for index, name in enumerate(data.columns)], None
    try:
        table = pa.table(data)
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"the {type(data).__name__} is no table of named columns: {error}"
        ) from error
    return zip(table.column_names, table.columns, strict=True), table.schema.metadata


def _array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    kind: Any = getattr(values, "type", None)
    if isinstance(kind, pa.DataType):
        if pa.types.is_fixed_size_binary(kind):
            raise DataError(f"column {name!r} of the table has {kind}: write it as text or bytes")
        return values
    try:
        try:
            return pa.array(values, from_pandas=True)
        except OverflowError:  # numbers from 2^63 on
            return pa.array(values, pa.uint64(), from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise DataError(f"column {name!r} of the table cannot be read: {error}") from error


def require_meaning(fields: pa.Schema, schema: Schema, meant: SlotValues) -> None:
    """Raises DataError if the values of a slot are not of the kind that the model was trained on.

    Warns of text without `split` where they were lists.
    """
    if HASH_VERSION_KEY in (fields.metadata or {}):
        return  # keys, whose hash is checked
    for slot in [each for each in schema.slots if each in fields.names]:
        stored, meaning, fault = fields.field(slot).type, meant.meaning(slot), ""
        kind = type_of_values(stored)
        if pa.types.is_null(kind):
            continue  # values that are missing
        if is_text_type(kind):
            if not is_list_type(stored) and slot not in schema.split:
                meant.doubt_text(slot, "a column of text")
            fault = meaning.text_fault
        elif is_number_type(kind) and meaning.whole_number != "digits":
            fault = meaning.number_fault or (
                "but the model was trained on keys: give samples, a Batch of keys, or a file of keys "
                "as Arrow reads it"
            )
        if fault:
            raise DataError(f"slot {slot!r} of the table is a column of {kind}, {fault}")
