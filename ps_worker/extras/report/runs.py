"""What a run has written into its `run.dir`: the one place that knows the format (docs/evaluation.md).

    metrics.jsonl    one JSON object a line: kind, time, epoch, step, figures
    job.json         the job

Whatever a run has not written is missing in the report, never an error: it may still train, or be of a
release that measured less.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctr_ps.protos.errors import DataError, JobError, UsageError
from ctr_ps.ps_worker.job import Job, override_job

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
JOB = "job.json"

EVALUATED = ("test", "valid")
"""Kinds of records with the figures of an evaluation; a report shows those of the first that a run has."""

_AFTER_TRAINING = ("test", "end")

Record = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """What one run has measured, by a name that no other run has."""

    name: str
    # in the order of training; without those that a later process of the run has replaced
    records: tuple[Record, ...]
    job: Job | None  # the job as it was trained; None: it is not there, or of another release

    def of_kind(self, kind: str) -> list[Record]:
        """Returns the records of a kind: train, valid, pass, test."""
        return [record for record in self.records if record.get("kind") == kind]

    def points(self, kind: str, x: str, y: str) -> list[Point]:
        """Returns (x, y) of the records of a kind that have both as finite numbers."""
        pairs = ((number(record.get(x)), number(record.get(y))) for record in self.of_kind(kind))
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def last(self, name: str, kinds: Sequence[str]) -> tuple[Any, Record] | None:
        """Returns a figure with its record: the last of the first kind that has it; None: none has."""
        for kind in kinds:
            for record in reversed(self.of_kind(kind)):
                if record.get(name):
                    return record[name], record
        return None

    def figure(self, name: str, kinds: Sequence[str]) -> float | None:
        """Returns the number that `last` returns; None if there is none."""
        found = self.last(name, kinds)
        return None if found is None else number(found[0])


def number(value: object) -> float | None:
    """Returns a finite number of JSON, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """Reads runs, each by its `run.dir` or its metrics.jsonl.

    Raises:
        UsageError: If a folder is not that of a run, or given twice.
        DataError: If a line cannot be read.
    """
    resolved = [(path.parent if path.name == METRICS else path).resolve() for path in folders]
    for path in resolved:
        if resolved.count(path) > 1:
            raise UsageError(f"{str(path)!r} is given twice: give each run once")
    names = _names(resolved)
    return [_read(path, name) for path, name in zip(resolved, names, strict=True)]


def missing(runs: Sequence[RunRecords], has: Callable[[RunRecords], object], why: str) -> list[str]:
    """Returns what runs have not measured, in one sentence if none has."""
    without = [run.name for run in runs if not has(run)]
    if len(without) == len(runs):
        return [f"{why[0].upper()}{why[1:]}."]
    return [f"{name}: {why}." for name in without]


def _read(folder: Path, name: str) -> RunRecords:
    metrics = folder / METRICS
    try:
        content = metrics.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {str(metrics)!r}: {error.strerror}; give the folder of a run, as written by "
            f"`ps-worker train JOB.toml --set run.dir={folder.name}`"
        ) from error
    *lines, _torn = content.split(b"\n")  # what follows the last whole line is being written
    records = [_record(line, metrics, row) for row, line in enumerate(lines, 1) if line.strip()]
    return RunRecords(name=name, records=tuple(_without_repeated(records)), job=_job(folder / JOB))


def _record(line: bytes, path: Path, row: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{row}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}:{row}: {line[:40]!r}, expected an object with kind, step, ...")
    return record


def _without_repeated(records: Iterable[Record]) -> list[Record]:
    """Leaves out what a process of the run, from its `start` on, measures again.

    These are lines behind its first step, those of a kind, epoch and step that it has written again, and the
    end of an earlier training. Within a process two validations may share a step of worker 0.
    """
    earlier: list[Record] = []
    own: list[Record] = []
    for record in records:
        if record.get("kind") == "start":
            step = number(record.get("step")) or 0.0
            earlier = [each for each in _replaced(earlier, own) if _is_before(each, step)]
            own = []
        own.append(record)
    return _replaced(earlier, own)


def _is_before(record: Record, step: float) -> bool:
    return record.get("kind") not in _AFTER_TRAINING and (number(record.get("step")) or 0.0) <= step


def _replaced(earlier: Sequence[Record], later: Sequence[Record]) -> list[Record]:
    """Returns all records, but of two of the same kind, epoch and step the later one."""
    written = {_place(each) for each in later}
    return [*(each for each in earlier if _place(each) not in written), *later]


def _place(record: Record) -> tuple[Any, ...]:
    return record.get("kind"), number(record.get("epoch")), number(record.get("step"))


def _job(path: Path) -> Job | None:
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    try:
        return override_job(data, source=str(path))
    except JobError as error:
        logger.warning("omitting the job of a run from the report: %s", error)
        return None


def _names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of paths that differ."""
    for parts in range(1, max((len(path.parts) for path in folders), default=0) + 1):
        names = ["/".join(path.parts[-parts:]) for path in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in folders]
