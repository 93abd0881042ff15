"""Vectors of a slot's values: rows of a checkpoint joined with the values in files, or taken from files.

Files are Parquet, with the columns value (text), key (uint64) and vector (fixed-size list of float32).
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_model.schema import SchemaError
from protos.errors import DataError, UsageError, counted
from protos.gradients import Values
from protos.keys import Keys
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.saved_model import SavedModel
from ps_server.checkpoint.storage.folders import Folder
from ps_server.checkpoint.tools.rewrite import import_rows
from ps_worker.checkpoints.attachments import schema_of_checkpoint
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.tools.distinct_values import DistinctValues, keys_of

_ESCAPE = re.compile(rb"\\(\\|x[0-9a-f]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedVectors:
    """What was written of one table.

    Attributes:
        table: Its name.
        file: Name of the file.
        written: Vectors in it.
        without_row: Values that have no row in the table: rare ones that were not admitted, or new ones.
    """

    table: str
    file: str
    written: int
    without_row: int


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
    tables: Sequence[str] = (),
    format: str | None = None,
    bad_row_limit: int = 0,
) -> ExportedValues:
    """Writes the vectors of a slot's values, in the order in which the values first occur.

    Args:
        checkpoint: Of a job; every checksum is compared.
        folder: For the files TABLE.SLOT.parquet, made if necessary.
        files: Data files with the values: those of the training, or any others with a column of this name.
        slot: Name of the slot in the model's schema.
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
        values = DistinctValues(files, schema, slot, format=format, bad_rows=bad_rows)
    except SchemaError as error:
        raise UsageError(f"--slot: {error}") from error
    saved = SavedModel(checkpoint, maps=True, verifies=True)
    folder.make()
    writers: dict[str, pq.ParquetWriter] = {}
    found = dict.fromkeys(tables or sorted(checkpoint.tables), 0)
    with ExitStack() as stack:
        for texts, keys in values:
            for table in found:
                rows, has_row = saved.find(table, keys)
                if not has_row.any():
                    continue
                if table not in writers:
                    dim = checkpoint.tables[table].dim
                    file = _writer(folder, _file_name(table, slot), dim)
                    writers[table] = stack.enter_context(file)
                shown = [_text_of(texts[int(place)].as_py()) for place in np.flatnonzero(has_row)]
                columns = [
                    pa.array(shown, pa.string()),
                    pa.array(keys[has_row]),
                    _lists(rows[has_row]),
                ]
                writers[table].write_table(pa.table(columns, schema=writers[table].schema))
                found[table] += len(shown)
        _require_rows(found, tables, values, slot)
    return ExportedValues(
        tables=[
            ExportedVectors(
                table=table,
                file=_file_name(table, slot),
                written=found[table],
                without_row=values.distinct - found[table],
            )
            for table in writers
        ],
        rows=values.rows,
        bad_rows=bad_rows.total,
        distinct=values.distinct,
        collisions=values.collisions,
    )


def _require_rows(
    found: dict[str, int], wanted: Sequence[str], values: DistinctValues, slot: str
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


def _file_name(table: str, slot: str) -> str:
    """Returns the name of a file, in which underscores stand for unusual characters."""
    return re.sub(r"[^\w.-]", "_", f"{table}.{slot}") + ".parquet"


@contextmanager
def _writer(folder: Folder, file: str, dim: int) -> Iterator[pq.ParquetWriter]:
    """Creates a file, which is complete when the block ends; an error in the block removes it.

    Raises:
        UsageError: If it exists.
        CheckpointError: If it cannot be written.
    """
    if folder.has(file):
        raise UsageError(f"{folder.url}/{file} exists: remove it, or export elsewhere")
    vector = pa.list_(pa.float32(), dim)
    fields = pa.schema([("value", pa.string()), ("key", pa.uint64()), ("vector", vector)])
    try:
        with folder.create(file) as sink, pq.ParquetWriter(sink, fields) as writer:
            yield writer
    except BaseException:
        folder.remove_file(file)
        raise


def _lists(vectors: Values) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def _text_of(value: bytes) -> str:
    """Returns a value as text, different from that of any other."""
    return value.replace(b"\\", rb"\\").decode(errors="backslashreplace")


def _value_of(text: str) -> bytes:
    """Returns the value whose text this is: see `_text_of`."""
    return _ESCAPE.sub(
        lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)]), text.encode()
    )


def import_vectors(
    checkpoint: Checkpoint, target: str, files: Sequence[str], *, table: str, slot: str = ""
) -> int:
    """Saves a checkpoint in which a table begins with vectors of files; returns the number of vectors.

    Args:
        checkpoint: See `import_rows`; of a job, if files have values.
        target: See `import_rows`.
        files: Parquet with a column `vector` (or `weights`), and `key` or `value`.
        table: Name of the table.
        slot: Slot of the values, which are hashed as the model does; empty: the keys of the files count.

    Raises:
        CheckpointError: If the checkpoint is damaged, or the new one cannot be written.
        DataError: If a file cannot be read, or two vectors have one key.
        UsageError: If there is no such table or slot, none is given, or vectors have another width.
    """
    read = [_vectors_in(file) for file in files]
    keys = np.concatenate([_keys_in(each, checkpoint, slot) for each in read])
    if (num_keys := np.unique(keys).size) < keys.size:
        raise DataError(
            f"{', '.join(files)}: {keys.size} vectors have only {num_keys} different keys: give each once"
        )
    widths = {each.vectors.shape[1] for each in read}
    if len(widths) > 1:
        raise DataError(f"{', '.join(files)} have vectors of different widths {sorted(widths)}")
    import_rows(checkpoint, target, table, keys, np.concatenate([each.vectors for each in read]))
    return keys.size


@dataclass(frozen=True, slots=True)
class _Vectors:
    """The content of a file.

    Attributes:
        vectors: float32[N, D].
        keys: uint64[N]; None: it has values alone.
        values: N values as bytes; None: it has keys alone.
    """

    vectors: Values
    keys: Keys | None
    values: Sequence[bytes] | None


def _vectors_in(file: str) -> _Vectors:
    try:
        table = pq.read_table(file)
        name = "vector" if "vector" in table.column_names else "weights"
        lists = table[name].combine_chunks()
        if lists.null_count or lists.flatten().null_count or len(set(lists.value_lengths())) > 1:
            raise ValueError(f"column {name!r} has missing numbers, or lists of different lengths")
        with np.errstate(over="ignore"):  # what is too large for a float32 is refused below
            vectors = lists.flatten().to_numpy().astype(np.float32).reshape(len(lists), -1)
        keys = values = None
        if "key" in table.column_names:
            keys = table["key"].cast(pa.uint64()).to_numpy()
        if "value" in table.column_names:
            values = [_value_of(each) for each in table["value"].to_pylist()]
    except (OSError, ValueError, LookupError, AttributeError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as vectors: {error}") from error
    if keys is None and values is None:
        raise DataError(f"{file} has neither a column 'key' nor 'value'")
    if not np.isfinite(vectors).all():
        place = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise DataError(f"{file}: vector {place} has numbers that are infinite, or none")
    return _Vectors(vectors, keys, values)


def _keys_in(vectors: _Vectors, checkpoint: Checkpoint, slot: str) -> Keys:
    if vectors.values is None or (vectors.keys is not None and not slot):
        assert vectors.keys is not None
        return vectors.keys
    if not slot:
        raise UsageError("the vectors are those of values: say of which slot with --slot")
    schema = schema_of_checkpoint(checkpoint)
    try:
        number = schema.slot_numbers[schema.slot_index(slot)]
    except SchemaError as error:
        raise UsageError(f"--slot: {error}") from error
    return keys_of(pa.array(vectors.values, pa.binary()), number)
