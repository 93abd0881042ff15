"""Checkpoints to predict with: weights alone, of the rows that are worth it.

    rows with a score of at least min_score  -->  key, weights as float32 or float16
    dense blocks                             -->  weights as float32

They have no optimizer state and no statistics, so nothing can be trained on from them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protos.errors import CheckpointError
from protos.gradients import Values
from protos.spec import DenseSpec, TableSpec
from protos.store import InferenceSettings
from ps_server.checkpoint.files.format import write_dense_file, write_table_file
from ps_server.checkpoint.files.manifest import Entry, Part
from ps_server.checkpoint.publish import read_manifest
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.storage.folders import Folder, folder_at
from ps_server.checkpoint.tools.reshard import save_again, sources_of
from ps_server.checkpoint.writer import shared_folder
from ps_server.table.contents import DensePiece, DenseSource, Rows, TableSource
from ps_server.table.rows.statistics import scores_of


@dataclass(frozen=True, slots=True)
class _RowsOf:
    """What a `TableSource` has in common with the one whose rows it passes on."""

    source: TableSource

    @property
    def spec(self) -> TableSpec:
        return self.source.spec

    @property
    def shards(self) -> Iterable[int]:
        return self.source.shards


@dataclass(frozen=True, slots=True)
class _WorthyRows(_RowsOf):
    """A `TableSource` of the rows that are worth keeping, with weights alone."""

    settings: InferenceSettings
    state_width: int = 0
    statistics_width: int = 0

    def export_shard(self, shard: int) -> Rows:
        rows = self.source.export_shard(shard)
        stays = _scores(self.spec, rows) >= self.settings.min_score
        nothing = np.empty((int(stays.sum()), 0), np.float32)
        return Rows(
            keys=rows.keys[stays],
            weights=_narrowed(self.spec.name, rows.weights[stays], self.settings),
            state=nothing,
            statistics=nothing,
        )


@dataclass(frozen=True, slots=True)
class _Weights:
    """A `DenseSource` of weights alone."""

    source: DenseSource

    @property
    def spec(self) -> DenseSpec:
        return self.source.spec

    def export(self) -> DensePiece:
        piece = self.source.export()
        nothing = np.empty((0, piece.weights.size), np.float32)
        return DensePiece(piece.start, piece.weights, nothing, np.empty(0, np.float32))


def _scores(spec: TableSpec, rows: Rows) -> NDArray[np.float64]:
    """Returns the rows' scores float64[N]; of rows without statistics infinity."""
    if spec.statistics is None or not rows.statistics.shape[1]:
        return np.full(rows.keys.size, np.inf)
    return scores_of(rows.statistics, spec.statistics)


def _narrowed(table: str, weights: Values, settings: InferenceSettings) -> Values:
    with np.errstate(over="ignore"):
        narrowed = weights.astype(settings.dtype)
    if not np.array_equal(np.isfinite(narrowed), np.isfinite(weights)):
        largest = float(np.abs(weights[np.isfinite(weights)]).max())
        raise CheckpointError(
            f"table {table!r} has a weight of {largest:g}, which no {settings.dtype} holds: use float32"
        )
    return narrowed


def write_inference_part(
    folder: Folder,
    server_index: int,
    tables: Sequence[TableSource],
    blocks: Sequence[DenseSource],
    settings: InferenceSettings,
) -> list[Entry]:
    """Writes what of one server's shards and pieces predictions need into the folder of a save.

    Raises:
        CheckpointError: If it cannot be written, if rows are to have a score and have none, or if weights are
            too large.
    """
    for table in tables:
        if settings.min_score > 0 and not table.statistics_width:
            raise CheckpointError(
                f"table {table.spec.name!r} keeps no statistics, so its rows have no score: save with "
                f"min_score = 0, not {settings.min_score:g}"
            )
    return [
        *(
            write_table_file(
                folder, server_index, _WorthyRows(table, settings), dtype=settings.dtype
            )
            for table in tables
        ),
        *(write_dense_file(folder, server_index, _Weights(block)) for block in blocks),
    ]


@dataclass(frozen=True, slots=True)
class _CountedRows(_RowsOf):
    """A `TableSource` that notes how many rows each shard of a table has."""

    num_rows: dict[tuple[str, int], int]

    @property
    def state_width(self) -> int:
        return self.source.state_width

    @property
    def statistics_width(self) -> int:
        return self.source.statistics_width

    def export_shard(self, shard: int) -> Rows:
        rows = self.source.export_shard(shard)
        self.num_rows[self.spec.name, shard] = rows.keys.size
        return rows


@dataclass(frozen=True, slots=True)
class ExportedRows:
    """How many rows of all tables were written, and how many left out for their score."""

    written: int
    left_out: int


def export_inference(
    checkpoint: Checkpoint, target: str | Path, settings: InferenceSettings
) -> ExportedRows:
    """Saves a checkpoint as one to predict with, and returns how many rows are in it.

    Args:
        checkpoint: What to save; every checksum is compared.
        target: Where to.
        settings: What of it.

    Raises:
        CheckpointError: As `write_inference_part`, or if a file was altered; what was at the target stays.
    """
    checkpoint.require_trainable()
    found: dict[tuple[str, int], int] = {}

    def write_parts(url: str, token: str) -> list[Part]:
        sources = sources_of(checkpoint, 0, 1)
        folder = shared_folder(url, token)
        tables = [_CountedRows(table, found) for table in sources.tables]
        entries = write_inference_part(folder, 0, tables, sources.blocks, settings)
        return [Part(entries=tuple(entries), version=checkpoint.manifest.version)]

    save_again(checkpoint, target, write_parts, is_inference=True)
    manifest = read_manifest(folder_at(target))
    written = sum(map(manifest.num_rows, checkpoint.tables))
    return ExportedRows(written=written, left_out=sum(found.values()) - written)
