"""Where workers wait for each other: barriers, all-reduces, clocks, the mailbox and the queue of files.

    arrive, advance, post, take, take_file --> a future, answered by the event that makes it ready

Each call is an event under the lock of the job, and an answer without it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ctr_ps.protos.errors import PlaceLostError, ProtocolError, WaitTimeoutError, counted
from ctr_ps.protos.futures import Answered, WaitingFuture
from ctr_ps.protos.limits import CHUNK_BYTES, MAX_NAME_CHARACTERS
from ctr_ps.protos.store import (
    Future,
    Message,
    Numbers,
    Reduced,
    ReduceOp,
    TakenFile,
    Version,
    require_numbers,
)
from ctr_ps.ps_server.coordination.arrivals import Arrivals
from ctr_ps.ps_server.coordination.barrier import Contribution
from ctr_ps.ps_server.coordination.file_queue import FileQueue
from ctr_ps.ps_server.coordination.job_state import WaitingArrival, WaitingMessage
from ctr_ps.ps_server.coordination.mailbox import Mailbox
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.pending_calls import PendingCalls, raise_error
from ctr_ps.ps_server.coordination.push_ledger import require_number
from ctr_ps.ps_server.coordination.steps import StepAggregator


class Rendezvous:
    """The calls by which the workers of a job wait for each other. Thread-safe."""

    def __init__(
        self,
        members: Membership,
        steps: StepAggregator,
        arrivals: Arrivals,
        calls: PendingCalls,
        *,
        inbox_bytes: int,
    ) -> None:
        """Nobody waits yet; `inbox_bytes` limits the messages that wait for one worker."""
        self._members = members
        self._steps = steps
        self._arrivals = arrivals
        self._calls = calls
        # messages between workers; needs the lock
        self.mailbox = Mailbox(members, inbox_bytes=inbox_bytes)
        self.files = FileQueue(members.all)  # that workers share; needs the lock

    def barrier(
        self, name: str, worker: int, *, step: Version, number: int | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`; `number` is that of the barrier among those of the worker, from 1."""
        return self._arrive(name, worker, step, number, None)

    def all_reduce(
        self,
        name: str,
        worker: int,
        values: Numbers,
        op: ReduceOp,
        *,
        step: Version,
        remember: bool = True,
        number: int | None = None,
    ) -> Future[Reduced]:
        """See `protos.store.Store`; `number` is as for `barrier`."""
        require_numbers(name, values)
        own = values.copy()
        own.flags.writeable = False
        return self._arrive(name, worker, step, number, Contribution(own, op, remember))

    def _arrive(
        self,
        name: str,
        worker: int,
        step: Version,
        number: int | None,
        contribution: Contribution | None,
    ) -> Future[Any]:
        _require_short("barrier", name)
        future: WaitingFuture[Any] = WaitingFuture(
            self._calls.wait_limit_s, partial(self._barrier_timeout, name, worker)
        )
        with self._calls.change():
            require_number(self._members.name(worker), "step", step)
            outcome = self._arrivals.arrive(name, worker, step, number, contribution, future)
        if outcome is None:
            return future
        return Answered(outcome.answer(None if contribution is None else contribution.values))

    def _barrier_timeout(
        self, name: str, worker: int, future: WaitingFuture[Any]
    ) -> WaitTimeoutError:
        with self._calls.lock:
            places = self._arrivals.places_of_missing(name)
            is_applying = self._steps.num_complete > self._steps.version
            self._arrivals.give_up(name, worker, future)
        limit_s = self._calls.wait_limit_s
        if not places and is_applying:
            return WaitTimeoutError(
                f"barrier {name!r}: all workers arrived, but steps were not applied within {limit_s:g} s; "
                "see the server's log"
            )
        elsewhere = "".join(
            f"; {self._members.name(other)} waits at {place!r}"
            for other, place in places.items()
            if place
        )
        return WaitTimeoutError(
            f"barrier {name!r}: {self._members.names(list(places))} did not arrive within {limit_s:g} s; "
            f"see their logs{elsewhere}"
        )

    def advance(
        self, worker: int, clock: int, *, at_least: int, after_barrier: int | None = None
    ) -> Future[int]:
        """See `protos.store.Store`; `after_barrier` is the number of the barrier that it came to last.

        A call from before a barrier that the worker has left sets no clock.
        """

        def poll() -> Callable[[], int] | None:
            slowest = self._arrivals.clocks.slowest()
            if slowest is None:
                return lambda: at_least
            return None if slowest < at_least else lambda: slowest

        def describe() -> str:
            behind = ", ".join(
                f"{self._members.name(worker)} only {clock}"
                for worker, clock in self._arrivals.clocks.behind(at_least).items()
            )
            return (
                f"not all workers finished {counted(at_least, 'step')} within "
                f"{self._calls.wait_limit_s:g} s: {behind}; see their logs"
            )

        with self._calls.change():
            if after_barrier is not None and after_barrier < self._arrivals.passed.newest(worker):
                return Answered(at_least)  # it comes late, and its worker has counted from 0 since
            require_number(self._members.name(worker), "clock", clock)
            self._arrivals.clocks.advance(worker, clock, at_least)
        return self._calls.wait(poll, describe, self._calls.for_clocks)

    def post(self, exchange: str, message: Message) -> Future[None]:
        """See `protos.store.Store`."""
        _require_short("exchange", exchange)

        def poll() -> Callable[[], None] | None:
            if (fault := self.mailbox.fault_of_post(exchange, message)) is not None:
                return partial(raise_error, _broken(fault))
            return (lambda: None) if self.mailbox.is_accepted(exchange, message) else None

        def describe() -> str:
            return (
                f"exchange {exchange!r}: worker {message.receiver} took no messages within "
                f"{self._calls.wait_limit_s:g} s, so its inbox is full; see its log"
            )

        with self._calls.change():
            self.mailbox.post(exchange, message)
        return self._calls.wait(poll, describe)

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """See `protos.store.Store`."""
        _require_short("exchange", exchange)

        def poll() -> Callable[[], Sequence[Message]] | None:
            messages = self.mailbox.take(exchange, worker, CHUNK_BYTES)
            if messages is not None:
                return lambda: messages
            fault = self.mailbox.fault_of_take(exchange, worker)
            return None if fault is None else partial(raise_error, _broken(fault))

        def describe() -> str:
            missing = self._members.names(self.mailbox.missing(exchange, worker))
            return (
                f"exchange {exchange!r}: no message for worker {worker} within {self._calls.wait_limit_s:g} "
                f"s: {missing} have not posted their last message; see their logs"
            )

        with self._calls.change():
            self.mailbox.acknowledge(exchange, worker, received)
        return self._calls.wait(poll, describe)

    def take_file(
        self, worker: int, *, pass_number: int, num_files: int, received: int, waits: bool = False
    ) -> Future[TakenFile]:
        """See `protos.store.Store`; a call that waits changes nothing when it is answered."""
        files, name = self.files, self._members.name(worker)

        def poll() -> Callable[[], TakenFile] | None:
            is_over = files.is_over(pass_number)
            return partial(TakenFile, is_over=is_over) if is_over or files.has_free else None

        def describe() -> str:
            return (
                f"pass {pass_number}: {self._members.names(files.awaited())} did not finish their files "
                f"within {self._calls.wait_limit_s:g} s; see their logs"
            )

        with self._calls.change():
            require_number(name, "pass", pass_number)
            if not self._members.is_present(worker):
                raise ProtocolError(f"{name} asked for a file, but has left or is not in this job")
            if not waits:
                return Answered(files.take(worker, pass_number, num_files, received))
            files.finish(worker, pass_number, received)
        return self._calls.wait(poll, describe)

    # All of this needs the lock

    def leave(self, worker: int) -> None:
        """Nobody waits for a worker that has left."""
        self._refuse_arrivals(
            worker, f"{self._members.name(worker)} left or was lost during this call"
        )
        self._arrivals.clocks.pause(worker)
        self.mailbox.leave(worker)
        self.files.give_back(worker)

    def forget_arrivals(self, worker: int) -> None:
        """Another process has a worker's place, and comes by itself to where that one waits.

        At the first barrier it may not have loaded yet. In the steps and clocks the worker stays absent: that
        one had ended its steps before the barrier, so there are none for the new process to take part in.
        """
        name = self._members.name(worker)
        self._refuse_arrivals(worker, f"another process took the place of {name} during this call")

    def _refuse_arrivals(self, worker: int, why: str) -> None:
        for future in self._arrivals.take(worker):
            self._calls.refuse(future, PlaceLostError(why))

    def missing(self) -> dict[str, list[int]]:
        """Returns the workers that others wait for, by the barrier where they do."""
        return {f"barrier {name}": of for name, of in self._arrivals.missing().items()}

    def waiting(self) -> list[WaitingArrival | WaitingMessage]:
        """Returns the arrivals that wait, and the messages that are to be taken."""
        return [*self._arrivals.waiting(), *self.mailbox.waiting()]


def _require_short(kind: str, name: str) -> None:
    """Raises ProtocolError if the name of a barrier or an exchange, which workers choose, is too long."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise ProtocolError(
            f"the name of {kind} {name[:MAX_NAME_CHARACTERS]!r}... has {len(name)} characters, expected "
            f"up to {MAX_NAME_CHARACTERS}"
        )


def _broken(fault: str) -> ProtocolError:
    return ProtocolError(f"{fault}; all workers must take part in an exchange to its end")
