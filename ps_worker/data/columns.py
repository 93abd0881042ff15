"""Files as columns of unscaled numbers and slot values, for the tools that need more than keys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Reader
from ctr_ps.ps_worker.data.columnar.column_matching import LABEL_NAMES
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import DEFAULT, NAMED, format_of, reader_of
from ctr_ps.ps_worker.data.text.criteo import have_label
from ctr_ps.ps_worker.data.text.csv_text import CsvReader
from ctr_ps.ps_worker.data.text.text_reader import first_block

_NO_COLUMN = "\0"  # the name of no column

FORMATS = (DEFAULT, *NAMED)


def columns_of(
    path: str,
    schema: Schema,
    bad_rows: BadRows,
    *,
    format: str | None = None,
    layout: Schema | None = None,
) -> Iterator[Columns]:
    """Returns the rows of a file as columns; `format` None: by its suffix. Errors are those of a `Reader`.

    `layout` are all columns of a file in Criteo's layout; None: those of `schema`. Raises a UsageError for a
    format not in `FORMATS`.
    """
    format = format or format_of(path)
    if format not in FORMATS:
        raise UsageError(
            f"{path}: cannot read single columns of format {format!r}, only of {', '.join(FORMATS)}"
        )
    if format == DEFAULT:
        header = _criteo_header(path, layout or schema)
        schema = replace(schema, is_for_prediction=True)  # the label is told by its place
        reader: Reader = CsvReader(schema, bad_rows, header=header)
    else:
        reader = reader_of(path, schema, bad_rows, format)
    assert isinstance(reader, ColumnReader)
    return reader.columns(FileSplit(path))


def slots_only(names: Sequence[str], split: Mapping[str, str] | None = None) -> Schema:
    """Returns a schema that reads slots alone: a malformed label or number does not hide its row's values."""
    split = {name: text for name, text in (split or {}).items() if name in names}
    return without_label(Schema(dense=(), slots=tuple(names), split=split))


def without_label(schema: Schema) -> Schema:
    """Returns the schema to read rows without a label, whatever the names of the columns."""
    return replace(schema, label=_NO_COLUMN, is_for_prediction=True)


def label_name(schema: Schema) -> str:
    """Returns the name of the label's column in files written for a schema; UsageError if none is free."""
    if schema.label is not None:
        return schema.label
    free = [name for name in LABEL_NAMES if name not in schema.features]
    if not free:
        raise UsageError(
            f"other columns of the schema have all usual names of a label ({', '.join(LABEL_NAMES)}): add "
            'another name to the schema, such as label = "is_click"'
        )
    return free[0]


def _criteo_header(path: str, schema: Schema) -> list[str]:
    names = [*(column.name for column in schema.dense), *schema.slots]
    has_label = have_label(first_block(path), len(names))
    return [label_name(schema), *names] if has_label else names
