"""Rules of a launcher: what follows when a process exits, a signal comes or time passes.

    Exited, Signalled, time --> Supervisor --> Restart, RestartAll, OtherPorts, Warn, End

Pure: no process, no thread, no clock. Times are seconds of any one clock.
"""

import math
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ctr_ps.deploy.plan import describe_end, exit_code_of
from ctr_ps.protos.errors import (
    AbortedError,
    BindError,
    NoMemoryError,
    ProtocolError,
    TransportError,
)

Durability = Literal["checkpoint", "log"]

LAST_SIGNAL = 64
LEASE_SECONDS = 30.0  # cluster.lease_s of a job that does not say it
MAX_FUTILE_RESTARTS = 3
FUTILE_SECONDS = 10.0
_JOB = "the job"


@dataclass(frozen=True, slots=True)
class Exited:
    """A process exited; `returncode` is that of `Popen`."""

    name: str
    returncode: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher received a signal to stop."""

    number: int


Event = Exited | Signalled


@dataclass(frozen=True, slots=True)
class Restart:
    """Start this process again, alone, because of `reason`; it is the run's `number`-th restart."""

    name: str
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartAll:
    """Stop all processes and start the job again from its checkpoint; the run's `number`-th restart."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class OtherPorts:
    """Stop all processes and start all with other ports."""

    reason: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """Stop all processes and end with an exit code, because of `reason`; a clean end may have none.

    The log of the process that `failed` explains it; empty: none does.
    """

    code: int
    reason: str = ""
    failed: str = ""


Decision = Restart | RestartAll | OtherPorts | Warn | End


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How much the launcher puts up with."""

    max_restarts: int = 0  # restarts of a run, of single processes or of the whole job
    # "log": servers replay a log, so a killed process is started again alone. "checkpoint": the
    # whole job is
    durability: Durability = "checkpoint"
    why_no_resume: str = ""  # why the job cannot be started again from a checkpoint; empty: it can
    # whether processes run a script, whose servers may end without having served
    is_script: bool = False
    # whether workers but the first may be lost: cluster.on_worker_loss is "continue"
    continues: bool = False
    # time after the death of a worker until servers know that it is lost
    lease_seconds: float = LEASE_SECONDS
    server_exit_seconds: float = 30.0  # time that servers have to end when all workers have
    # time after the exit of servers until a warning that workers still run
    notice_seconds: float = 10.0
    # time to wait for the failure behind that of a process that others ended
    cause_seconds: float = 5.0


@dataclass(slots=True, kw_only=True)
class _Timers:
    """Times when something is due; infinity: never."""

    notice: float = math.inf
    servers: float = math.inf
    cause: float = math.inf


@dataclass(frozen=True, slots=True)
class _Failure:
    name: str
    returncode: int
    text: str

    def is_kill(self) -> bool:
        """Whether it was killed from outside, or crashed: by a signal, a shell's code for one, no memory."""
        code = self.returncode
        return code < 0 or 128 < code <= 128 + LAST_SIGNAL or code == NoMemoryError.exit_code

    def is_refusal(self) -> bool:
        """Whether servers refused it, as they do after a silence longer than its lease."""
        return self.returncode == ProtocolError.exit_code


class Supervisor:
    """What to do with the processes of a run; `restarts` counts its restarts so far. Not thread-safe.

    Call `started` when all processes have been started, at first and after `RestartAll` or `OtherPorts`, and
    `handle` for each event, and without one at `next_time`. A process of a `Restart` counts as running at
    once. After `End` nothing more is to be handled.
    """

    def __init__(
        self,
        servers: Sequence[str],
        workers: Sequence[str],
        policy: Policy,
        spares: Sequence[str] = (),
    ) -> None:
        """`spares` are servers that wait to be added: the run ends without them."""
        self._servers = servers
        self._spares = spares
        self._workers = workers
        self._policy = policy
        self.restarts = 0
        self._recent: dict[str, list[float]] = {}  # times of restarts, of a process or the job
        self._has_other_ports = False
        self.started()

    def started(self, drained: Collection[str] = ()) -> None:
        """All processes run, from their start, but servers that were drained before."""
        # nobody waits for spares
        self._running = {*self._servers, *self._workers} - set(drained)
        self._early: list[str] = []
        self._has_losses = False
        self._refused: _Failure | None = None
        self._suspect: _Failure | None = None
        self._lost_spare: _Failure | None = None
        self._timers = _Timers()

    def next_time(self) -> float:
        """Returns when to call `handle` without an event; infinity: never."""
        return min(self._timers.notice, self._timers.servers, self._timers.cause)

    def handle(self, event: Event | None, now: float) -> Decision | None:
        """Returns what follows from an event, or from the time that it is; None: nothing."""
        match event:
            case Exited(name, 0):
                return self._exited(name, now)
            case Exited(name, returncode):
                return self._failed(name, returncode, now)
            case Signalled(number):
                return End(exit_code_of(-number), f"got {signal.Signals(number).name}")
            case None:
                return self._time_passed(now)

    def _exited(self, name: str, now: float) -> Decision | None:
        """A process ended in order, or is one that the others can do without."""
        self._running.discard(name)
        if self._suspect is not None:
            return None if self._running else self._follow(self._suspect, now)
        if self._still_running(self._workers):
            if name in self._servers:
                self._early.append(name)
            if name in self._servers or self._is_over():
                self._timers.notice = now + self._policy.notice_seconds
            return None
        if not self._still_running(self._servers):
            return End(0)
        if name in self._workers:
            self._timers.notice = math.inf
            self._timers.servers = now + self._server_exit_seconds()
        return None

    def _is_over(self) -> bool:
        """Whether only workers still run that are lost, or have nothing left to do."""
        return self._policy.continues and self._running <= {*self._workers[1:]}

    def _server_exit_seconds(self) -> float:
        lease = self._policy.lease_seconds if self._has_losses else 0.0
        return self._policy.server_exit_seconds + lease

    def _failed(self, name: str, returncode: int, now: float) -> Decision | None:
        """A worker that another one or the loss of a server ended may exit before what ended it."""
        self._running.discard(name)
        self._forget_drained()
        before = f", after {', '.join(self._early)} had exited with code 0" if self._early else ""
        failure = _Failure(name, returncode, f"{name} {describe_end(returncode)}{before}")
        if self._is_loss(failure):
            return self._lost(failure, now)
        if name in self._servers and failure.is_kill() and not self._still_running(self._workers):
            # Its recovery could take longer than servers have to end.
            text = f"{failure.text} after all workers had ended, so it is not started again"
            return Warn(text) if self._still_running(self._servers) else End(0, text)
        if name in self._spares:
            if failure.is_kill() and self._policy.durability == "checkpoint":
                self._lost_spare = failure
                decision: Decision = _end(failure)
            else:
                decision = self._follow(failure, now)
            return (
                Warn(f"{decision.reason}: unless it was added, the others go on without it")
                if isinstance(decision, End)
                else decision
            )
        # Only a launcher that restarts needs to know of a server's death before its workers' error.
        is_lost_server = returncode == TransportError.exit_code and self._policy.max_restarts
        if returncode != AbortedError.exit_code and not is_lost_server:
            return self._follow(failure, now)
        if is_lost_server and self._lost_spare is not None:
            self._suspect = self._lost_spare  # it was added
        self._suspect = self._suspect or failure
        if not self._running:
            return self._follow(self._suspect, now)
        self._timers = _Timers(cause=now + self._policy.cause_seconds)
        return None

    def _is_loss(self, failure: _Failure) -> bool:
        """Whether the others can go on: by any other error a worker ends the job itself."""
        if not self._policy.continues or failure.name not in self._workers[1:]:
            return False
        # Servers that have all ended well needed it no more; one alone may be drained.
        is_needed = self._still_running(self._servers)
        return failure.is_kill() or failure.is_refusal() or not is_needed

    def _lost(self, failure: _Failure, now: float) -> Decision | None:
        self._has_losses = True
        if failure.is_refusal():
            self._refused = self._refused or failure
        others = "go on" if self._running else "have ended"
        text = (
            f"{failure.name} {describe_end(failure.returncode)}: the others {others} without it, as "
            'cluster.on_worker_loss is "continue"'
        )
        match self._exited(failure.name, now):
            case None:
                return Warn(text) if self._suspect is None else None
            case End(0):
                return End(0, text)
            case decision:
                return decision

    def _follow(self, failure: _Failure, now: float) -> Decision:
        """Returns what follows from the failure that ended the job, or that a restart repairs."""
        if failure.returncode == AbortedError.exit_code and self._refused is not None:
            failure = self._refused  # no loss: it was refused for an error that ended the job
        if failure.returncode == BindError.exit_code and not (
            self._has_other_ports or self.restarts
        ):
            self._has_other_ports = True
            return OtherPorts(failure.text)
        # What was on its way when a process was killed may have been a sign of its life later.
        restarted = max(self._recent.get(failure.name, ()), default=-math.inf)
        limit_s = self._policy.lease_seconds + FUTILE_SECONDS
        is_mistaken = failure.is_refusal() and now - restarted < limit_s
        if not ((failure.is_kill() or is_mistaken) and self._policy.max_restarts):
            return _end(failure)
        what = _JOB if self._policy.durability == "checkpoint" else failure.name
        if obstacle := self._obstacle(what, now):
            return _end(failure, obstacle)
        self._recent[what].append(now)
        self.restarts += 1
        if what == _JOB:
            return RestartAll(self.restarts, failure.text)
        self._running |= {failure.name} - {*self._spares}
        return Restart(failure.name, self.restarts, failure.text)

    def _obstacle(self, what: str, now: float) -> str:
        """Returns why `what` cannot be started again, as the end of a sentence; empty: it can."""
        if self.restarts >= self._policy.max_restarts:
            return f", and the run has had its {self.restarts} restarts (--max-restarts)"
        if what in self._workers and self._policy.continues:
            return ', and none can take its place, as cluster.on_worker_loss is "continue"'
        if what == _JOB and self._policy.why_no_resume:
            return f", and nothing can be resumed: {self._policy.why_no_resume}"
        if what != _JOB and self._suspect is not None:
            return f", and {self._suspect.text} before"
        times = [time for time in self._recent.get(what, ()) if now - time < FUTILE_SECONDS]
        self._recent[what] = times
        if len(times) >= MAX_FUTILE_RESTARTS:
            return f", and {what} was restarted {MAX_FUTILE_RESTARTS} times within {FUTILE_SECONDS:g} s"
        return ""

    def _time_passed(self, now: float) -> Decision | None:
        if self._suspect is not None and now >= self._timers.cause:
            return self._follow(self._suspect, now)
        if now >= self._timers.servers:
            names = ", ".join(self._still_running(self._servers))
            return End(1, f"{names} did not exit within {self._server_exit_seconds():g} s")
        if now >= self._timers.notice:
            self._timers.notice = math.inf
            self._forget_drained()
            if not self._is_over():
                return Warn(self._notice()) if self._early else None
            stragglers = ", ".join(self._still_running(self._workers))
            limit_s = self._policy.notice_seconds
            return End(
                0,
                f"{stragglers} did not exit within {limit_s:g} s of the others and is stopped, as "
                'cluster.on_worker_loss is "continue"',
            )
        return None

    def _forget_drained(self) -> None:
        """Servers that end well while the first one serves were drained: it cannot be, and ends with all."""
        if self._servers[0] in self._running:
            self._early.clear()

    def _notice(self) -> str:
        waiting = self._still_running(self._workers)
        text = (
            f"{', '.join(self._early)} exited {self._policy.notice_seconds:g} s ago with code 0, but "
            f"{', '.join(waiting)} still {'runs' if len(waiting) == 1 else 'run'}"
        )
        # Servers that served end when all workers have left, so with some worker's exit.
        if self._policy.is_script and len(waiting) == len(self._workers):
            text += ": do the servers serve? A script calls fleet.run_server() if fleet.is_server()"
        return text

    def _still_running(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._running]


def _end(failure: _Failure, also: str = "") -> End:
    return End(exit_code_of(failure.returncode), f"{failure.text}{also}", failure.name)
