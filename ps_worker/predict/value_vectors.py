"""Vectors of a slot's values: rows of a checkpoint joined with the values in files, or taken from files."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ctr_ps.ctr_model.schema import Schema, SchemaError
from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.protos.keys import Keys
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import import_rows
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.checkpoint.storage.folders import Folder
from ctr_ps.ps_worker.checkpoints.attachments import job_of_checkpoint, schema_of_checkpoint
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.distinct_values import DistinctValues, keys_of
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.predict.vector_files import (
    VectorFormat,
    Vectors,
    WriteVectors,
    text_of_value,
    vector_file_names,
    vectors_in,
    vectors_to,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedVectors:
    """What was written of one table."""

    table: str
    files: list[str]  # their names
    written: int  # vectors in them
    without_row: int  # values that have no row in the table: rare ones, not admitted, or new ones
    left_out: int  # values with a row that the format cannot hold


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedValues:
    """What an export read and wrote."""

    tables: list[ExportedVectors]  # those with rows of these values
    rows: int  # of the data files
    bad_rows: int  # malformed ones, which were skipped
    distinct: int  # distinct values of the slot in them
    collisions: int  # values without a vector of their own: an earlier value has the same key


def export_values(
    checkpoint: Checkpoint,  # of a job; every checksum is compared
    folder: Folder,  # for the files TABLE.SLOT.*, made if necessary
    # data files with the values: those of the training, or any others with a column of this name
    files: Sequence[str],
    *,
    slot: str,  # name of the slot in the model's schema
    kind: VectorFormat,  # format of the new files
    tables: Sequence[str] = (),  # names of tables; empty: all that have a row of a value
    format: str | None = None,  # of the data files; None: determined by the suffix
    bad_row_limit: int = 0,  # malformed rows to skip; one more is an error
) -> ExportedValues:
    """Writes the vectors of a slot's values, in the order in which the values first occur.

    Raises CheckpointError if the checkpoint is damaged or of no job, or a file cannot be written; DataError
    if a data file cannot be read or has no such column; UsageError if there is no such slot, a file exists,
    or no value has a row in a table that was named. Nothing is left in the folder then.
    """
    schema = schema_of_checkpoint(checkpoint)
    bad_rows = BadRows(bad_row_limit)
    _number_of(schema, slot)
    values = DistinctValues(files, schema, slot, format=format, bad_rows=bad_rows)
    saved = SavedModel(checkpoint, maps=True, verifies=True)
    folder.make()
    writers: dict[str, WriteVectors] = {}
    written = Counter[str]()
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
                shown = [
                    text_of_value(texts[int(place)].as_py()) for place in np.flatnonzero(has_row)
                ]
                written[table] += writers[table](shown, keys[has_row], rows[has_row])
                found[table] += len(shown)
        # No row in a table that was named, or in any.
        empty = [
            table
            for table in found
            if not found[table] and (table in tables or not any(found.values()))
        ]
        if empty:
            raise UsageError(
                f"slot {slot!r} has {counted(values.distinct, 'value')} in {counted(values.rows, 'row')}, "
                f"but none is a key of table {' or '.join(map(repr, empty))}: export a table that looks up "
                "this slot, with values as in the training data"
            )
    return ExportedValues(
        tables=[
            ExportedVectors(
                table=table,
                files=vector_file_names(f"{table}.{slot}", kind),
                written=written[table],
                without_row=values.distinct - found[table],
                left_out=found[table] - written[table],
            )
            for table in writers
        ],
        rows=values.rows,
        bad_rows=bad_rows.total,
        distinct=values.distinct,
        collisions=values.collisions,
    )


def nearest(
    checkpoint: Checkpoint | tuple[SavedModel, Job, Schema],  # of a job; or what is loaded of it
    slot: str,
    value: str,
    *,
    table: str = "",  # empty: the one with the widest rows
    values: Sequence[str] = (),  # to choose from; empty: those in files
    files: Sequence[str] = (),  # patterns; empty: data.train of the job
    top: int = 10,
) -> list[tuple[str, float]]:
    """Returns the values of a slot whose vectors have the largest cosines with that of `value`, and these.

    Memory holds 16 bytes for each distinct value in the files. Raises UsageError if there is no such slot,
    `value` has no row, or an argument is invalid; otherwise as `export_values`.
    """
    if type(top) is not int or top < 1:
        raise UsageError(f"top is {top!r}, expected a whole number of at least 1")
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UsageError(f"values is {values!r}, expected a list of texts")
    values = list(values)
    if isinstance(checkpoint, Checkpoint):
        job, schema = job_of_checkpoint(checkpoint), schema_of_checkpoint(checkpoint)
        saved = SavedModel(checkpoint, maps=True)
    else:
        saved, job, schema = checkpoint
    number = _number_of(schema, slot)
    own = keys_of(_texts_of([value]), number)
    tables = saved.checkpoint.tables
    table = table or max(tables, key=lambda name: tables[name].dim)
    (vector,), has_row = saved.find(table, own)
    if not has_row.any():
        raise UsageError(
            f"{value!r} of slot {slot!r} has no row in table {table!r}: it is new, or was not admitted"
        )
    found = list[tuple[str, float]]()
    if values:
        given = _texts_of(values)
        blocks: Iterable[tuple[pa.Array, Keys]] = [(given, keys_of(given, number))]
    else:
        paths, bad_rows = matching_files(files or job.data.train), BadRows(job.data.bad_row_limit)
        format = job.data.format or None
        blocks = DistinctValues(paths, schema, slot, format=format, bad_rows=bad_rows)
    for texts, keys in blocks:
        rows, has_row = saved.find(table, keys)
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
        others = has_row & (keys != own)
        cosines = np.where(others, rows @ vector / np.maximum(norms, 1e-30), -np.inf)
        places = [i for i in np.argsort(-cosines)[:top].tolist() if np.isfinite(cosines[i])]
        found += [(text_of_value(texts[i].as_py()), float(cosines[i])) for i in places]
        found = sorted(found, key=lambda each: -each[1])[:top]
    if not found:
        raise UsageError(f"no other value has a row in {table!r}: give values, or their files")
    return found


def _texts_of(values: Iterable[str]) -> pa.Array:
    """Returns distinct texts in the order in which they first occur."""
    for each in values:
        if not isinstance(each, str):
            raise UsageError(f"value {each!r} is no text: give whole numbers as their digits")
    texts = [each.encode(errors="surrogatepass") for each in dict.fromkeys(values)]
    return pa.array(texts, pa.binary())


def import_vectors(
    checkpoint: Checkpoint, target: str, files: Sequence[str], *, table: str, slot: str = ""
) -> int:
    """Saves a checkpoint in which a table begins with vectors of files; returns the number of vectors.

    See `import_rows` and `vectors_in`. Values of files are those of `slot`, and hashed as the model does;
    without a slot the keys of the files count. Raises DataError if a file cannot be read, or two vectors have
    one key; UsageError if there is no such table or slot, none is given, or vectors have another width.
    """
    read = [vectors_in(file) for file in files]
    keys = np.concatenate([_keys_in(each, checkpoint, slot) for each in read])
    if (num_keys := np.unique(keys).size) < keys.size:
        raise DataError(
            f"{', '.join(files)}: {keys.size} vectors have only {num_keys} different keys: give each key "
            "once"
        )
    widths = {each.vectors.shape[1] for each in read}
    if len(widths) > 1:
        raise DataError(f"{', '.join(files)} have vectors of different widths {sorted(widths)}")
    import_rows(checkpoint, target, table, keys, np.concatenate([each.vectors for each in read]))
    return keys.size


def _keys_in(vectors: Vectors, checkpoint: Checkpoint, slot: str) -> Keys:
    if vectors.values is None or (vectors.keys is not None and not slot):
        assert vectors.keys is not None
        return vectors.keys
    if not slot:
        raise UsageError(
            "the file lists its vectors by value, not by key: name the slot of the values with --slot"
        )
    number = _number_of(schema_of_checkpoint(checkpoint), slot)
    return keys_of(pa.array(vectors.values, pa.binary()), number)


def _number_of(schema: Schema, slot: str) -> int:
    try:
        return schema.slot_numbers[schema.slot_index(slot)]
    except SchemaError as error:
        raise UsageError(f"--slot: {error}") from error
