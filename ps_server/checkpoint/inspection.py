"""Figures of a checkpoint, and verification of a folder of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.ps_server.checkpoint.files.manifest import MANIFEST, CountersEntry, TableEntry
from ctr_ps.ps_server.checkpoint.publish import read_manifest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.rows.statistics import CLICK, SHOW, scores_of

QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKey:
    """One of the most shown keys, with its score."""

    key: int
    show: float
    click: float
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """Figures of one table."""

    table: str
    dim: int
    state_width: int
    rows: int  # of the model; of a delta, with those of its chain
    own_rows: int  # in the checkpoint's own files; of a delta, those that changed
    size_bytes: int  # of the checkpoint's own files, with candidates, counters and removed keys
    candidates: int  # keys counted exactly and not admitted
    norms: tuple[float, ...]  # `QUANTILES` of the finite L2 norms of rows of weights
    show: tuple[float, ...]  # `QUANTILES`, as those of clicks; empty without statistics
    click: tuple[float, ...]
    top: tuple[TopKey, ...]  # most shown keys, in descending order


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """Figures of one dense block: elements, file size, and the L2 norm of its weights."""

    block: str
    length: int
    size_bytes: int
    norm: float


def inspect_table(checkpoint: Checkpoint, name: str, num_top: int) -> TableReport:
    """Returns the figures of a table; needs 12 bytes of memory per row.

    Raises CheckpointError if there is no such table, or a file was altered.
    """
    spec, manifest = checkpoint.table(name), checkpoint.manifest
    shards = range(spec.num_shards)
    norms, shows, clicks = [np.empty(0, np.float32)], [np.empty(0, np.float32)], []
    top: list[TopKey] = []
    for _, rows in checkpoint.read_shards(name, shards):
        norms.append(np.linalg.norm(rows.weights, axis=1))
        if rows.statistics.shape[1]:
            shows.append(rows.statistics[:, SHOW])
            clicks.append(rows.statistics[:, CLICK])
            top += _top_of(rows, num_top, spec.statistics)
            top = sorted(top, key=lambda each: (-each.show, each.key))[:num_top]
    files, candidates = manifest.files_of_table(name), manifest.files_of_table(name, "candidates")
    counters, removed = manifest.files_of_counters(name), manifest.files_of_table(name, "removed")
    table_files: Sequence[TableEntry | CountersEntry] = (*files, *candidates, *counters, *removed)
    all_norms = np.concatenate(norms)
    return TableReport(
        table=name,
        dim=spec.dim,
        state_width=files[0].state_width,
        rows=all_norms.size,
        own_rows=manifest.num_rows(name),
        size_bytes=sum(entry.size_bytes for entry in table_files),
        candidates=sum(batch.rows for entry in candidates for batch in entry.batches),
        norms=_quantiles(all_norms),
        show=_quantiles(np.concatenate(shows)),
        click=_quantiles(np.concatenate(clicks) if clicks else np.empty(0, np.float32)),
        top=tuple(top),
    )


def inspect_block(checkpoint: Checkpoint, name: str) -> BlockReport:
    """Returns the figures of a dense block; raises CheckpointError if a file was altered."""
    length = checkpoint.blocks[name].length
    weights = checkpoint.read_dense(name, slice(0, length)).weights
    files = checkpoint.manifest.files_of_block(name)
    return BlockReport(
        block=name,
        length=length,
        size_bytes=sum(file.size_bytes for file in files),
        norm=float(np.linalg.norm(weights.astype(np.float64))),
    )


def verify_all(root: str | Path) -> Iterator[tuple[str, str, str]]:
    """Verifies every checkpoint in a folder, ascending by name; each file is read once.

    Yields its name, its kind ("" if its manifest cannot be read), and the first error in its chain ("" if it
    is whole). Raises CheckpointError if the folder cannot be read, or has no checkpoint.
    """
    folder = folder_at(root)
    children = [child for name in folder.folders() if (child := folder.child(name)).has(MANIFEST)]
    if not children:
        raise CheckpointError(f"no checkpoint in {folder.url}: give a folder of checkpoints")
    problems: dict[str, str] = {}  # by URL, in a checkpoint's own files
    for child in children:
        kind = ""
        try:
            kind = read_manifest(child).kind
            chain = Checkpoint.open(child.url).chain
        except CheckpointError as error:
            yield child.name, kind, str(error)
            continue
        for link in chain:
            if link.url not in problems:
                problems[link.url] = ""
                try:
                    link.verify_own()
                except CheckpointError as error:
                    problems[link.url] = str(error)
        yield child.name, kind, next(filter(None, (problems[it.url] for it in chain)), "")


def _quantiles(values: Values) -> tuple[float, ...]:
    finite = values[np.isfinite(values)]
    return tuple(np.quantile(finite, QUANTILES).tolist()) if finite.size else ()


def _top_of(rows: Rows, num_top: int, spec: StatisticsSpec | None) -> Iterator[TopKey]:
    most_shown = np.argsort(-rows.statistics[:, SHOW], kind="stable")[:num_top]
    statistics = rows.statistics[most_shown]
    scores = scores_of(statistics, spec or StatisticsSpec())
    for key, counted, score in zip(rows.keys[most_shown], statistics, scores, strict=True):
        yield TopKey(
            key=int(key),
            show=float(counted[SHOW]),
            click=float(counted[CLICK]),
            score=float(score),
        )
