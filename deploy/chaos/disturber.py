"""Carries out the chaos of a run: signals to processes, and the variable that disturbs workers' calls.

versions, a process --lines--> Schedule --> signals
launcher --CTR_PS_CHAOS--> workers --journals--> Report
"""

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctr_ps.deploy.chaos.schedule import Progress, Record, Schedule, Send
from ctr_ps.deploy.chaos.sentences import Chaos, Disturbance
from ctr_ps.deploy.cluster import Cluster, Line
from ctr_ps.deploy.plan import ProcessSpec
from ctr_ps.deploy.supervisor import Event, Exited, Progressed

CHAOS = "CTR_PS_CHAOS"  # read by ps_worker.extras.chaos.channels
WATCHER = "versions"

FAULTS = ("request_lost", "reply_lost", "duplicated", "delayed")
"""Faults of calls, as workers' journals name them."""

Faults = Mapping[str, Mapping[str, int]]
"""For each fault the number of calls, by their name."""

log = logging.getLogger("ps-launch")


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


class Disturber:
    """The chaos of one run. For the main thread."""

    def __init__(
        self, chaos: Chaos, cluster: Cluster, folder: Path, watch_command: Sequence[str]
    ) -> None:
        """Disturbs nothing yet; times count from now.

        Args:
            chaos: What to do; it may be nothing.
            cluster: The processes.
            folder: Of the workers' journals; what is in it is removed.
            watch_command: Program that writes the servers' versions, given their endpoints.
        """
        self._chaos = chaos
        self._cluster = cluster
        self._folder = folder.resolve()
        self._watch_command = tuple(watch_command)
        self._schedule = Schedule(chaos.disturbances, time.monotonic())
        self._progress = Progress()
        shutil.rmtree(self._folder, ignore_errors=True)

    def variables(self, worker: str) -> dict[str, str]:
        """Returns the variables that disturb the calls of a worker."""
        if not self._chaos.call_faults:
            return {}
        self._folder.mkdir(exist_ok=True)
        faults = [[fault.kind, fault.calls, fault.amount] for fault in self._chaos.call_faults]
        settings = {
            "seed": f"{self._chaos.seed}/{worker}",
            "journal": str(self._folder / worker),
            "faults": faults,
        }
        return {CHAOS: json.dumps(settings)}

    def watch(self, endpoints: Sequence[str]) -> None:
        """Starts to look at the versions of servers, if anything depends on them."""
        if self._chaos.disturbances:
            command = (*self._watch_command, ",".join(endpoints))
            self._cluster.start_told(ProcessSpec(name=WATCHER, command=command))

    def next_time(self) -> float:
        """Returns when to call `handle` next, if no event comes before."""
        return self._schedule.next_time()

    def handle(self, event: Event | Line | None) -> Event | None:
        """Does what is due, and returns what is left of an event for the supervisor."""
        now = time.monotonic()
        self._send(self._schedule.time_passed(now))
        match event:
            case Line(_, text):
                versions = json.loads(text)
                self._send(self._schedule.versions_seen(versions, now))
                if not self._progress.look(versions):
                    return None
                self._progress = Progress()
                return Progressed()
            case Exited(name, _) if name == WATCHER:
                path = self._cluster.log_path(WATCHER)
                log.warning(
                    "cannot follow the training steps any more: %s exited, see %s", WATCHER, path
                )
                return None
            case _:
                return event

    def report(self) -> Report | None:
        """Returns what was done so far; None: nothing was asked for."""
        if self._chaos == Chaos(seed=self._chaos.seed):
            return None
        return Report(
            chaos=self._chaos,
            records=self._schedule.records,
            never_due=self._schedule.waiting,
            faults=faults_in(self._folder) if self._chaos.call_faults else {},
        )

    def _send(self, signals: Sequence[Send]) -> None:
        for send in signals:
            is_sent = self._cluster.send(send.record.process, send.number)
            log.info(
                "chaos: %s to %s%s",
                send.number.name,
                send.record.process,
                "" if is_sent else ", which does not run",
            )
            if not is_sent:
                self._schedule.missed(send)
