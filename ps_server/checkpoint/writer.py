"""Saving: a server writes its share, and the saving process turns all shares into a checkpoint.

A share of an inference checkpoint has the weights alone, of rows with a minimum score. Without optimizer
state and statistics it cannot be loaded for training.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import InferenceSettings, merge_progress
from ctr_ps.ps_server.checkpoint.chain import beside
from ctr_ps.ps_server.checkpoint.files.format import (
    write_counters_file,
    write_dense_file,
    write_table_file,
)
from ctr_ps.ps_server.checkpoint.files.manifest import (
    ATTACHMENTS,
    TOKEN,
    Attachment,
    Entry,
    Manifest,
    Share,
    require_name,
)
from ctr_ps.ps_server.checkpoint.publish import discard, open_data, publish
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at
from ctr_ps.ps_server.table.contents import DensePiece, Rows, ShardSource
from ctr_ps.ps_server.table.rows.statistics import scores_of
from ctr_ps.ps_server.table.table_snapshot import CountersSource, TableSource


def shared_folder(url: str, token: str) -> Folder:
    """Returns the data folder of a save; raises CheckpointError unless it is the one that the saver sees."""
    folder = folder_at(url)
    advice = "servers and workers need shared storage, at the same path or URL"
    if not folder.has(TOKEN):
        raise CheckpointError(
            f"this server does not find the worker's folder {url}, or the save was aborted: {advice}"
        )
    if folder.read(TOKEN) != token.encode():
        raise CheckpointError(
            f"{url} is another folder on this server than on the worker: {advice}"
        )
    return folder


def check_folder(url: str, token: str, server_index: int) -> None:
    """Writes into the probe folder of `require_writable`; raises CheckpointError if that fails."""
    shared_folder(url, token).put(f"probe.server-{server_index}", b"")


def write_share(
    folder: Folder,
    server_index: int,
    tables: Sequence[TableSource],
    blocks: Mapping[str, DensePiece],
    *,
    candidates: Sequence[TableSource] = (),
    counters: Sequence[CountersSource] = (),
    removed: Sequence[ShardSource[Rows]] = (),
) -> list[Entry]:
    """Writes one server's share of a checkpoint into the folder of a save; idempotent.

    Of a delta `tables` have only changed rows, and `removed` the keys of rows removed since the base.
    `candidates` are keys not admitted yet, of tables that count them exactly, `counters` those of tables with
    a counting filter. Raises CheckpointError if a file cannot be written.
    """
    return [
        *(write_table_file(folder, server_index, table) for table in tables),
        *(write_table_file(folder, server_index, keys, "candidates") for keys in candidates),
        *(write_counters_file(folder, server_index, table) for table in counters),
        *(
            replace(write_table_file(folder, server_index, keys, "removed"), passes=keys.passes)
            for keys in removed
        ),
        *(write_dense_file(folder, server_index, name, piece) for name, piece in blocks.items()),
    ]


def write_inference_share(
    folder: Folder,
    server_index: int,
    tables: Sequence[TableSource],
    blocks: Mapping[str, DensePiece],
    settings: InferenceSettings,
) -> list[Entry]:
    """Writes one server's share of an inference checkpoint into the folder of a save.

    Raises CheckpointError if it cannot be written, if `min_score` is set and a table has no statistics, or if
    weights are out of the dtype's range.
    """
    for table in tables:
        if settings.min_score > 0 and not table.statistics_width:
            raise CheckpointError(
                f"min_score is {settings.min_score:g}, but table {table.spec.name!r} keeps no statistics "
                "and so no scores: save with min_score = 0"
            )
    entries: list[Entry] = []
    for table in tables:
        weights = ShardSource(table.spec, table.shards, partial(_weights_of, table, settings))
        entries.append(write_table_file(folder, server_index, weights, dtype=settings.dtype))
    for name, piece in blocks.items():
        nothing = np.empty((0, piece.weights.size), np.float32)
        bare = replace(piece, element_state=nothing, scalars=np.empty(0, np.float32))
        entries.append(write_dense_file(folder, server_index, name, bare))
    return entries


def _weights_of(source: TableSource, settings: InferenceSettings, shard: int) -> Rows:
    """Returns the weights of a shard's rows with at least `min_score`, in the dtype of the settings."""
    rows, spec = source.export_shard(shard), source.spec
    kept = np.ones(rows.keys.size, np.bool_)
    if spec.statistics is not None and rows.statistics.shape[1]:
        kept = scores_of(rows.statistics, spec.statistics) >= settings.min_score
    weights = rows.weights[kept]
    with np.errstate(over="ignore"):
        narrowed = weights.astype(settings.dtype)
    if not np.array_equal(np.isfinite(narrowed), np.isfinite(weights)):
        largest = float(np.abs(weights[np.isfinite(weights)]).max())
        raise CheckpointError(
            f"table {spec.name!r} has a weight of {largest:g}, out of the range of {settings.dtype}: use "
            f"float32"
        )
    nothing = narrowed[:, :0].astype(np.float32)
    return Rows(keys=rows.keys[kept], weights=narrowed, state=nothing, statistics=nothing)


def open_base(base: str | Path, target: str | Path) -> Checkpoint:
    """Opens the base of a delta to be saved at `target`.

    Raises CheckpointError if it does not exist, is in another folder, or would be replaced by the delta.
    """
    checkpoint, folder = Checkpoint.open(base), folder_at(target)
    checkpoint.require_trainable()
    if beside(folder, checkpoint.name).url != checkpoint.url:
        raise CheckpointError(
            f"a delta at {folder.url} cannot be based on {checkpoint.url}: both must be in one folder"
        )
    if folder.url in [link.url for link in checkpoint.chain]:
        raise CheckpointError(
            f"a delta based on {checkpoint.url} cannot replace {folder.url}, which it needs: choose "
            "another name"
        )
    return checkpoint


def save_checkpoint(
    # path or URL. A checkpoint there is replaced, but not one for training by one for inference or
    # vice versa
    target: str | Path,
    *,
    # called with the URL of the data folder and the token; lets every server write its share, after
    # `shared_folder`, and returns all shares
    write_shares: Callable[[str, str], Sequence[Share]],
    tables: Mapping[str, TableSpec],  # every table, by name
    blocks: Mapping[str, DenseSpec],  # every dense block, by name
    attachments: Mapping[str, bytes],  # opaque files to save with the parameters, by name
    base: Checkpoint | None = None,  # base of a delta, from `open_base`; None: not a delta
    is_inference: bool = False,  # whether the shares are written by `write_inference_share`
    # called before publication; raises if this process must not publish any more
    confirm: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.time,  # seconds since 1970
) -> str:
    """Saves and publishes a checkpoint, and returns the model's digest; "" for a delta.

    Raises CheckpointError if it cannot be written, or is not complete; an older checkpoint is kept.
    """
    for name in attachments:
        require_name(name)
    folder, created = folder_at(target), clock()
    data, token = open_data(folder, is_inference=is_inference)
    try:
        shares = write_shares(data.url, token)
        manifest = Manifest(
            kind="inference" if is_inference else "full" if base is None else "delta",
            base=None if base is None else base.name,
            base_sha256="" if base is None else base.sha256,
            data_folder=data.name,
            created=created,
            version=min((share.version for share in shares), default=0),
            batches=min((share.batches for share in shares), default=0),
            workers=merge_progress([share.workers for share in shares]),
            model_digest="",  # filled in below, when all files are there
            tables=tuple(tables.values()),
            blocks=tuple(blocks.values()),
            entries=tuple(entry for share in shares for entry in share.entries),
            attachments=_write_attachments(data, attachments),
        )
        digest = Checkpoint(folder, manifest, base=base).digest_of_own_files()
        confirm()
        publish(folder, data, replace(manifest, model_digest=digest))
    except BaseException:
        discard(folder, data)
        raise
    return digest


def _write_attachments(data: Folder, contents: Mapping[str, bytes]) -> dict[str, Attachment]:
    if contents:
        folder = data.child(ATTACHMENTS)
        folder.make()
        for name, content in contents.items():
            folder.put(name, content)
    return {
        name: Attachment(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
