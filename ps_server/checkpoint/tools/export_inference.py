"""A checkpoint to train on, saved again as one to predict with."""

from dataclasses import dataclass
from pathlib import Path

from protos.placement import ONE_SERVER
from protos.store import InferenceSettings
from ps_server.checkpoint.files.manifest import Part
from ps_server.checkpoint.inference import RowsOf, write_inference_part
from ps_server.checkpoint.publish import read_manifest
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.storage.folders import folder_at
from ps_server.checkpoint.tools.reshard import save_again, sources_of
from ps_server.checkpoint.writer import shared_folder
from ps_server.table.contents import Rows


@dataclass(frozen=True, slots=True)
class _CountedRows(RowsOf):
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
        sources = sources_of(checkpoint, 0, ONE_SERVER)
        folder = shared_folder(url, token)
        tables = [_CountedRows(table, found) for table in sources.tables]
        entries = write_inference_part(folder, 0, tables, sources.blocks, settings)
        return [Part(entries=tuple(entries), version=checkpoint.manifest.version)]

    save_again(checkpoint, target, write_parts, is_inference=True)
    manifest = read_manifest(folder_at(target))
    written = sum(map(manifest.num_rows, checkpoint.tables))
    return ExportedRows(written=written, left_out=sum(found.values()) - written)
