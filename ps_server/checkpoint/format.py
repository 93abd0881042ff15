"""Arrow files: rows of a table's shards, or a piece of a dense block, by one server.

    table.<name>.server-<i>.arrow   each record batch one shard: key, weights, state
    dense.<name>.server-<i>.arrow   one record batch: weight, state_0, state_1, ...

Numbers pass between numpy and a file without a copy; what is read is a read-only view of the mapped
file, and is handed out only after its checksum was found right.
"""

import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from protos.errors import CheckpointError
from protos.gradients import Values
from ps_server.checkpoint.digest import piece_digest, shard_digest
from ps_server.checkpoint.durable import sync
from ps_server.checkpoint.manifest import FORMAT_VERSION, DenseEntry, ShardBatch, TableEntry
from ps_server.checkpoint.rows import DensePiece, DenseSource, Rows, TableSource

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


def require_name(name: str) -> None:
    """Raises CheckpointError unless `name` can be part of a file name."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot be part of a file name: use letters, digits, '_', '-' and '.', not "
            f"beginning with '.'"
        )


def require_size(path: Path, size_bytes: int) -> None:
    """Raises CheckpointError unless there is a file of this size."""
    found = _size_bytes(path)
    if found != size_bytes:
        raise CheckpointError(
            f"{path} has {found} bytes, the manifest says {size_bytes}; was it cut?"
        )


def write_table_file(folder: Path, server_index: int, source: TableSource) -> TableEntry:
    """Writes one server's shards of a table, through to the disk.

    Raises:
        CheckpointError: If it cannot be written.
    """
    spec, state_width = source.spec, source.state_width
    require_name(spec.name)
    path = folder / f"table.{spec.name}.server-{server_index}.arrow"
    schema = _table_schema(spec.name, spec.dim, state_width)
    batches = []
    with _create(path, schema) as file:
        for shard in source.shards:
            rows = source.export_shard(shard)
            columns = [pa.array(rows.keys), _lists(rows.weights)]
            if state_width:
                columns.append(_lists(rows.state))
            file.write_batch(pa.record_batch(columns, schema=schema))
            sha256 = shard_digest(rows).hex()
            batches.append(ShardBatch(shard=shard, rows=rows.keys.size, sha256=sha256))
    return TableEntry(
        file=path.name,
        size_bytes=_size_bytes(path),
        table=spec.name,
        state_width=state_width,
        batches=tuple(batches),
    )


def read_table_file(
    folder: Path, entry: TableEntry, dim: int, shards: Container[int]
) -> Iterator[tuple[int, Rows]]:
    """Yields those of `shards` that the file holds, with their numbers.

    Raises:
        CheckpointError: If the file was cut or altered, or belongs elsewhere.
    """
    path = folder / entry.file
    schema = _table_schema(entry.table, dim, entry.state_width)
    with _open(path, schema, len(entry.batches)) as file:
        for position, saved in enumerate(entry.batches):
            if saved.shard in shards:
                rows = _to_rows(_read_batch(file, position, saved.rows, path))
                if shard_digest(rows).hex() != saved.sha256:
                    raise CheckpointError(
                        f"{path} was altered: record batch {position}, shard {saved.shard}, does not "
                        f"match its sha256 in the manifest"
                    )
                yield saved.shard, rows


def write_dense_file(folder: Path, server_index: int, source: DenseSource) -> DenseEntry:
    """Writes one server's piece of a dense block, through to the disk.

    Raises:
        CheckpointError: If it cannot be written.
    """
    name, piece = source.spec.name, source.export()
    require_name(name)
    path = folder / f"dense.{name}.server-{server_index}.arrow"
    schema = _dense_schema(name, len(piece.element_state))
    columns = [piece.weights, *piece.element_state]
    with _create(path, schema) as file:
        file.write_batch(pa.record_batch([pa.array(column) for column in columns], schema=schema))
    return DenseEntry(
        file=path.name,
        size_bytes=_size_bytes(path),
        block=name,
        start=piece.start,
        length=piece.weights.size,
        num_states=len(piece.element_state),
        scalars=tuple(piece.scalars.tolist()),
        sha256=piece_digest(piece).hex(),
    )


def read_dense_file(folder: Path, entry: DenseEntry) -> DensePiece:
    """Returns the piece that the file holds.

    Raises:
        CheckpointError: If the file was cut or altered, or belongs elsewhere.
    """
    path = folder / entry.file
    with _open(path, _dense_schema(entry.block, entry.num_states), 1) as file:
        weights, *states = map(_to_numpy, _read_batch(file, 0, entry.length, path).columns)
    piece = DensePiece(
        start=entry.start,
        weights=weights,
        element_state=np.stack(states) if states else np.empty((0, entry.length), np.float32),
        scalars=np.array(entry.scalars, np.float32),
    )
    if piece_digest(piece).hex() != entry.sha256:
        raise CheckpointError(f"{path} was altered: it does not match its sha256 in the manifest")
    return piece


def _table_schema(name: str, dim: int, state_width: int) -> pa.Schema:
    fields = [_field("key", pa.uint64()), _field("weights", _list_type(dim))]
    if state_width:
        fields.append(_field("state", _list_type(state_width)))
    return pa.schema(fields, {**_metadata("table", name), "ctr_ps.dim": str(dim)})


def _dense_schema(name: str, num_states: int) -> pa.Schema:
    names = ["weight", *(f"state_{j}" for j in range(num_states))]
    return pa.schema([_field(name, pa.float32()) for name in names], _metadata("block", name))


def _metadata(kind: str, name: str) -> dict[str, str]:
    return {"ctr_ps.format_version": str(FORMAT_VERSION), f"ctr_ps.{kind}": name}


def _field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_type(width: int) -> pa.DataType:
    return pa.list_(_field("item", pa.float32()), width)


def _lists(values: Values) -> pa.Array:
    """Returns float32[N, D] as N lists of D."""
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=_list_type(values.shape[1]))


def _to_numpy(column: pa.Array) -> Values:
    values: Values = column.to_numpy(zero_copy_only=True)
    return values


def _to_rows(batch: pa.RecordBatch) -> Rows:
    keys, *matrices = batch.columns
    weights, *state = (
        _to_numpy(column.flatten()).reshape(len(column), column.type.list_size)
        for column in matrices
    )
    return Rows(
        keys=keys.to_numpy(zero_copy_only=True),
        weights=weights,
        state=state[0] if state else np.empty((len(keys), 0), np.float32),
    )


@contextmanager
def _arrow_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as exc:
        raise CheckpointError(f"{path}: {exc}") from exc


@contextmanager
def _create(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    with _arrow_errors(path):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
            yield file
        # Here and not when publishing: another machine cannot force this one's pages to disk.
        sync(path)


@contextmanager
def _open(
    path: Path, schema: pa.Schema, num_batches: int
) -> Iterator[pa.ipc.RecordBatchFileReader]:
    with _arrow_errors(path), pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        if not file.schema.equals(schema, check_metadata=True):
            raise CheckpointError(
                f"{path} was altered or belongs elsewhere: its schema is not {_words(schema)}"
            )
        if file.num_record_batches != num_batches:
            raise CheckpointError(
                f"{path} was altered: it has {file.num_record_batches} record batches, the manifest "
                f"says {num_batches}"
            )
        yield file


def _read_batch(
    file: pa.ipc.RecordBatchFileReader, position: int, num_rows: int, path: Path
) -> pa.RecordBatch:
    batch = file.get_batch(position)
    batch.validate(full=True)  # so that a damaged length is an error, and not a read out of bounds
    if batch.num_rows != num_rows:
        raise CheckpointError(
            f"{path} was altered: record batch {position} has {batch.num_rows} rows, the manifest "
            f"says {num_rows}"
        )
    return batch


def _words(schema: pa.Schema) -> str:
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    return f"({columns}) {schema.metadata}"


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise CheckpointError(f"{path} is part of the checkpoint, but: {exc.strerror}") from exc
