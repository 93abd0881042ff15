"""Carries out the chaos of a run: signals to processes, and the variable that disturbs workers' calls.

versions, a process --lines--> Schedule --> signals
launcher --CTR_PS_CHAOS--> workers --journals--> Report
"""

import json
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.chaos.report import Report, faults_in
from deploy.chaos.schedule import Progress, Schedule, Send
from deploy.chaos.sentences import Chaos
from deploy.cluster import Cluster, Line
from deploy.plan import ProcessSpec
from deploy.supervisor import Event, Exited, Progressed

CHAOS = "CTR_PS_CHAOS"  # read by ps_worker.cluster.chaos
WATCHER = "versions"

log = logging.getLogger("ps-launch")


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
                log.warning("steps are no longer seen, as %s exited: see %s", WATCHER, path)
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
