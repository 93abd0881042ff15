"""What must hold in every run, whatever happens in it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint import reader
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.rows.statistics import SHOW
from ctr_ps.ps_worker.checkpoints.retention import name_after_epoch
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from tests.simulation.cluster import COUNTERS, Outcome, Setup
from tests.simulation.counters import Tally, faults_of_saves, groups_of


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """An undisturbed synchronous run: digest of the model, and those of its checkpoints by version."""

    digest: str
    by_version: Mapping[int, str]
    batches: Mapping[int, int]  # of a pass, by worker


def undisturbed(outcome: Outcome, checkpoints: Path) -> Undisturbed:
    by_version, batches = {}, {}
    for checkpoint in complete(checkpoints):
        by_version[checkpoint.manifest.version] = checkpoint.digest_of_files()
        if checkpoint.name == name_after_epoch(1):
            batches = {worker: each.step for worker, each in checkpoint.manifest.workers.items()}
    digest = outcome.summaries["worker.0"].model_digest
    assert digest is not None
    assert batches
    return Undisturbed(digest, by_version, batches)


def _faults_of_passes(saved: Sequence[Checkpoint], expected: Undisturbed, epochs: int) -> list[str]:
    """A checkpoint after a pass has all of its batches, and none of the next."""
    named = {each.name: each for each in saved}
    wrong = []
    for epoch in range(1, epochs + 1):
        if (each := named.get(name_after_epoch(epoch))) is not None:
            steps = {worker: its.step for worker, its in each.manifest.workers.items()}
            if steps != {worker: epoch * num for worker, num in expected.batches.items()}:
                wrong.append(f"checkpoint {each.name} has batches {steps} of the workers")
    return wrong


def complete(folder: Path) -> list[Checkpoint]:
    found = []
    for each in sorted(folder.iterdir()) if folder.exists() else []:
        if not each.is_dir():
            continue
        try:
            found.append(Checkpoint.open(str(each)))
        except CheckpointError:
            continue
    return found


def _untrained(setup: Setup, checkpoints: Path) -> int:
    """Returns how many occurrences the rows of the last checkpoint have not counted."""
    shows: Counter[int] = Counter()
    checkpoint = Checkpoint.open(f"{checkpoints}/LATEST")
    for table in checkpoint.tables.values():
        for _, rows in checkpoint.read_shards(table.name, range(table.num_shards)):
            counted = rows.statistics[:, SHOW].astype(int).tolist()
            shows.update(dict(zip(rows.keys.tolist(), counted, strict=True)))
    data = checkpoints.parent.parent / "data"
    dataset = QueueDataset(Schema.load(str(data / "schema.toml")), 1000, format="criteo")
    dataset.set_filelist(sorted(data.glob("train-*")))
    expected = Counter(key for batch in dataset for key in batch.keys.tolist())
    return sum(max(setup.epochs * num - shows[key], 0) for key, num in expected.items())


@contextmanager
def _files_read_once() -> Iterator[None]:
    """Has each file of rows read and compared with its checksum once: a base is part of many checkpoints."""
    read, found = reader.read_table_file, {}

    def once(folder: Any, entry: Any, spec: Any, shards: Any) -> Iterator[tuple[int, Rows]]:
        file = f"{folder.url}/{entry.file}"
        if file not in found:
            found[file] = list(read(folder, entry, spec, range(spec.num_shards)))
        return ((shard, rows) for shard, rows in found[file] if shard in shards)

    reader.read_table_file = once
    try:
        yield
    finally:
        reader.read_table_file = read


def faults_of_end(
    setup: Setup, outcome: Outcome, tally: Tally, checkpoints: Path, expected: Undisturbed | None
) -> list[str]:
    """Returns what is wrong after a run."""
    with _files_read_once():
        return _faults_of_end(setup, outcome, tally, checkpoints, expected)


def _faults_of_end(
    setup: Setup, outcome: Outcome, tally: Tally, checkpoints: Path, expected: Undisturbed | None
) -> list[str]:
    wrong = []
    # A process that is killed after the job's end is looked for in vain: docs/decisions/0046.
    is_excused = outcome.is_left_by_all or outcome.is_wiped or outcome.is_claimed
    if outcome.code and not is_excused:
        wrong.append(f"the job ended with code {outcome.code}: {outcome.reason}")
    if setup.mode == COUNTERS:
        faults_of_saves(tally, checkpoints.parent, groups_of(setup))
        return wrong + tally.wrong
    saved = complete(checkpoints)
    if not saved and not outcome.code:
        wrong.append("there is no checkpoint")
    if expected is not None and setup.mode == "sync":
        for each in saved:
            version, digest = each.manifest.version, each.digest_of_files()
            if digest != expected.by_version.get(version):
                wrong.append(f"checkpoint {each.name} of version {version} is of no such moment")
    if expected is not None and setup.num_at_start is None:  # else who trains what is not known
        wrong += _faults_of_passes(saved, expected, setup.epochs)
    summary = outcome.summaries.get("worker.0")
    if outcome.code or summary is None:
        return wrong
    rows = setup.rows * setup.epochs
    # Without steps, what a lost process had done beyond its progress is repeated.
    if summary.examples < rows or (setup.mode == "sync" and summary.examples != rows):
        wrong.append(f"{summary.examples} examples were trained, of {rows}")
    if setup.num_at_start is not None and (missing := _untrained(setup, checkpoints)):
        wrong.append(f"{missing} occurrences of keys were not trained")
    if expected is not None and setup.mode == "sync" and summary.model_digest != expected.digest:
        wrong.append(f"digest {summary.model_digest}, undisturbed {expected.digest}")
    return wrong
