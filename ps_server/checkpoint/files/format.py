"""Arrow files of a checkpoint, each written by one server.

    table.<name>.server-<i>.arrow        a record batch per shard: key, weights, state, statistics
    candidates.<name>.server-<i>.arrow   a record batch per shard: key, statistics
    removed.<name>.server-<i>.arrow      a record batch per shard: key
    counters.<name>.server-<i>.arrow     a record batch per shard: counter
    dense.<name>.server-<i>.arrow        one record batch: weight, state_0, state_1, ...

Arrays are read-only copies, returned only after a comparison of their checksums; a mapped file shows later
changes. A file that cannot be written, or was truncated or altered, raises CheckpointError.
"""

from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.runtime.environment import num_processors
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import InferenceDtype
from ctr_ps.ps_server.checkpoint.files.digest import checksum, shard_digest
from ctr_ps.ps_server.checkpoint.files.manifest import (
    FORMAT_VERSION,
    CountersEntry,
    DenseEntry,
    ShardBatch,
    TableEntry,
    TableKind,
    require_name,
)
from ctr_ps.ps_server.checkpoint.files.saved_rows import SavedRows, SavedShard, first_misplaced
from ctr_ps.ps_server.checkpoint.storage.folders import Folder
from ctr_ps.ps_server.table.contents import DensePiece, Rows
from ctr_ps.ps_server.table.table_snapshot import CountersSource, TableSource

_KEY_BYTES = 8

ENCODERS = min(2, max(1, num_processors() // 2))
"""Threads that encode shards; the other processors are left to training.

Copying, sorting and hashing take 50 to 80 ns per row of 88 bytes, so two keep up with a disk of 2 GB/s.
"""

T = TypeVar("T")


def encoded_in_order(
    encode: Callable[[int], T], shards: Iterable[int], *, encoders: int = ENCODERS
) -> Generator[T, None, None]:
    """Yields `encode(shard)` of each shard in order; close it to stop early.

        shard 4: being written | 5, 6: being encoded | 7, ...: not started

    So writing waits for the disk and not for sorting and hashing, and at most `encoders` + 1 shards are in
    memory beside the table.
    """
    remaining = iter(shards)
    with ThreadPoolExecutor(encoders, thread_name_prefix="encode") as threads:
        pending: deque[Future[T]] = deque(
            threads.submit(encode, shard) for shard in islice(remaining, encoders)
        )
        try:
            while pending:
                encoded = pending.popleft().result()
                pending.extend(threads.submit(encode, shard) for shard in islice(remaining, 1))
                yield encoded
                del encoded  # before the next is started
        finally:
            for future in pending:
                future.cancel()


def write_table_file(
    folder: Folder,
    server_index: int,
    source: TableSource,
    kind: TableKind = "rows",
    *,
    dtype: InferenceDtype = "float32",
) -> TableEntry:
    """Writes one server's shards of a table, or of keys without a row, durably; weights are of `dtype`."""
    table = source.spec.name
    file = _file_name(_PREFIXES[kind], table, server_index)
    widths = (source.spec.dim, source.state_width, source.statistics_width)
    schema = _rows_schema(table, widths, dtype)

    def encode(shard: int) -> tuple[pa.RecordBatch, ShardBatch]:
        rows = source.export_shard(shard)
        matrices = (rows.weights, rows.state, rows.statistics)
        typed = zip(matrices, _dtypes(dtype), strict=True)
        columns = [_lists(matrix, kind) for matrix, kind in typed if matrix.shape[1]]
        record = pa.record_batch([pa.array(rows.keys), *columns], schema=schema)
        return record, _batch_of(shard, rows)

    batches = []
    with (
        _create(folder, file, schema) as sink,
        closing(encoded_in_order(encode, source.shards)) as encoded,
    ):
        for record, batch in encoded:
            sink.write_batch(record)
            batches.append(batch)
            del record  # the next shard takes its memory
    return TableEntry(
        kind=kind,
        file=file,
        size_bytes=folder.files()[file],
        table=table,
        state_width=source.state_width,
        statistics_width=source.statistics_width,
        dtype=dtype,
        batches=tuple(batches),
    )


def read_table_file(
    folder: Folder, entry: TableEntry, spec: TableSpec, shards: Container[int]
) -> Iterator[tuple[int, Rows]]:
    """Yields the `shards` in a file with their numbers, weights as float32.

    `spec` is the table's, of dim 0 for candidates and removed keys.
    """
    for saved, rows in _read_rows(folder, entry, spec, shards, verifies=True):
        yield saved.shard, replace(rows, weights=rows.weights.astype(np.float32, copy=False))


def _read_rows(
    folder: Folder, entry: TableEntry, spec: TableSpec, shards: Container[int], *, verifies: bool
) -> Iterator[tuple[ShardBatch, Rows]]:
    """Yields shards, with keys in order and of their shard; compares checksums if `verifies`."""
    widths = (spec.dim, entry.state_width, entry.statistics_width)
    schema = _rows_schema(entry.table, widths, entry.dtype)
    for saved, batch in _read_shards(folder, entry, schema, shards):
        rows = _to_rows(batch, widths, entry.dtype)
        if verifies and _batch_of(saved.shard, rows) != saved:
            raise _altered(folder, entry.file, saved.shard)
        place = first_misplaced(rows.keys, saved.shard, spec.num_shards)
        if place < rows.keys.size:
            raise CheckpointError(
                f"{folder.url}/{entry.file} was altered: key {rows.keys[place]} is not in its place in shard "
                f"{saved.shard} of {spec.num_shards}"
            )
        yield saved, rows


def load_table_file(
    folder: Folder, entry: TableEntry, spec: TableSpec, *, verifies: bool
) -> SavedRows:
    """Reads keys and weights of a file into memory, for lookups; `verifies` the checksums of all columns."""
    row_bytes = spec.dim * np.dtype(entry.dtype).itemsize
    ends = {
        saved.shard: -(-saved.rows * (_KEY_BYTES + row_bytes) // _KEY_BYTES) * _KEY_BYTES
        for saved in entry.batches
    }
    content = np.empty(sum(ends.values()), np.uint8)
    shards, start = {}, 0
    numbers = range(spec.num_shards)
    for saved, rows in _read_rows(folder, entry, spec, numbers, verifies=verifies):
        values_at = start + saved.rows * _KEY_BYTES
        content[start:values_at].view(np.uint64)[:] = rows.keys
        if row_bytes:
            values = content[values_at : values_at + saved.rows * row_bytes]
            values.view(entry.dtype)[:] = rows.weights.reshape(-1)
        shards[saved.shard] = SavedShard(rows=saved.rows, keys_at=start, values_at=values_at)
        start += ends[saved.shard]
    return SavedRows(content, spec, np.dtype(entry.dtype), shards)


def map_table_file(folder: Folder, entry: TableEntry, spec: TableSpec) -> SavedRows:
    """Maps the rows of a file for lookups, without a comparison of checksums."""
    url = f"{folder.url}/{entry.file}"
    file = folder.map(entry.file)
    widths = (spec.dim, entry.state_width, entry.statistics_width)
    schema = _rows_schema(entry.table, widths, entry.dtype)
    reader = _reader_of(pa.BufferReader(file.content), schema, len(entry.batches), url)
    shards = {}
    for position, saved in enumerate(entry.batches):
        keys, *lists = _read_batch(reader, position, saved.rows, url).columns
        if saved.rows:
            # Rows without columns have no values to read.
            values = lists[0].values if spec.dim else keys
            shards[saved.shard] = SavedShard(
                rows=saved.rows,
                keys_at=_start_in(file.content, keys, url),
                values_at=_start_in(file.content, values, url),
            )
    content = np.frombuffer(file.content, np.uint8)
    return SavedRows(content, spec, np.dtype(entry.dtype), shards, file)


def write_counters_file(folder: Folder, server_index: int, source: CountersSource) -> CountersEntry:
    """Writes the counters of one server's shards of a table, durably."""
    table = source.spec.name
    file = _file_name("counters", table, server_index)
    schema = _counters_schema(table)
    batches = []
    with _create(folder, file, schema) as sink:
        for shard in source.shards:
            counters = source.export_shard(shard)
            sink.write_batch(pa.record_batch([pa.array(counters)], schema=schema))
            batches.append(_batch_of_counters(shard, counters))
    return CountersEntry(
        file=file, size_bytes=folder.files()[file], table=table, batches=tuple(batches)
    )


def read_counters_file(
    folder: Folder, entry: CountersEntry, shards: Container[int]
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields the counters of the `shards` in a file, with the shards' numbers."""
    for saved, batch in _read_shards(folder, entry, _counters_schema(entry.table), shards):
        counters: NDArray[np.uint8] = batch.column(0).to_numpy(zero_copy_only=True)
        if _batch_of_counters(saved.shard, counters) != saved:
            raise _altered(folder, entry.file, saved.shard)
        yield saved.shard, counters


def write_dense_file(folder: Folder, server_index: int, name: str, piece: DensePiece) -> DenseEntry:
    """Writes one server's piece of a dense block, durably."""
    file = _file_name("dense", name, server_index)
    schema = _dense_schema(name, len(piece.element_state))
    columns = [piece.weights, *piece.element_state]
    with _create(folder, file, schema) as sink:
        sink.write_batch(pa.record_batch([pa.array(column) for column in columns], schema=schema))
    return DenseEntry(
        file=file,
        size_bytes=folder.files()[file],
        block=name,
        start=piece.start,
        length=piece.weights.size,
        num_states=len(piece.element_state),
        scalars=tuple(piece.scalars.tolist()),
        xxh3=_checksum_of(piece),
    )


def read_dense_file(folder: Folder, entry: DenseEntry) -> DensePiece:
    """Returns the piece in a file."""
    with _open(folder, entry.file, _dense_schema(entry.block, entry.num_states), 1) as source:
        batch = _read_batch(source, 0, entry.length, f"{folder.url}/{entry.file}")
    weights, *states = (column.to_numpy(zero_copy_only=True) for column in batch.columns)
    piece = DensePiece(
        start=entry.start,
        weights=weights,
        element_state=np.stack(states) if states else np.empty((0, entry.length), np.float32),
        scalars=np.array(entry.scalars, np.float32),
    )
    if _checksum_of(piece) != entry.xxh3:
        raise CheckpointError(
            f"{folder.url}/{entry.file} was altered: its checksum (xxh3) differs from the manifest"
        )
    return piece


_PREFIXES: Mapping[TableKind, str] = {
    "rows": "table",
    "candidates": "candidates",
    "removed": "removed",
}


def _file_name(prefix: str, name: str, server_index: int) -> str:
    require_name(name)
    return f"{prefix}.{name}.server-{server_index}.arrow"


def _rows_schema(table: str, widths: Sequence[int], dtype: InferenceDtype) -> pa.Schema:
    columns = zip(("weights", "state", "statistics"), widths, _dtypes(dtype), strict=True)
    lists = [_field(name, _list_type(width, kind)) for name, width, kind in columns if width]
    metadata = {**_metadata("table", table), "ctr_ps.dim": str(widths[0])}
    return pa.schema([_field("key", pa.uint64()), *lists], metadata)


def _dtypes(dtype: InferenceDtype) -> tuple[InferenceDtype, InferenceDtype, InferenceDtype]:
    return dtype, "float32", "float32"


def _counters_schema(table: str) -> pa.Schema:
    return pa.schema([_field("counter", pa.uint8())], _metadata("table", table))


def _dense_schema(name: str, num_states: int) -> pa.Schema:
    names = ["weight", *(f"state_{j}" for j in range(num_states))]
    return pa.schema([_field(name, pa.float32()) for name in names], _metadata("block", name))


def _metadata(kind: str, name: str) -> dict[str, str]:
    return {"ctr_ps.format_version": str(FORMAT_VERSION), f"ctr_ps.{kind}": name}


def _field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_type(width: int, dtype: InferenceDtype) -> pa.DataType:
    kind = pa.float32() if dtype == "float32" else pa.float16()
    return pa.list_(_field("item", kind), width)


def _lists(values: Values, dtype: InferenceDtype) -> pa.Array:
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=_list_type(values.shape[1], dtype))


def _to_rows(batch: pa.RecordBatch, widths: Sequence[int], dtype: InferenceDtype) -> Rows:
    keys, *lists = batch.columns
    num_rows, columns = len(keys), iter(lists)
    weights, state, statistics = (
        next(columns).flatten().to_numpy(zero_copy_only=True).reshape(num_rows, width)
        if width
        else np.empty((num_rows, 0), kind)
        for width, kind in zip(widths, _dtypes(dtype), strict=True)
    )
    return Rows(
        keys=keys.to_numpy(zero_copy_only=True),
        weights=weights,
        state=state,
        statistics=statistics,
    )


def _batch_of(shard: int, rows: Rows) -> ShardBatch:
    has_statistics = rows.statistics.shape[1] > 0
    return ShardBatch(
        shard=shard,
        rows=rows.keys.size,
        xxh3=shard_digest(rows).hex(),
        statistics_xxh3=checksum(rows.statistics).hex() if has_statistics else "",
    )


def _batch_of_counters(shard: int, counters: NDArray[np.uint8]) -> ShardBatch:
    return ShardBatch(shard=shard, rows=counters.size, xxh3=checksum(counters).hex())


def _checksum_of(piece: DensePiece) -> str:
    return checksum(piece.weights, piece.element_state).hex()


def _altered(folder: Folder, file: str, shard: int) -> CheckpointError:
    return CheckpointError(
        f"{folder.url}/{file} was altered: the checksum (xxh3) of shard {shard} differs from the manifest"
    )


@contextmanager
def _create(folder: Folder, file: str, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    with folder.create(file) as sink, pa.ipc.new_file(sink, schema) as writer:
        yield writer


@contextmanager
def _open(
    folder: Folder, file: str, schema: pa.Schema, num_batches: int
) -> Iterator[pa.ipc.RecordBatchFileReader]:
    with folder.open(file) as source:
        yield _reader_of(source, schema, num_batches, f"{folder.url}/{file}")


def _reader_of(
    source: pa.NativeFile, schema: pa.Schema, num_batches: int, url: str
) -> pa.ipc.RecordBatchFileReader:
    with _parsing(url):
        reader = pa.ipc.open_file(source)
    if not reader.schema.equals(schema, check_metadata=True):
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
        raise CheckpointError(
            f"{url} was altered or is another file: expected the Arrow schema ({columns}) {schema.metadata}"
        )
    if reader.num_record_batches != num_batches:
        raise CheckpointError(
            f"{url} was altered: it has {reader.num_record_batches} record batches, the manifest "
            f"says {num_batches}"
        )
    return reader


def _read_shards(
    folder: Folder,
    entry: TableEntry | CountersEntry,
    schema: pa.Schema,
    shards: Container[int],
) -> Iterator[tuple[ShardBatch, pa.RecordBatch]]:
    if not any(saved.shard in shards for saved in entry.batches):
        return  # without opening the file
    with _open(folder, entry.file, schema, len(entry.batches)) as reader:
        for position, saved in enumerate(entry.batches):
            if saved.shard in shards:
                url = f"{folder.url}/{entry.file}"
                yield saved, _read_batch(reader, position, saved.rows, url)


def _read_batch(
    reader: pa.ipc.RecordBatchFileReader, position: int, num_rows: int, url: str
) -> pa.RecordBatch:
    with _parsing(url):
        batch = reader.get_batch(position)
        batch.validate(full=True)  # a damaged length must not be a read out of bounds
        lists = [each for each in batch.columns if pa.types.is_fixed_size_list(each.type)]
        if any(each.null_count for each in (*batch.columns, *(each.values for each in lists))):
            raise pa.ArrowInvalid("a column has missing numbers")
    if batch.num_rows != num_rows:
        raise CheckpointError(
            f"{url} was altered: record batch {position} has {batch.num_rows} rows, the manifest says "
            f"{num_rows}"
        )
    return batch


@contextmanager
def _parsing(url: str) -> Iterator[None]:
    """Turns Arrow's errors into a CheckpointError that names the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise CheckpointError(f"{url} was altered: {error}") from error


def _start_in(content: pa.Buffer, column: pa.Array, url: str) -> int:
    """Returns the offset of a column's values in a file, after a check of its bounds."""
    numbers = column.buffers()[1]
    start: int = numbers.address - content.address + column.offset * column.type.bit_width // 8
    size_bytes = len(column) * column.type.bit_width // 8
    if start % 8 or not 0 <= start <= content.size - size_bytes:
        raise CheckpointError(f"{url} was altered: a column is misaligned or outside of the file")
    return start
