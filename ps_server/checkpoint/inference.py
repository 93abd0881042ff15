"""Inference checkpoints: weights only, of rows with a minimum score.

    rows with a score of at least min_score  -->  key, weights as float32 or float16
    dense blocks                             -->  weights as float32

Without optimizer state and statistics they cannot be loaded for training.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import InferenceSettings
from ctr_ps.ps_server.checkpoint.files.format import write_dense_file, write_table_file
from ctr_ps.ps_server.checkpoint.files.manifest import Entry
from ctr_ps.ps_server.checkpoint.storage.folders import Folder
from ctr_ps.ps_server.table.contents import DensePiece, DenseSource, Rows, TableSource
from ctr_ps.ps_server.table.rows.statistics import scores_of


@dataclass(frozen=True, slots=True)
class _InferenceRows:
    """A `TableSource` of the weights of rows with at least `min_score`."""

    source: TableSource
    settings: InferenceSettings
    state_width: int = 0
    statistics_width: int = 0

    @property
    def spec(self) -> TableSpec:
        return self.source.spec

    @property
    def shards(self) -> Iterable[int]:
        return self.source.shards

    def export_shard(self, shard: int) -> Rows:
        rows = self.source.export_shard(shard)
        kept = np.ones(rows.keys.size, np.bool_)
        if self.spec.statistics is not None and rows.statistics.shape[1]:
            kept = scores_of(rows.statistics, self.spec.statistics) >= self.settings.min_score
        nothing = np.empty((int(kept.sum()), 0), np.float32)
        return Rows(
            keys=rows.keys[kept],
            weights=_narrowed(self.spec.name, rows.weights[kept], self.settings),
            state=nothing,
            statistics=nothing,
        )


@dataclass(frozen=True, slots=True)
class _InferenceBlock:
    source: DenseSource

    @property
    def spec(self) -> DenseSpec:
        return self.source.spec

    def export(self) -> DensePiece:
        piece = self.source.export()
        nothing = np.empty((0, piece.weights.size), np.float32)
        return DensePiece(piece.start, piece.weights, nothing, np.empty(0, np.float32))


def _narrowed(table: str, weights: Values, settings: InferenceSettings) -> Values:
    with np.errstate(over="ignore"):
        narrowed = weights.astype(settings.dtype)
    if not np.array_equal(np.isfinite(narrowed), np.isfinite(weights)):
        largest = float(np.abs(weights[np.isfinite(weights)]).max())
        raise CheckpointError(
            f"table {table!r} has a weight of {largest:g}, out of the range of {settings.dtype}: use float32"
        )
    return narrowed


def write_inference_share(
    folder: Folder,
    server_index: int,
    tables: Sequence[TableSource],
    blocks: Sequence[DenseSource],
    settings: InferenceSettings,
) -> list[Entry]:
    """Writes one server's share of an inference checkpoint into the folder of a save.

    Raises CheckpointError if it cannot be written, if `min_score` is set and a table has no statistics, or if
    weights are out of the dtype's range.
    """
    for table in tables:
        if settings.min_score > 0 and not table.statistics_width:
            raise CheckpointError(
                f"table {table.spec.name!r} keeps no statistics, so its rows have no scores: save with "
                f"min_score = 0, not {settings.min_score:g}"
            )
    return [
        *(
            write_table_file(
                folder, server_index, _InferenceRows(table, settings), dtype=settings.dtype
            )
            for table in tables
        ),
        *(write_dense_file(folder, server_index, _InferenceBlock(block)) for block in blocks),
    ]
