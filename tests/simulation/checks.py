"""What must hold in every run, whatever happens in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.simulation.cluster import COUNTERS, Outcome, Setup
from tests.simulation.counters import Tally, faults_of_saves


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """An undisturbed synchronous run: digest of the model, and those of its checkpoints by version."""

    digest: str
    by_version: Mapping[int, str]


def undisturbed(outcome: Outcome, checkpoints: Path) -> Undisturbed:
    by_version = {}
    for checkpoint in complete(checkpoints):
        by_version[checkpoint.manifest.version] = checkpoint.digest_of_files()
    digest = outcome.summaries["worker.0"].model_digest
    assert digest is not None
    return Undisturbed(digest, by_version)


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


def faults_of_end(
    setup: Setup, outcome: Outcome, tally: Tally, checkpoints: Path, expected: Undisturbed | None
) -> list[str]:
    """Returns what is wrong after a run."""
    wrong = []
    # A process that is killed after the job's end is looked for in vain: docs/decisions/0046.
    if outcome.code and not (outcome.is_left_by_all or outcome.is_wiped):
        wrong.append(f"the job ended with code {outcome.code}: {outcome.reason}")
    if setup.mode == COUNTERS:
        faults_of_saves(tally, checkpoints.parent, setup.num_servers)
        return wrong + tally.wrong
    saved = complete(checkpoints)
    if not saved and not outcome.code:
        wrong.append("there is no checkpoint")
    if expected is not None and setup.mode == "sync":
        for each in saved:
            version, digest = each.manifest.version, each.digest_of_files()
            if digest != expected.by_version.get(version):
                wrong.append(f"checkpoint {each.name} of version {version} is of no such moment")
    summary = outcome.summaries.get("worker.0")
    if outcome.code or summary is None:
        return wrong
    rows = setup.rows * setup.epochs
    # Without steps, what a lost process had done beyond its progress is repeated.
    if summary.examples < rows or (setup.mode == "sync" and summary.examples != rows):
        wrong.append(f"{summary.examples} examples were trained, of {rows}")
    if expected is not None and setup.mode == "sync" and summary.model_digest != expected.digest:
        wrong.append(f"digest {summary.model_digest}, undisturbed {expected.digest}")
    return wrong
