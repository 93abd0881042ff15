"""Rows with named columns in memory: a DataFrame, an Arrow table, a dict of columns, a list of dicts."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_matching import (
    HASH_VERSION_KEY,
    LABEL_NAMES,
    check_types,
    kinds_of_values,
    match_columns,
)
from ctr_ps.ps_worker.data.columnar.column_values import is_list_type, is_number_type, is_text_type
from ctr_ps.ps_worker.data.columnar.parquet_orc import require_valid
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.sources import Table


class TableReader(ColumnReader):
    """Reads the columns of a schema by name from a table, whose name is the path. Thread-safe."""

    def __init__(self, table: pa.Table, schema: Schema, bad_rows: BadRows) -> None:
        super().__init__(schema, bad_rows)
        self._table = table

    @property
    def slot_values(self) -> SlotValues:
        """The kinds of values in slots."""
        fields = self._table.schema
        return kinds_of_values(
            fields, [each for each in self._schema.slots if each in fields.names]
        )

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return [FileSplit(path)]

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        fields, row = self._table.schema, offset or 0
        columns = match_columns(split.path, fields, self._schema)
        check_types(split.path, fields, self._schema, columns)
        decoder = Decoder(split.path, self._schema, columns, self._bad_rows)
        rows = self._table.select(columns.names).slice(row)
        for batch in rows.to_batches(max_chunksize=columns.read_rows):
            try:
                require_valid(batch)
            except pa.ArrowInvalid as error:
                raise DataError(f"{split.path}: {error}") from error
            yield decoder.decode(batch, np.arange(row, row + len(batch)))
            row += len(batch)


def arrow_table(
    data: Table, schema: Schema | None = None, *, ignore: Container[str] = ()
) -> pa.Table:
    """Returns the columns that `schema` may need, None: all but those to ignore; of others only the names.

    Copies nothing that Arrow can read as it is. Raises DataError if a column cannot be read.
    """
    wanted: set[str | None] = set()
    if schema is not None:
        row_columns = (schema.label, *schema.other_labels, schema.weight, schema.id, schema.group)
        wanted = {*schema.features, *row_columns, *LABEL_NAMES}
    if isinstance(data, list | tuple):
        names = dict.fromkeys(name for row in data for name in row)
        data = {name: [row.get(name) for row in data] for name in names}
    elif hasattr(data, "iloc"):  # pandas: a column may hold any objects
        frame: Any = data
        data = {name: frame.iloc[:, index] for index, name in enumerate(frame.columns)}
    if not isinstance(data, Mapping):
        return pa.table(data)
    columns: dict[str, Any] = {}
    for name, values in data.items():
        try:
            columns[str(name)] = (
                pa.array(values, from_pandas=True)
                if (name in wanted if schema else name not in ignore)
                else pa.nulls(len(values))
            )
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(f"column {name!r} of the table cannot be read: {error}") from error
    try:
        return pa.table(columns)
    except pa.ArrowInvalid as error:  # of several lengths
        raise DataError(f"the columns do not make a table: {error}") from error


def require_meaning(fields: pa.Schema, slots: Sequence[str], meant: SlotValues) -> None:
    """Raises DataError if the values of a slot are not of the kind that the model was trained on."""
    if HASH_VERSION_KEY in (fields.metadata or {}):
        return  # keys, whose hash is checked
    for slot in [each for each in slots if each in fields.names]:
        kind, meaning, fault = fields.field(slot).type, meant.meaning(slot), ""
        if is_list_type(kind):
            kind = kind.value_type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if is_text_type(kind):
            fault = meaning.text_fault
        elif is_number_type(kind) and meaning.whole_number != "digits":
            fault = meaning.number_fault or (
                "but the model was trained on keys: give samples, or a Batch of keys"
            )
        if fault:
            raise DataError(f"slot {slot!r} of the table is a column of {kind}, {fault}")
