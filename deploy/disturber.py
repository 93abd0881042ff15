"""Carries out the chaos of a run: signals to processes, and the variable that disturbs workers' calls.

versions, a process --lines--> Schedule --> signals
                                  `--> records, and how long the run took to recover --> Report
launcher --CTR_PS_CHAOS--> workers --journals--> Report
"""

import json
import logging
import math
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctr_ps.deploy.chaos import Chaos, Disturbance
from ctr_ps.deploy.cluster import Cluster, Line
from ctr_ps.deploy.plan import ProcessSpec
from ctr_ps.deploy.supervisor import Event, Exited, Progressed

Versions = Sequence[int | None]
"""The version of each server; None: it does not answer."""

STEPS_OF_PROGRESS = 2
"""The step in which a worker dies may still be completed by what it had sent; the one after it may not."""

CHAOS = "CTR_PS_CHAOS"  # read by ps_worker.extras.chaos.channels
VERSIONS = "versions"

FAULTS = ("request_lost", "reply_lost", "duplicated", "delayed")
"""Faults of calls, as workers' journals name them."""

Faults = Mapping[str, Mapping[str, int]]
"""For each fault the number of calls, by their name."""

log = logging.getLogger("ps-launch")


@dataclass(slots=True, kw_only=True)
class Record:
    """What was done to a process, and what followed."""

    action: str  # "kill" or "pause"
    process: str  # its name
    at_s: float  # seconds after the start
    step: int | None  # the version that all servers that answered had; None: none was known
    pause_s: float | None = None  # for how long it was paused; None: it was killed
    is_done: bool = True  # whether the process was there
    # seconds until all servers applied steps again; None: that was not seen
    recovered_s: float | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a signal to the process of a record; what is not sent is `missed`."""

    record: Record
    number: signal.Signals


class Progress:
    """Whether all servers have applied steps since it was made."""

    def __init__(self) -> None:
        self._first: list[int | None] = []
        self._has_moved: list[bool] = []

    def look(self, versions: Versions) -> bool:
        """Returns whether the version of every server has moved by `STEPS_OF_PROGRESS` or more.

        Versions count from where a server was first seen; one that was away, or whose version went back,
        counts from where it is seen again.
        """
        self._first = self._first or [None] * len(versions)
        self._has_moved = self._has_moved or [False] * len(versions)
        for server, version in enumerate(versions):
            first = self._first[server]
            if version is None or first is None or version < first:
                self._first[server] = version
            elif version - first >= STEPS_OF_PROGRESS:
                self._has_moved[server] = True
        return all(self._has_moved)


class Schedule:
    """What is due when; no process is touched here. Times are seconds of any one clock. Not thread-safe.

    `records` has what has been done, in order, and `waiting` what was not due yet.
    """

    def __init__(self, disturbances: Sequence[Disturbance], start: float) -> None:
        self.records: list[Record] = []
        self._start = start
        self.waiting = list(disturbances)
        self._paused: list[tuple[float, Record]] = []
        self._recoveries: list[tuple[Record, Progress]] = []
        self._step: int | None = None

    def next_time(self) -> float:
        """Returns when to call `time_passed` next; infinity: never."""
        times = [self._start + each.at_s for each in self.waiting if each.at_s is not None]
        return min([*times, *(until for until, _ in self._paused)], default=math.inf)

    def time_passed(self, now: float) -> list[Send]:
        """Returns what is due at a time."""
        ended = [pause for pause in self._paused if pause[0] <= now]
        self._paused = [pause for pause in self._paused if pause[0] > now]
        due = [
            each
            for each in self.waiting
            if each.at_s is not None and self._start + each.at_s <= now
        ]
        return [
            *(Send(record, signal.SIGCONT) for _, record in ended),
            *(self._begin(each, now) for each in due),
        ]

    def versions_seen(self, versions: Versions, now: float) -> list[Send]:
        """Returns what is due at the step that servers have reached, and notes what has recovered."""
        for record, progress in list(self._recoveries):
            if progress.look(versions):
                record.recovered_s = now - self._start - record.at_s
                self._recoveries.remove((record, progress))
        known = [version for version in versions if version is not None]
        if not known:
            return []
        step = self._step = min(known)
        due = [each for each in self.waiting if each.step is not None and each.step <= step]
        return [self._begin(each, now) for each in due]

    def missed(self, send: Send) -> None:
        """The process does not run; one that was to go on may have been restarted."""
        if send.number == signal.SIGCONT:
            return
        send.record.is_done = False
        self._recoveries = [each for each in self._recoveries if each[0] is not send.record]
        self._paused = [each for each in self._paused if each[1] is not send.record]

    def _begin(self, each: Disturbance, now: float) -> Send:
        self.waiting.remove(each)
        record = Record(
            action="kill" if each.pause_s is None else "pause",
            process=each.process,
            at_s=now - self._start,
            step=self._step,
            pause_s=each.pause_s,
        )
        self.records.append(record)
        self._recoveries.append((record, Progress()))
        if each.pause_s is None:
            return Send(record, signal.SIGKILL)
        self._paused.append((now + each.pause_s, record))
        return Send(record, signal.SIGSTOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was done, and what followed: `records` of processes, `faults` of calls.

    Of what was asked for, `chaos`, the time or step of `never_due` did not come.
    """

    chaos: Chaos
    records: Sequence[Record] = ()
    never_due: Sequence[Disturbance] = ()
    faults: Faults = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Returns it for people."""
        lines = [_line(record) for record in self.records]
        lines += [
            f"{each.process}: neither killed nor paused, the run ended first"
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
        return f"no {record.action} of {when}: the process was not running"
    done = "killed" if record.pause_s is None else f"paused for {record.pause_s:g} s"
    if record.recovered_s is None:
        return f"{done} {when}: no progress afterwards"
    return f"{done} {when}: progress on all servers after {record.recovered_s:.1f} s"


class Disturber:
    """The chaos of one run. For the main thread."""

    def __init__(
        self, chaos: Chaos, cluster: Cluster, folder: Path, watch_command: Sequence[str]
    ) -> None:
        """Disturbs nothing yet; times count from now.

        `folder` is that of the workers' journals: what is in it is removed. The program of `watch_command`
        writes the servers' versions, given their endpoints.
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
            self._cluster.start_told(ProcessSpec(name=VERSIONS, command=command))

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
            case Exited(name, _) if name == VERSIONS:
                path = self._cluster.log_path(VERSIONS)
                log.warning("no more faults at steps: process %s exited, see %s", VERSIONS, path)
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
