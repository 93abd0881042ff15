"""When processes are killed and paused, and how long a run takes to recover: rules without processes.

    start, time, versions of servers --> Schedule --> Send a signal to a process
                                             `--> records, for the report

Times are seconds of any one clock.
"""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ctr_ps.deploy.chaos.sentences import Disturbance

Versions = Sequence[int | None]
"""The version of each server; None: it does not answer."""

STEPS_OF_PROGRESS = 2
"""The step in which a worker dies may still be completed by what it had sent; the one after it may not."""


@dataclass(slots=True, kw_only=True)
class Record:
    """What was done to a process, and what followed.

    Attributes:
        action: "kill" or "pause".
        process: Its name.
        at_s: Seconds after the start.
        step: The version that all servers that answered had; None: none was known.
        pause_s: For how long it was paused; None: it was killed.
        is_done: Whether the process was there.
        recovered_s: Seconds until all servers applied steps again; None: that was not seen.
    """

    action: str
    process: str
    at_s: float
    step: int | None
    pause_s: float | None = None
    is_done: bool = True
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
    """What is due when. Not thread-safe.

    Attributes:
        records: What has been done, in order.
    """

    def __init__(self, disturbances: Sequence[Disturbance], start: float) -> None:
        self.records: list[Record] = []
        self._start = start
        self._waiting = list(disturbances)
        self._paused: list[tuple[float, Record]] = []
        self._recoveries: list[tuple[Record, Progress]] = []
        self._step: int | None = None

    def next_time(self) -> float:
        """Returns when to call `time_passed` next; infinity: never."""
        times = [self._start + each.at_s for each in self._waiting if each.at_s is not None]
        return min([*times, *(until for until, _ in self._paused)], default=math.inf)

    def time_passed(self, now: float) -> list[Send]:
        """Returns what is due at a time."""
        ended = [pause for pause in self._paused if pause[0] <= now]
        self._paused = [pause for pause in self._paused if pause[0] > now]
        due = [
            each
            for each in self._waiting
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
        due = [each for each in self._waiting if each.step is not None and each.step <= step]
        return [self._begin(each, now) for each in due]

    def missed(self, send: Send) -> None:
        """The process does not run; one that was to go on may have been restarted."""
        if send.number == signal.SIGCONT:
            return
        send.record.is_done = False
        self._recoveries = [each for each in self._recoveries if each[0] is not send.record]
        self._paused = [each for each in self._paused if each[1] is not send.record]

    def _begin(self, each: Disturbance, now: float) -> Send:
        self._waiting.remove(each)
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

    @property
    def waiting(self) -> Sequence[Disturbance]:
        """What was never due."""
        return self._waiting
