"""Report of what chaos did to a run, as lines for people and as fields for programs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.chaos.schedule import Record
from deploy.chaos.sentences import Chaos, Disturbance

FAULTS = ("request_lost", "reply_lost", "duplicated", "delayed")
"""Faults of calls, as workers' journals name them."""

Faults = Mapping[str, Mapping[str, int]]
"""For each fault the number of calls, by their name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was done, and what followed.

    Attributes:
        chaos: What was asked for.
        records: What was done to processes.
        never_due: What was asked for, and whose time or step did not come.
        faults: What was done to calls.
    """

    chaos: Chaos
    records: Sequence[Record] = ()
    never_due: Sequence[Disturbance] = ()
    faults: Faults = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns it for people."""
        lines = [_line(record) for record in self.records]
        lines += [
            f"{each.process}: neither killed nor paused, as the run ended before"
            for each in self.never_due
        ]
        for fault, calls in self.faults.items():
            numbers = ", ".join(f"{number} {call}" for call, number in calls.items())
            lines.append(f"calls with {fault}: {numbers or 'none'}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Returns its fields."""
        return {
            "seed": self.chaos.seed,
            "processes": [asdict(record) for record in self.records],
            "never_due": [each.process for each in self.never_due],
            "calls": {fault: dict(calls) for fault, calls in self.faults.items()},
        }


def faults_in(journals: Path) -> Faults:
    """Returns the number of faults in the journals of a folder, by fault and name of call.

    A line that a process was killed in is left out.
    """
    counts: dict[str, Counter[str]] = {fault: Counter() for fault in FAULTS}
    for path in sorted(journals.glob("*")):
        with path.open() as lines:
            for line in lines:
                match line.split():
                    case [fault, call, _] if line.endswith("\n") and fault in counts:
                        counts[fault][call] += 1
    return {fault: dict(sorted(calls.items())) for fault, calls in counts.items()}


def _line(record: Record) -> str:
    step = "" if record.step is None else f", step {record.step}"
    when = f"{record.process} at {record.at_s:.1f} s{step}"
    if not record.is_done:
        return f"did not {record.action} {when}: it did not run"
    done = "killed" if record.pause_s is None else f"paused for {record.pause_s:g} s"
    if record.recovered_s is None:
        return f"{done} {when}: no progress was seen after it"
    return f"{done} {when}: all servers went on after {record.recovered_s:.1f} s"
