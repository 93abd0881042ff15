"""Exports: tables as Parquet or text for other programs, and inference checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.store import InferenceSettings
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.publish import read_manifest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at
from ctr_ps.ps_server.checkpoint.tools.rewrite import save_again, sources_of
from ctr_ps.ps_server.checkpoint.writer import shared_folder, write_inference_share
from ctr_ps.ps_server.table.contents import Rows

ExportFormat = Literal["parquet", "text"]

_STATISTICS = ("show", "click", "unseen", "last_seen")


def export_table(
    checkpoint: Checkpoint, name: str, folder: Folder, kind: ExportFormat, *, with_state: bool
) -> str:
    """Writes a table's rows to a file in `folder`, shard by shard; returns the file's name.

    Raises:
        CheckpointError: If there is no such table, a file was altered, or the new file cannot be written.
        UsageError: If the new file exists.
    """
    spec = checkpoint.table(name)
    file = f"{name}.{'parquet' if kind == 'parquet' else 'tsv'}"
    if folder.has(file):
        raise UsageError(f"{folder.url}/{file} exists: remove it, or export elsewhere")
    shards = checkpoint.read_shards(name, range(spec.num_shards))
    tables = (_columns(rows, with_state=with_state) for _, rows in shards)
    write = _write_parquet if kind == "parquet" else _write_text
    write(tables, folder, file)
    return file


def _columns(rows: Rows, *, with_state: bool) -> pa.Table:
    columns = {"key": pa.array(rows.keys), "weights": _lists(rows.weights)}
    if with_state and rows.state.shape[1]:
        columns["state"] = _lists(rows.state)
    if rows.statistics.shape[1]:
        *counts, last_seen = np.ascontiguousarray(rows.statistics.T)
        for name, column in zip(_STATISTICS, [*counts, last_seen.view(np.uint32)], strict=True):
            columns[name] = pa.array(column)
    return pa.table(columns)


def _lists(values: Values) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _write_parquet(tables: Iterator[pa.Table], folder: Folder, file: str) -> None:
    first = next(tables)
    with folder.create(file) as sink, pq.ParquetWriter(sink, first.schema) as writer:
        for table in _chain(first, tables):
            if table.num_rows:
                writer.write_table(table)


def _write_text(tables: Iterator[pa.Table], folder: Folder, file: str) -> None:
    """Writes a header line, columns separated by tabs, and the numbers of one column by blanks."""
    first = next(tables)
    with folder.create(file) as sink:
        sink.write("\t".join(first.column_names).encode() + b"\n")
        for table in _chain(first, tables):
            columns = [_texts(column.combine_chunks()) for column in table.columns]
            lines = ["\t".join(fields) + "\n" for fields in zip(*columns, strict=True)]
            sink.write("".join(lines).encode())


def _texts(column: pa.Array) -> Sequence[str]:
    """Returns the text of each row: the shortest that parses to the same numbers."""
    if not pa.types.is_fixed_size_list(column.type):
        texts: list[str] = column.to_numpy().astype(str).tolist()
        return texts
    matrix = column.flatten().to_numpy().reshape(len(column), column.type.list_size).astype(str)
    return [" ".join(row) for row in matrix.tolist()]


def _chain(first: pa.Table, rest: Iterator[pa.Table]) -> Iterator[pa.Table]:
    yield first
    yield from rest


@dataclass(frozen=True, slots=True)
class ExportedRows:
    """Number of rows written, over all tables, and omitted for their score."""

    written: int
    left_out: int


def export_inference(
    checkpoint: Checkpoint, target: str | Path, settings: InferenceSettings
) -> ExportedRows:
    """Saves an inference checkpoint of a checkpoint, of which every checksum is compared.

    Raises:
        CheckpointError: As `write_inference_share`, or if a file was altered; the target is left unchanged.
    """
    checkpoint.require_trainable()
    found: dict[tuple[str, int], int] = {}

    def counted(table: str, shards: Sequence[int]) -> Iterator[tuple[int, Rows]]:
        for shard, rows in checkpoint.read_shards(table, shards):
            found[table, shard] = rows.keys.size
            yield shard, rows

    def write_shares(url: str, token: str) -> list[Share]:
        sources = sources_of(checkpoint)
        folder = shared_folder(url, token)
        tables = [replace(table, read=counted) for table in sources.tables]
        entries = write_inference_share(folder, 0, tables, sources.blocks, settings)
        return [Share(entries=tuple(entries), version=checkpoint.manifest.version)]

    save_again(checkpoint, target, write_shares, is_inference=True)
    manifest = read_manifest(folder_at(target))
    written = sum(map(manifest.num_rows, checkpoint.tables))
    return ExportedRows(written=written, left_out=sum(found.values()) - written)
