"""Data that a program gives: files, or a table in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeGuard

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.data.files.listing import Files, are_files, files_of
from ctr_ps.ps_worker.data.formats import Format
from ctr_ps.ps_worker.data.slot_values import SlotValues


class ArrowTable(Protocol):
    """A table with Arrow's C interface, as those of pandas, polars, pyarrow and DuckDB."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


Table = ArrowTable | Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]
"""Rows with named columns: a DataFrame or an Arrow table, a dict of columns, a list of dicts."""

Source = Files | Table
"""What a dataset can read."""


def is_table(data: object) -> TypeGuard[Table]:
    """Whether data may be rows with named columns."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(each, Mapping) for each in data)
    return isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__")


def is_source(data: object) -> TypeGuard[Source]:
    """Whether data are files or a table."""
    return are_files(data) or is_table(data)


def in_arrow(data: Any, schema: Schema) -> Any:
    """Returns a table as one of Arrow's, all else as it is. Raises DataError if a column cannot be read."""
    if not is_table(data):
        return data
    from ctr_ps.ps_worker.data.columnar.tables import arrow_table  # late: Arrow takes a while

    return arrow_table(data, schema)


def features_only(schema: Schema) -> Schema:
    """Returns the schema to predict by: where columns have names, no label or weight is read."""
    from ctr_ps.ps_worker.data.columns import without_label  # late: Arrow takes a while

    return replace(without_label(schema), other_labels=(), weight=None, id=None)


def opened(
    data: Source,
    schema: Schema,
    format: Format | None,
    # what the values of slots were in training, and are to mean in a table; None: what they are
    meant: SlotValues | None = None,
) -> tuple[list[str], Format | None]:
    """Returns the files and their format; of a table its name and a reader.

    Raises DataError if no file matches, or a table has a column that cannot be read or means something else.
    """
    if are_files(data):
        return files_of(data), format
    from ctr_ps.ps_worker.data.columnar.tables import TableReader, require_meaning

    table = in_arrow(data, schema)
    if meant is not None:
        require_meaning(table.schema, schema, meant)
    return ["the table"], partial(TableReader, table)
