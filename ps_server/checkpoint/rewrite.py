"""New checkpoints made of one: compacted, with other rows, or for inference; and its tables as Parquet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import InferenceSettings, WorkerProgress
from ctr_ps.ps_server.checkpoint.chain import ShardChange, dependants, merged
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.publish import read_manifest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at
from ctr_ps.ps_server.checkpoint.writer import (
    save_checkpoint,
    shared_folder,
    write_inference_share,
    write_share,
)
from ctr_ps.ps_server.optimizers.registry import initial_state
from ctr_ps.ps_server.table.contents import ContentT, DensePiece, Rows, ShardSource
from ctr_ps.ps_server.table.rows.statistics import seconds_of, unknown_statistics, wall_clock


def compact(checkpoint: Checkpoint, target: str | Path) -> None:
    """Saves the model of a delta, or of a full checkpoint, as a full checkpoint, one file for each table.

    Every checksum is compared. `target` may be that of the checkpoint itself, if no other delta needs it.
    Raises CheckpointError if a file was altered, a delta needs the checkpoint at the target, or it cannot be
    written; the target is left unchanged.
    """
    _save_changed(checkpoint, target, _tables_of(checkpoint), checkpoint.manifest.workers)


def import_rows(
    checkpoint: Checkpoint, target: str | Path, table: str, keys: Keys, weights: Values
) -> None:
    """Saves a checkpoint in which rows begin with other weights, or are new; see `compact`.

    Their optimizer state is that of a new row; with statistics, they have no shows, and are seen now. `keys`
    uint64[N] are unique, `weights` float32[N, D]. Raises UsageError if there is no such table, or the weights
    are not of its dim.
    """
    checkpoint.require_trainable()
    if table not in checkpoint.tables:
        known = ", ".join(sorted(checkpoint.tables))
        raise UsageError(f"{checkpoint.url} has no table {table!r}, only {known}")
    spec = checkpoint.tables[table]
    if weights.shape != (keys.size, spec.dim):
        raise UsageError(
            f"table {table!r} has rows of dim {spec.dim}, but the vectors have {weights.shape[1]} numbers"
        )
    order = np.argsort(keys)
    keys, weights = keys[order], weights[order]
    places = ShardMap.of(spec.num_shards).route(keys, spec.num_shards)
    state, now = initial_state(spec.optimizer, spec.dim), seconds_of(wall_clock)

    def changed(shard: int) -> Rows:
        rows, own = _shard_of(checkpoint.read_shards, table, shard), places[shard]
        new = Rows(
            keys=keys[own],
            weights=weights[own],
            state=np.tile(state, (own.size, 1)),
            statistics=unknown_statistics(own.size, rows.statistics.shape[1], now),
        )
        return merged(rows, ShardChange(new, np.empty(0, np.uint64), 0, 1.0))

    tables = [
        replace(each, export_shard=changed) if each.spec.name == table else each
        for each in _tables_of(checkpoint)
    ]
    _save_changed(checkpoint, target, tables, {})


def export_inference(
    checkpoint: Checkpoint, target: str | Path, settings: InferenceSettings
) -> tuple[int, int]:
    """Saves an inference checkpoint of a checkpoint, of which every checksum is compared.

    Returns the numbers of rows, over all tables, that were written, and left out for their score. Raises
    CheckpointError as `write_inference_share`, or if a file was altered; the target is left unchanged.
    """
    checkpoint.require_trainable()
    found: dict[tuple[str, int], int] = {}

    def counted(table: ShardSource[Rows], shard: int) -> Rows:
        rows = table.export_shard(shard)
        found[table.spec.name, shard] = rows.keys.size
        return rows

    def write_shares(url: str, token: str) -> list[Share]:
        tables = [
            replace(table, export_shard=partial(counted, table)) for table in _tables_of(checkpoint)
        ]
        folder, blocks = shared_folder(url, token), _blocks_of(checkpoint)
        entries = write_inference_share(folder, 0, tables, blocks, settings)
        return [Share(entries=tuple(entries), version=checkpoint.manifest.version)]

    _save_again(checkpoint, target, write_shares, is_inference=True)
    manifest = read_manifest(folder_at(target))
    written = sum(map(manifest.num_rows, checkpoint.tables))
    return written, sum(found.values()) - written


def _save_changed(
    checkpoint: Checkpoint,
    target: str | Path,
    tables: Sequence[ShardSource[Rows]],
    workers: Mapping[int, WorkerProgress],
) -> None:
    checkpoint.require_trainable()
    manifest = checkpoint.manifest
    candidates, counters = [], []
    for name, spec in checkpoint.tables.items():
        shards = range(spec.num_shards)
        if files := manifest.files_of_table(name, "candidates"):
            keys = partial(_shard_of, checkpoint.read_candidates, name)
            width = files[0].statistics_width
            candidates.append(ShardSource(replace(spec, dim=0), shards, keys, 0, width))
        if manifest.files_of_counters(name):
            read = partial(_shard_of, checkpoint.read_counters, name)
            counters.append(ShardSource(spec, shards, read))

    def write_shares(url: str, token: str) -> list[Share]:
        entries = write_share(
            shared_folder(url, token),
            0,
            tables,
            _blocks_of(checkpoint),
            candidates=candidates,
            counters=counters,
        )
        return [
            Share(
                entries=tuple(entries),
                version=manifest.version,
                batches=manifest.batches,
                workers=workers,
            )
        ]

    _save_again(checkpoint, target, write_shares)


def _save_again(
    checkpoint: Checkpoint,
    target: str | Path,
    write_shares: Callable[[str, str], Sequence[Share]],
    *,
    is_inference: bool = False,
) -> None:
    # A job may replace a base, as it saves its deltas again; here they would be lost.
    folder = folder_at(target)
    if names := dependants(folder):
        raise CheckpointError(
            f"{folder.url} is the base of {', '.join(names)} in the same folder, so it is not replaced: "
            "write to another folder"
        )
    save_checkpoint(
        target,
        write_shares=write_shares,
        tables=checkpoint.tables,
        blocks=checkpoint.blocks,
        attachments={name: checkpoint.attachment(name) for name in checkpoint.attachments},
        is_inference=is_inference,
        clock=lambda: checkpoint.manifest.created,  # its age does not change
    )


def _tables_of(checkpoint: Checkpoint) -> list[ShardSource[Rows]]:
    """Returns the tables of a checkpoint as sources; a shard is read, and its checksum compared, in time."""
    tables = []
    for name, spec in checkpoint.tables.items():
        file = checkpoint.manifest.files_of_table(name)[0]
        read = partial(_shard_of, checkpoint.read_shards, name)
        shards = range(spec.num_shards)
        tables.append(ShardSource(spec, shards, read, file.state_width, file.statistics_width))
    return tables


def _blocks_of(checkpoint: Checkpoint) -> dict[str, DensePiece]:
    return {
        name: checkpoint.read_dense(name, slice(0, spec.length))
        for name, spec in checkpoint.blocks.items()
    }


def _shard_of(
    read: Callable[[str, Sequence[int]], Iterator[tuple[int, ContentT]]], table: str, shard: int
) -> ContentT:
    [(_, content)] = read(table, [shard])
    return content


def export_table(checkpoint: Checkpoint, name: str, folder: Folder, *, with_state: bool) -> str:
    """Writes a table's rows to `<name>.parquet` in `folder`, shard by shard; returns the file's name.

    Raises UsageError if the file exists, CheckpointError if it cannot be written, there is no such table, or
    a file was altered.
    """
    spec, file = checkpoint.table(name), f"{name}.parquet"
    if folder.has(file):
        raise UsageError(f"{folder.url}/{file} exists: remove it, or export elsewhere")
    shards = checkpoint.read_shards(name, range(spec.num_shards))
    tables = (_columns(rows, with_state=with_state) for _, rows in shards)
    first = next(tables)
    with folder.create(file) as sink, pq.ParquetWriter(sink, first.schema) as writer:
        for table in chain([first], tables):
            if table.num_rows:
                writer.write_table(table)
    return file


def _columns(rows: Rows, *, with_state: bool) -> pa.Table:
    columns = {"key": pa.array(rows.keys), "weights": _lists(rows.weights)}
    if with_state and rows.state.shape[1]:
        columns["state"] = _lists(rows.state)
    if rows.statistics.shape[1]:
        *counts, last_seen = np.ascontiguousarray(rows.statistics.T)
        names = ("show", "click", "unseen", "last_seen")
        for name, column in zip(names, [*counts, last_seen.view(np.uint32)], strict=True):
            columns[name] = pa.array(column)
    return pa.table(columns)


def _lists(values: Values) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
