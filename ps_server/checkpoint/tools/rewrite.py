"""Rewrites checkpoints: a delta as a full checkpoint, or with other rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.ps_server.checkpoint.chain import ShardChange, merged, require_unneeded
from ctr_ps.ps_server.checkpoint.files.manifest import Entry, Share
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at
from ctr_ps.ps_server.checkpoint.writer import save_checkpoint, shared_folder, write_share
from ctr_ps.ps_server.optimizers.registry import initial_state
from ctr_ps.ps_server.table.contents import DensePiece, DenseSource, Rows
from ctr_ps.ps_server.table.rows.statistics import seconds_of, unknown_statistics, wall_clock

ContentT = TypeVar("ContentT")


@dataclass(frozen=True, slots=True)
class SavedTable(Generic[ContentT]):
    """Shards of a table in a checkpoint, as a source for a writer.

    Attributes:
        spec: The table's.
        shards: Which shards.
        read: `Checkpoint.read_shards`, `read_candidates` or `read_counters`.
        state_width: Columns of optimizer state.
        statistics_width: Columns of statistics.
    """

    spec: TableSpec
    shards: Sequence[int]
    read: Callable[[str, Sequence[int]], Iterator[tuple[int, ContentT]]]
    state_width: int = 0
    statistics_width: int = 0

    def export_shard(self, shard: int) -> ContentT:
        """Reads a shard, and compares its checksum."""
        [(_, content)] = self.read(self.spec.name, [shard])
        return content


@dataclass(frozen=True, slots=True)
class _SavedBlock:
    """A `DenseSource` over a checkpoint."""

    checkpoint: Checkpoint
    spec: DenseSpec

    def export(self) -> DensePiece:
        return self.checkpoint.read_dense(self.spec.name, slice(0, self.spec.length))


def save_again(
    checkpoint: Checkpoint,
    target: str | Path,
    write_shares: Callable[[str, str], Sequence[Share]],
    *,
    is_inference: bool = False,
) -> str:
    """Saves a checkpoint with other shares; arguments are those of `save_checkpoint`.

    Raises:
        CheckpointError: As `save_checkpoint`, or if a delta needs the checkpoint at the target.
    """
    # A job may replace a base, as it saves its deltas again; here they would be lost.
    require_unneeded(folder_at(target))
    return save_checkpoint(
        target,
        write_shares=write_shares,
        tables=checkpoint.tables,
        blocks=checkpoint.blocks,
        attachments={name: checkpoint.attachment(name) for name in checkpoint.attachments},
        is_inference=is_inference,
        clock=lambda: checkpoint.manifest.created,  # its age does not change
    )


@dataclass(frozen=True, slots=True)
class SavedSources:
    """The shards and blocks of a checkpoint, as sources for a writer."""

    tables: Sequence[SavedTable[Rows]]
    blocks: Sequence[DenseSource]
    candidates: Sequence[SavedTable[Rows]]
    counters: Sequence[SavedTable[NDArray[np.uint8]]]


def sources_of(checkpoint: Checkpoint) -> SavedSources:
    """Returns all shards and blocks of a checkpoint."""
    tables, candidates, counters = [], [], []
    for name, spec in checkpoint.tables.items():
        shards = range(spec.num_shards)
        files = checkpoint.manifest.files_of_table(name)[0]
        widths = (files.state_width, files.statistics_width)
        tables.append(SavedTable(spec, shards, checkpoint.read_shards, *widths))
        if files_of_candidates := checkpoint.manifest.files_of_table(name, "candidates"):
            width = files_of_candidates[0].statistics_width
            keys_only = replace(spec, dim=0)
            candidates.append(SavedTable(keys_only, shards, checkpoint.read_candidates, 0, width))
        if checkpoint.manifest.files_of_counters(name):
            counters.append(SavedTable(spec, shards, checkpoint.read_counters))
    blocks = [_SavedBlock(checkpoint, spec) for spec in checkpoint.blocks.values()]
    return SavedSources(tables, blocks, candidates, counters)


def compact(checkpoint: Checkpoint, target: str | Path) -> None:
    """Saves the model of a delta, or of a full checkpoint, as a full checkpoint, one file for each table.

    Args:
        checkpoint: Checkpoint to save; every checksum is compared.
        target: Path or URL; may be that of the checkpoint itself, if no other delta needs it.

    Raises:
        CheckpointError: If a file was altered, a delta needs the checkpoint at the target, or it cannot be
            written; the target is left unchanged.
    """
    checkpoint.require_trainable()
    manifest, sources = checkpoint.manifest, sources_of(checkpoint)

    def write_shares(url: str, token: str) -> list[Share]:
        entries = _write_share(shared_folder(url, token), sources, sources.tables)
        return [
            Share(
                entries=tuple(entries),
                version=manifest.version,
                batches=manifest.batches,
                workers=manifest.workers,
            )
        ]

    save_again(checkpoint, target, write_shares)


def import_rows(
    checkpoint: Checkpoint, target: str | Path, table: str, keys: Keys, weights: Values
) -> None:
    """Saves a checkpoint in which rows begin with other weights, or are new.

    Their optimizer state is that of a new row; with statistics, they have no shows, and are seen now.

    Args:
        checkpoint: Checkpoint to save; every checksum is compared.
        target: Path or URL; may be that of the checkpoint itself, if no delta needs it.
        table: Name of the table.
        keys: uint64[N], unique.
        weights: float32[N, D].

    Raises:
        CheckpointError: As `compact`.
        UsageError: If there is no such table, or the weights are not of its dim.
    """
    checkpoint.require_trainable()
    if table not in checkpoint.tables:
        known = ", ".join(sorted(checkpoint.tables))
        raise UsageError(f"{checkpoint.url} has no table {table!r}, only {known}")
    spec = checkpoint.tables[table]
    if weights.shape != (keys.size, spec.dim):
        raise UsageError(
            f"table {table!r} has rows of dim {spec.dim}, and the vectors have {weights.shape[1]} numbers"
        )
    order = np.argsort(keys)
    keys, weights = keys[order], weights[order]
    places = ShardMap.of(spec.num_shards).route(keys, spec.num_shards)
    state, now = initial_state(spec.optimizer, spec.dim), seconds_of(wall_clock)

    def changed(name: str, shards: Sequence[int]) -> Iterator[tuple[int, Rows]]:
        for shard, rows in checkpoint.read_shards(name, shards):
            if name != table:
                yield shard, rows
                continue
            own = places[shard]
            new = Rows(
                keys=keys[own],
                weights=weights[own],
                state=np.tile(state, (own.size, 1)),
                statistics=unknown_statistics(own.size, rows.statistics.shape[1], now),
            )
            yield shard, merged(rows, ShardChange(new, np.empty(0, np.uint64), 0, 1.0))

    def write_shares(url: str, token: str) -> list[Share]:
        sources = sources_of(checkpoint)
        tables = [replace(each, read=changed) for each in sources.tables]
        entries = _write_share(shared_folder(url, token), sources, tables)
        return [Share(entries=tuple(entries), version=checkpoint.manifest.version)]

    save_again(checkpoint, target, write_shares)


def _write_share(
    folder: Folder, sources: SavedSources, tables: Sequence[SavedTable[Rows]]
) -> Sequence[Entry]:
    return write_share(
        folder,
        0,
        tables,
        sources.blocks,
        candidates=sources.candidates,
        counters=sources.counters,
    )
