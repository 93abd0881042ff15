"""Figures of a checkpoint, verification of a folder, and differences between two checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    """Figures of one table.

    Attributes:
        table: Table name.
        dim: Columns of weights.
        state_width: Columns of optimizer state.
        rows: Rows of the model; of a delta, with those of its chain.
        own_rows: Rows in the checkpoint's own files; of a delta, those that changed.
        size_bytes: Size of the checkpoint's own files, with candidates, counters and removed keys.
        candidates: Keys counted exactly and not admitted.
        norms: `QUANTILES` of the finite L2 norms of the rows' weights; empty without rows.
        show: `QUANTILES` of shows; empty without statistics.
        click: `QUANTILES` of clicks; empty without statistics.
        top: Most shown keys, in descending order.
    """

    table: str
    dim: int
    state_width: int
    rows: int
    own_rows: int
    size_bytes: int
    candidates: int
    norms: tuple[float, ...]
    show: tuple[float, ...]
    click: tuple[float, ...]
    top: tuple[TopKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """Figures of one dense block: elements, file size, and the L2 norm of its weights."""

    block: str
    length: int
    size_bytes: int
    norm: float


def inspect_table(checkpoint: Checkpoint, name: str, num_top: int) -> TableReport:
    """Returns the figures of a table; needs 12 bytes of memory per row.

    Raises:
        CheckpointError: If there is no such table, or a file was altered.
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
    """Returns the figures of a dense block.

    Raises:
        CheckpointError: If a file was altered.
    """
    length = checkpoint.blocks[name].length
    weights = checkpoint.read_dense(name, slice(0, length)).weights
    files = checkpoint.manifest.files_of_block(name)
    return BlockReport(
        block=name,
        length=length,
        size_bytes=sum(file.size_bytes for file in files),
        norm=float(np.linalg.norm(weights.astype(np.float64))),
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of verifying one checkpoint.

    Attributes:
        name: Name of the checkpoint.
        kind: Kind in its manifest; empty if that cannot be read.
        problem: First error of the checkpoint or its chain; empty if it is whole.
    """

    name: str
    kind: str
    problem: str


def verify_all(root: str | Path) -> Iterator[Verdict]:
    """Verifies every checkpoint in a folder, ascending by name; each file is read once.

    Raises:
        CheckpointError: If the folder cannot be read, or has no checkpoint.
    """
    folder = folder_at(root)
    children = [child for child in map(folder.child, folder.folders()) if child.has(MANIFEST)]
    if not children:
        raise CheckpointError(f"no checkpoint in {folder.url}: give a folder of checkpoints")
    problems: dict[str, str] = {}  # by URL, in a checkpoint's own files
    for child in children:
        kind = ""
        try:
            kind = read_manifest(child).kind
            chain = Checkpoint.open(child.url).chain
        except CheckpointError as error:
            yield Verdict(child.name, kind, str(error))
            continue
        for link in chain:
            if link.url not in problems:
                problems[link.url] = _problem_of(link)
        yield Verdict(child.name, kind, next(filter(None, (problems[it.url] for it in chain)), ""))


def _problem_of(checkpoint: Checkpoint) -> str:
    try:
        checkpoint.verify_own()
    except CheckpointError as error:
        return str(error)
    return ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Difference between two checkpoints in the rows of a table, or the elements of a dense block.

    Attributes:
        name: Table or block name.
        only_first: Rows only in the first.
        only_second: Rows only in the second.
        changed: Rows in both, with different weights or state.
        same: Rows in both, equal bit for bit.
        largest: Largest absolute difference of a weight in both, NaN ignored.
    """

    name: str
    only_first: int = 0
    only_second: int = 0
    changed: int = 0
    same: int = 0
    largest: float = 0.0

    def __add__(self, other: "Difference") -> "Difference":
        """Returns the sum over the rows of both."""
        return Difference(
            name=self.name,
            only_first=self.only_first + other.only_first,
            only_second=self.only_second + other.only_second,
            changed=self.changed + other.changed,
            same=self.same + other.same,
            largest=max(self.largest, other.largest),
        )


def compare(first: Checkpoint, second: Checkpoint) -> list[Difference]:
    """Returns the differences of tables and dense blocks, ordered by name.

    Raises:
        CheckpointError: If the models have different shapes, or a file was altered.
    """
    _require_alike(first, second)
    tables = [_compare_table(first, second, name) for name in first.tables]
    blocks = [_compare_block(first, second, name) for name in first.blocks]
    return sorted([*tables, *blocks], key=lambda difference: difference.name)


def _require_alike(first: Checkpoint, second: Checkpoint) -> None:
    shapes = []
    for checkpoint in (first, second):
        tables = {name: (spec.dim, spec.num_shards) for name, spec in checkpoint.tables.items()}
        blocks = {name: spec.length for name, spec in checkpoint.blocks.items()}
        shapes.append((tables, blocks))
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            f"{first.url} and {second.url} have models of different shapes: tables with (dim, shards) and "
            f"dense blocks with their lengths are {shapes[0]} and {shapes[1]}"
        )


def _compare_table(first: Checkpoint, second: Checkpoint, name: str) -> Difference:
    total = Difference(name=name)
    for shard in range(first.tables[name].num_shards):
        [(_, one)], [(_, other)] = (
            list(checkpoint.read_shards(name, [shard])) for checkpoint in (first, second)
        )
        total += _compare_rows(name, one, other)
    return total


def _compare_rows(name: str, one: Rows, other: Rows) -> Difference:
    _, i, j = np.intersect1d(one.keys, other.keys, assume_unique=True, return_indices=True)
    is_same = _same_bits(one.weights[i], other.weights[j])
    if one.state.shape[1] == other.state.shape[1]:
        is_same &= _same_bits(one.state[i], other.state[j])
    else:
        is_same[:] = False
    return Difference(
        name=name,
        only_first=one.keys.size - i.size,
        only_second=other.keys.size - j.size,
        changed=int(np.count_nonzero(~is_same)),
        same=int(np.count_nonzero(is_same)),
        largest=_largest(one.weights[i], other.weights[j]),
    )


def _compare_block(first: Checkpoint, second: Checkpoint, name: str) -> Difference:
    whole = slice(0, first.blocks[name].length)
    one, other = (checkpoint.read_dense(name, whole).weights for checkpoint in (first, second))
    is_same = _same_bits(one[:, None], other[:, None])
    return Difference(
        name=name,
        changed=int(np.count_nonzero(~is_same)),
        same=int(np.count_nonzero(is_same)),
        largest=_largest(one, other),
    )


def _same_bits(one: Values, other: Values) -> NDArray[np.bool_]:
    """Returns bool[N], which rows of two float32[N, D] are equal bit for bit."""
    return np.asarray(np.all(one.view(np.uint32) == other.view(np.uint32), axis=1), np.bool_)


def _largest(one: Values, other: Values) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.fmax.reduce(np.abs(one - other), axis=None, initial=0.0))
