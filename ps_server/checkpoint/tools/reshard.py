"""Rewriting of checkpoints: for another number of servers, or a delta as a full checkpoint."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.errors import CheckpointError
from protos.placement import ShardMap
from protos.spec import DenseSpec, TableSpec
from ps_server.checkpoint.chain import require_unneeded
from ps_server.checkpoint.files.manifest import DenseEntry, Entry, Share, TableEntry
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.storage.folders import Folder, folder_at
from ps_server.checkpoint.writer import save_checkpoint, shared_folder, write_share
from ps_server.table.contents import DensePiece, DenseSource, Rows

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
    piece: slice

    def export(self) -> DensePiece:
        return self.checkpoint.read_dense(self.spec.name, self.piece)


def reshard(checkpoint: Checkpoint, target: str | Path, num_servers: int) -> None:
    """Saves a checkpoint as `num_servers` servers would have written it.

    Args:
        checkpoint: Checkpoint to save; every checksum is compared.
        target: Path or URL; may be that of the checkpoint itself, if no delta needs it.
        num_servers: At least 1.

    Raises:
        CheckpointError: If a file was altered, a delta needs the checkpoint at the target, or it cannot be
            written; the target is left unchanged.
    """
    if num_servers < 1:
        raise CheckpointError(f"cannot reshard for {num_servers} servers: give at least 1")
    checkpoint.require_trainable()
    manifest = checkpoint.manifest
    shard_map = ShardMap.of(num_servers)

    def write_shares(url: str, token: str) -> list[Share]:
        folder = shared_folder(url, token)
        return [
            Share(
                entries=tuple(_write_share(checkpoint, folder, server, shard_map)),
                version=manifest.version,
                batches=manifest.batches,
                workers=manifest.workers,
            )
            for server in shard_map.servers
        ]

    save_again(checkpoint, target, write_shares)


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


def _write_share(
    checkpoint: Checkpoint, folder: Folder, server: int, shard_map: ShardMap
) -> Sequence[Entry]:
    sources = sources_of(checkpoint, server, shard_map)
    return write_share(
        folder,
        server,
        sources.tables,
        sources.blocks,
        candidates=sources.candidates,
        counters=sources.counters,
    )


@dataclass(frozen=True, slots=True)
class SavedSources:
    """The shards and pieces of a checkpoint that one server would hold."""

    tables: Sequence[SavedTable[Rows]]
    blocks: Sequence[DenseSource]
    candidates: Sequence[SavedTable[Rows]]
    counters: Sequence[SavedTable[NDArray[np.uint8]]]


def sources_of(checkpoint: Checkpoint, server: int, shard_map: ShardMap) -> SavedSources:
    """Returns the shards and pieces that a server would hold."""
    tables, candidates, counters = [], [], []
    for name, spec in checkpoint.tables.items():
        shards = shard_map.shards_of(server, spec.num_shards)
        files = checkpoint.manifest.files_of_table(name)[0]
        widths = (files.state_width, files.statistics_width)
        tables.append(SavedTable(spec, shards, checkpoint.read_shards, *widths))
        if files_of_candidates := checkpoint.manifest.files_of_table(name, "candidates"):
            width = files_of_candidates[0].statistics_width
            keys_only = replace(spec, dim=0)
            candidates.append(SavedTable(keys_only, shards, checkpoint.read_candidates, 0, width))
        if checkpoint.manifest.files_of_counters(name):
            counters.append(SavedTable(spec, shards, checkpoint.read_counters))
    blocks = [
        _SavedBlock(checkpoint, spec, shard_map.piece_of(server, spec.length))
        for spec in checkpoint.blocks.values()
    ]
    return SavedSources(tables, blocks, candidates, counters)


def compact(checkpoint: Checkpoint, target: str | Path) -> None:
    """Saves the model of a delta as a full checkpoint, for the same number of servers.

    Args:
        checkpoint: Checkpoint to save; every checksum is compared.
        target: Path or URL; may be that of the delta, if no other delta needs it.

    Raises:
        CheckpointError: As `reshard`.
    """
    files = Counter(
        entry.table if isinstance(entry, TableEntry) else entry.block
        for entry in checkpoint.manifest.entries
        if isinstance(entry, DenseEntry) or (isinstance(entry, TableEntry) and entry.kind == "rows")
    )
    reshard(checkpoint, target, max(files.values(), default=1))
