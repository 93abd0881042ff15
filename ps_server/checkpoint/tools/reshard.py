"""A checkpoint as another number of servers would have saved it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protos.errors import CheckpointError
from protos.placement import ShardMap
from protos.spec import DenseSpec, TableSpec
from ps_server.checkpoint.chain import require_unneeded
from ps_server.checkpoint.files.manifest import DenseEntry, Entry, Part, TableEntry
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.storage.folders import Folder, folder_at
from ps_server.checkpoint.writer import save_checkpoint, shared_folder, write_part
from ps_server.table.contents import (
    CountersSource,
    DensePiece,
    DenseSource,
    Rows,
    TableSource,
)


@dataclass(frozen=True, slots=True)
class _SavedTable:
    """A `TableSource` over a checkpoint."""

    checkpoint: Checkpoint
    spec: TableSpec
    shards: Sequence[int]
    state_width: int
    statistics_width: int

    def export_shard(self, shard: int) -> Rows:
        [(_, rows)] = self.checkpoint.read_shards(self.spec.name, [shard])
        return rows


class _SavedCandidates(_SavedTable):
    """A `TableSource` over the keys that have no row."""

    def export_shard(self, shard: int) -> Rows:
        [(_, rows)] = self.checkpoint.read_candidates(self.spec.name, [shard])
        return rows


@dataclass(frozen=True, slots=True)
class _SavedCounters:
    """A `CountersSource` over a checkpoint."""

    checkpoint: Checkpoint
    spec: TableSpec
    shards: Sequence[int]

    def export_shard(self, shard: int) -> NDArray[np.uint8]:
        [(_, counters)] = self.checkpoint.read_counters(self.spec.name, [shard])
        return counters


@dataclass(frozen=True, slots=True)
class _SavedBlock:
    """A `DenseSource` over a checkpoint."""

    checkpoint: Checkpoint
    spec: DenseSpec
    piece: slice

    def export(self) -> DensePiece:
        return self.checkpoint.read_dense(self.spec.name, self.piece)


def reshard(checkpoint: Checkpoint, target: str | Path, num_servers: int) -> None:
    """Saves a checkpoint anew, in the files that `num_servers` servers would have written.

    Args:
        checkpoint: What to save; every checksum is compared.
        target: Where to; may be the place of the checkpoint itself, if no delta needs that.
        num_servers: At least 1.

    Raises:
        CheckpointError: If a file was altered, a delta needs what is at the target, or it cannot be
            written; what was at the target stays.
    """
    if num_servers < 1:
        raise CheckpointError(f"cannot reshard for {num_servers} servers: give at least 1")
    checkpoint.require_trainable()
    manifest = checkpoint.manifest
    shard_map = ShardMap.of(num_servers)

    def write_parts(url: str, token: str) -> list[Part]:
        folder = shared_folder(url, token)
        return [
            Part(
                entries=tuple(_write_part(checkpoint, folder, server, shard_map)),
                version=manifest.version,
                workers=manifest.workers,
            )
            for server in shard_map.servers
        ]

    save_again(checkpoint, target, write_parts)


def save_again(
    checkpoint: Checkpoint,
    target: str | Path,
    write_parts: Callable[[str, str], Sequence[Part]],
    *,
    is_inference: bool = False,
) -> str:
    """Saves a checkpoint in other files; arguments as of `save_checkpoint`.

    Raises:
        CheckpointError: As of that, or if a delta needs what is at the target.
    """
    # A job may save the same names again, and its deltas with them; here they would never come back.
    require_unneeded(folder_at(target))
    return save_checkpoint(
        target,
        write_parts=write_parts,
        tables=checkpoint.tables,
        blocks=checkpoint.blocks,
        attachments={name: checkpoint.attachment(name) for name in checkpoint.attachments},
        is_inference=is_inference,
        clock=lambda: checkpoint.manifest.created,  # it is no newer than it was
    )


def _write_part(
    checkpoint: Checkpoint, folder: Folder, server: int, shard_map: ShardMap
) -> Sequence[Entry]:
    sources = sources_of(checkpoint, server, shard_map)
    return write_part(
        folder,
        server,
        sources.tables,
        sources.blocks,
        candidates=sources.candidates,
        counters=sources.counters,
    )


@dataclass(frozen=True, slots=True)
class SavedSources:
    """What one server would hold of a checkpoint, to be written."""

    tables: Sequence[TableSource]
    blocks: Sequence[DenseSource]
    candidates: Sequence[TableSource]
    counters: Sequence[CountersSource]


def sources_of(checkpoint: Checkpoint, server: int, shard_map: ShardMap) -> SavedSources:
    """Returns what server `server` of so many would hold of a checkpoint; every checksum is compared."""
    tables, candidates, counters = [], [], []
    for name, spec in checkpoint.tables.items():
        shards = shard_map.shards_of(server, spec.num_shards)
        files = checkpoint.manifest.files_of_table(name)[0]
        widths = (files.state_width, files.statistics_width)
        tables.append(_SavedTable(checkpoint, spec, shards, *widths))
        if files_of_candidates := checkpoint.manifest.files_of_candidates(name):
            width = files_of_candidates[0].statistics_width
            keys_only = replace(spec, dim=0)
            candidates.append(_SavedCandidates(checkpoint, keys_only, shards, 0, width))
        if checkpoint.manifest.files_of_counters(name):
            counters.append(_SavedCounters(checkpoint, spec, shards))
    blocks = [
        _SavedBlock(checkpoint, spec, shard_map.piece_of(server, spec.length))
        for spec in checkpoint.blocks.values()
    ]
    return SavedSources(tables, blocks, candidates, counters)


def compact(checkpoint: Checkpoint, target: str | Path) -> None:
    """Saves the model of a delta as a full checkpoint, in the files of as many servers as saved the delta.

    Args:
        checkpoint: What to save; every checksum is compared.
        target: Where to; may be the place of the delta, if no other delta needs that.

    Raises:
        CheckpointError: As `reshard`; what was at the target stays.
    """
    files = Counter(
        entry.table if isinstance(entry, TableEntry) else entry.block
        for entry in checkpoint.manifest.entries
        if isinstance(entry, DenseEntry) or (isinstance(entry, TableEntry) and entry.kind == "rows")
    )
    reshard(checkpoint, target, max(files.values(), default=1))
