"""Arrivals at barriers and all-reduces: who waits where, with which numbers, and how all are answered.

    arrive --> waiting --all have come, their steps are applied--> released: one outcome for all
                 | `--each waits at another barrier--> refused
                 `--> given up, or forgotten: the worker has left, or another process has its place

A barrier waits for every worker that has not left. Between barriers workers count their steps: `Clocks`.

Sans-IO: arrivals in, answers out; no time, no locks. A future is kept for each arrival, and not waited for.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ctr_ps.protos.errors import ProtocolError, counted
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.limits import MAX_BARRIERS
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Version
from ctr_ps.ps_server.coordination.barrier import Contribution, Outcome, PassedBarriers, outcome_of
from ctr_ps.ps_server.coordination.job_state import WaitingArrival
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.steps import StepAggregator

Answer = Callable[[], None]
"""Answers a call that waited; to be called without the lock."""


class _Arrival(NamedTuple):
    """A worker that waits at a barrier: the future of its call, and its numbers, if any."""

    future: WaitingFuture[Any]
    contribution: Contribution | None


class Arrivals:
    """All barriers of a job. Not thread-safe."""

    def __init__(self, members: Membership, steps: StepAggregator) -> None:
        self._members = members
        self._steps = steps
        self._waiting: dict[str, dict[int, _Arrival]] = {}
        self.clocks = Clocks(members)  # of the workers that are at no barrier
        # answers at the barriers that workers have passed
        self.passed = PassedBarriers(members.all)

    def arrive(
        self,
        name: str,
        worker: int,
        step: Version,
        number: int | None,
        contribution: Contribution | None,
        future: WaitingFuture[Any],
    ) -> Outcome | None:
        """A worker comes to a barrier, and takes no part in the steps from `step` on.

        One that comes again waits by its newer call, with the numbers of that. Returns how it was answered,
        if it has passed the barrier of this number before; None: it waits. Raises ProtocolError if it has
        left or is not of this job, waits at too many others, or has passed another barrier of this number.
        """
        if number is not None:
            if (outcome := self.passed.outcome(name, worker, number)) is not None:
                return outcome
            self.passed.expect(worker, number)
        if not self._members.is_present(worker):
            raise ProtocolError(
                f"{self._members.name(worker)} called barrier {name!r}, but has left or is not in this job "
                f"(members: {self._members.names(self._members.present)}); after a failed job, restart the "
                "servers that run with --stay"
            )
        others = [place for place, at in self._waiting.items() if worker in at and place != name]
        if len(others) >= MAX_BARRIERS:
            raise ProtocolError(
                f"{self._members.name(worker)} called barrier {name!r}, but still waits at {len(others)} "
                f"others, such as {others[0]!r}: call one barrier at a time"
            )
        self._waiting.setdefault(name, {})[worker] = _Arrival(future, contribution)
        self._steps.leave(worker, step)
        self.clocks.pause(worker)
        return None

    def give_up(self, name: str, worker: int, future: WaitingFuture[Any]) -> None:
        """A call stops waiting; a worker that has come again waits by its newer call."""
        arrival = self._waiting.get(name, {}).get(worker)
        if arrival is not None and arrival.future is future:
            del self._waiting[name][worker]
            self._forget_empty()

    def take(self, worker: int) -> list[WaitingFuture[Any]]:
        """Forgets a worker's arrivals, since it has left, or was replaced; returns their futures."""
        arrivals = [waiting.pop(worker, None) for waiting in self._waiting.values()]
        self._forget_empty()
        return [arrival.future for arrival in arrivals if arrival is not None]

    def take_all(self) -> list[WaitingFuture[Any]]:
        """Removes and returns the futures of all arrivals."""
        futures = [each.future for waiting in self._waiting.values() for each in waiting.values()]
        self._waiting.clear()
        return futures

    def _forget_empty(self) -> None:
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting}

    def missing(self) -> dict[str, list[int]]:
        """Returns the workers that others wait for, ascending, by barrier."""
        return {name: missing for name in self._waiting if (missing := self._missing_at(name))}

    def _missing_at(self, name: str) -> list[int]:
        waiting = self._waiting.get(name, {})
        return [worker for worker in self._members.present if worker not in waiting]

    def places_of_missing(self, name: str) -> dict[int, str | None]:
        """Returns the workers that have not come to `name`, each with the barrier where it waits, if any."""
        return {
            worker: next((place for place, at in self._waiting.items() if worker in at), None)
            for worker in self._missing_at(name)
        }

    def waiting(self) -> list[WaitingArrival]:
        """Returns the arrivals that wait, but those of workers that have gone on from another barrier.

        These take part in the steps again. If one of them waits indeed, its call comes again.
        """
        absent_from = self._steps.absent_from
        return [
            WaitingArrival(
                name=name,
                worker=worker,
                step=absent_from[worker],
                number=self.passed.expected(worker),
                values=None if given is None else given.values,
                op=None if given is None else given.op,
                remember=given is None or given.remember,
            )
            for name, waiting in self._waiting.items()
            for worker, (_, given) in waiting.items()
            if worker in absent_from
        ]

    def take_released(self) -> list[Answer]:
        """Releases the barriers to which all have come, and returns how to answer; refuses those stuck."""
        if not self._waiting or self._steps.num_complete > self._steps.version:
            return []  # workers resume from a barrier at the version of all steps before it
        released = [
            name
            for name, waiting in self._waiting.items()
            # Counted first: to look for each worker at each arrival would take the square of their number.
            if len(waiting) >= self._members.num_present and not self._missing_at(name)
        ]
        answers: list[Answer] = []
        for name in released:
            arrivals = dict(sorted(self._waiting.pop(name).items()))
            given = {worker: arrival.contribution for worker, arrival in arrivals.items()}
            outcome = outcome_of(name, given, self._members.all, self._steps.version)
            absent = self._members.left if self._members.all.is_elastic else ()
            self.passed.note(name, [*arrivals], outcome, absent)
            for worker, arrival in arrivals.items():
                self._steps.rejoin(worker)
                self.clocks.restart(worker)
                answers.append(partial(arrival.future.answer_with, outcome.answer))
        return [*answers, *self._take_stuck()]

    def _take_stuck(self) -> list[Answer]:
        """Ends barriers at which workers wait for each other for ever: all wait, each at another one."""
        if sum(map(len, self._waiting.values())) < self._members.num_present:
            return []
        stuck = {name: sorted(waiting) for name, waiting in self._waiting.items()}
        if set(self._members.present) - set().union(*stuck.values()):
            return []
        refuse = partial(_refuse_stuck, stuck, self._members.all)
        return [partial(future.answer_with, refuse) for future in self.take_all()]


def _refuse_stuck(stuck: Mapping[str, Sequence[int]], members: Members) -> NoReturn:
    places = "; ".join(f"{members.names(workers)} at {name!r}" for name, workers in stuck.items())
    raise ProtocolError(
        f"deadlock, workers wait for each other at different barriers: {places}; all must call the same "
        "barriers in the same order"
    )


class Clocks:
    """Clocks of workers that train within a bound of the slowest (SSP). Not thread-safe.

    A worker's clock is the number of steps that it has finished since its last barrier. A worker that waits
    in a barrier or has left has none, and no other waits for it.

    Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
    """

    def __init__(self, members: Membership) -> None:
        self._members = members
        # of the workers that train
        self.by_worker = dict.fromkeys(members.present, 0)

    def advance(self, worker: int, clock: int, at_least: int) -> None:
        """Records that a worker has finished `clock` steps, before it waits until all finish `at_least`.

        Its calls may come late: a clock never decreases, and one that comes while the worker waits in a
        barrier is ignored. Raises ProtocolError if it has left, is a stranger, or would wait for itself.
        """
        if not self._members.is_present(worker):
            raise ProtocolError(
                f"{self._members.name(worker)} has finished {counted(clock, 'step')}, but has left or is "
                f"not in this job (members: {self._members.names(self._members.present)})"
            )
        if at_least > clock:
            raise ProtocolError(
                f"{self._members.name(worker)} has finished {counted(clock, 'step')}, but waits until all "
                f"workers have finished {at_least}: it waits for itself"
            )
        if worker in self.by_worker:
            self.by_worker[worker] = max(clock, self.by_worker[worker])

    def pause(self, worker: int) -> None:
        """A worker waits in a barrier, or has left."""
        self.by_worker.pop(worker, None)

    def restart(self, worker: int) -> None:
        """A worker comes out of a barrier and counts its steps from there."""
        self.by_worker[worker] = 0

    def behind(self, at_least: int) -> dict[int, int]:
        """Returns the clocks of those that train and have not finished `at_least` steps, by worker."""
        return {
            worker: clock for worker, clock in sorted(self.by_worker.items()) if clock < at_least
        }

    def slowest(self) -> int | None:
        """Returns the smallest clock; None if no worker trains."""
        return min(self.by_worker.values(), default=None)
