"""Vectors of a slot's values: the rows of a checkpoint joined with the values in files."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from ctr_model.schema import SchemaError
from protos.errors import UsageError, counted
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.saved_model import SavedModel
from ps_server.checkpoint.storage.folders import Folder
from ps_worker.checkpoints.attachments import schema_of_checkpoint
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.tools.slot_values import SlotValues
from ps_worker.serving.vector_files import (
    VectorFormat,
    VectorWriter,
    vector_file_names,
    vectors_to,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedVectors:
    """What was written of one table.

    Attributes:
        table: Its name.
        files: Names of the files.
        written: Vectors in them.
        without_row: Values that have no row in the table: rare ones that were not admitted, or new ones.
        left_out: Values with a row that the format cannot hold.
    """

    table: str
    files: list[str]
    written: int
    without_row: int
    left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedValues:
    """What an export read and wrote.

    Attributes:
        tables: Tables with rows of these values.
        rows: Rows of the data files.
        bad_rows: Malformed rows, which were skipped.
        distinct: Distinct values of the slot in them.
        collisions: Values without a vector of their own: an earlier value has the same key.
    """

    tables: list[ExportedVectors]
    rows: int
    bad_rows: int
    distinct: int
    collisions: int


def export_values(
    checkpoint: Checkpoint,
    folder: Folder,
    files: Sequence[str],
    *,
    slot: str,
    kind: VectorFormat,
    tables: Sequence[str] = (),
    format: str | None = None,
    bad_row_limit: int = 0,
) -> ExportedValues:
    """Writes the vectors of a slot's values, in the order in which the values first occur.

    Args:
        checkpoint: Of a job; every checksum is compared.
        folder: For the files TABLE.SLOT.*, made if necessary.
        files: Data files with the values: those of the training, or any others with a column of this name.
        slot: Name of the slot in the model's schema.
        kind: Format of the new files.
        tables: Names of tables; empty: all that have a row of a value.
        format: Of the data files; None: determined by the suffix.
        bad_row_limit: Malformed rows to skip; one more is an error.

    Raises:
        CheckpointError: If the checkpoint is damaged or of no job, or a file cannot be written.
        DataError: If a data file cannot be read or has no such column.
        UsageError: If there is no such slot, a file exists, or no value has a row in a table that was named.
            Nothing is left in the folder then.
    """
    schema = schema_of_checkpoint(checkpoint)
    bad_rows = BadRows(bad_row_limit)
    try:
        values = SlotValues(files, schema, slot, format=format, bad_rows=bad_rows)
    except SchemaError as error:
        raise UsageError(f"--slot: {error}") from error
    saved = SavedModel(checkpoint, maps=True, verifies=True)
    folder.make()
    writers: dict[str, VectorWriter] = {}
    found = dict.fromkeys(tables or sorted(checkpoint.tables), 0)
    with ExitStack() as stack:
        for texts, keys in values:
            for table in found:
                rows, has_row = saved.find(table, keys)
                if not has_row.any():
                    continue
                if table not in writers:
                    dim = checkpoint.tables[table].dim
                    files_of_table = vectors_to(folder, f"{table}.{slot}", dim, kind)
                    writers[table] = stack.enter_context(files_of_table)
                shown = [_text(texts[int(place)].as_py()) for place in np.flatnonzero(has_row)]
                writers[table].write(shown, keys[has_row], rows[has_row])
                found[table] += len(shown)
        _require_rows(found, tables, values, slot)
    return ExportedValues(
        tables=[
            ExportedVectors(
                table=table,
                files=vector_file_names(f"{table}.{slot}", kind),
                written=found[table] - writer.left_out,
                without_row=values.distinct - found[table],
                left_out=writer.left_out,
            )
            for table, writer in writers.items()
        ],
        rows=values.rows,
        bad_rows=bad_rows.total,
        distinct=values.distinct,
        collisions=values.collisions,
    )


def _require_rows(
    found: dict[str, int], wanted: Sequence[str], values: SlotValues, slot: str
) -> None:
    """Refuses an export in which a table that was named, or every table, has no row of any value."""
    empty = [
        table
        for table in found
        if not found[table] and (table in wanted or not any(found.values()))
    ]
    if empty:
        raise UsageError(
            f"slot {slot!r} has {counted(values.distinct, 'value')} in {counted(values.rows, 'row')}, and "
            f"none has a row in table {' or '.join(map(repr, empty))}: export a table that looks this slot "
            f"up, with values as the model was trained on"
        )


def _text(value: bytes) -> str:
    """Returns a value as text, different from that of any other: see `vector_files`."""
    return value.replace(b"\\", rb"\\").decode(errors="backslashreplace")
