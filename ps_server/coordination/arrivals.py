"""Arrivals at barriers and all-reduces: who waits where, with which numbers, and how all are answered.

    arrive --> waiting --all have come, their steps are applied--> released: one outcome for all
                 | `--each waits at another barrier--> refused
                 `--> given up, or forgotten for a process in the worker's place

Sans-IO: arrivals in, answers out; no clock, no locks. A future is kept for each arrival, and not waited for.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Version
from ctr_ps.ps_server.coordination.all_reduce import Contribution, Outcome, Reductions, outcome_of
from ctr_ps.ps_server.coordination.barrier import Barriers, PassedBarriers
from ctr_ps.ps_server.coordination.clocks import Clocks
from ctr_ps.ps_server.coordination.job_state import WaitingArrival
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.steps import StepAggregator

Answer = Callable[[], None]
"""Answers a call that waited; to be called without the lock."""


class Arrivals:
    """All barriers of a job. Not thread-safe.

    Attributes:
        passed: Answers at the barriers that workers have passed.
    """

    def __init__(self, members: Membership, steps: StepAggregator, clocks: Clocks) -> None:
        self._members = members
        self._steps = steps
        self._clocks = clocks
        self._barriers = Barriers(members)
        self._reductions = Reductions()
        self._futures: dict[tuple[str, int], WaitingFuture[Any]] = {}
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

        Returns:
            How it was answered, if it has passed the barrier of this number before; None: it waits.
        """
        if number is not None:
            if (outcome := self.passed.outcome(name, worker, number)) is not None:
                return outcome
            self.passed.expect(worker, number)
        self._barriers.arrive(name, worker)
        self._futures[name, worker] = future
        self._reductions.give(name, worker, contribution)
        self._steps.leave(worker, step)
        self._clocks.pause(worker)
        return None

    def give_up(self, name: str, worker: int, future: WaitingFuture[Any]) -> None:
        """A call stops waiting; a worker that has come again waits by its newer call."""
        if self._futures.get((name, worker)) is future:
            self._barriers.give_up(name, worker)
            del self._futures[name, worker]

    def leave(self, worker: int) -> None:
        """Forgets where a worker waited that has left."""
        self._barriers.leave(worker)

    def take(self, worker: int) -> list[WaitingFuture[Any]]:
        """Forgets a worker's arrivals, since another process has its place; returns their futures."""
        self._barriers.leave(worker)
        futures = []
        for name in [name for name, of in self._futures if of == worker]:
            self._reductions.take(name, [worker])
            futures.append(self._futures.pop((name, worker)))
        return futures

    def take_all(self) -> list[WaitingFuture[Any]]:
        """Removes and returns the futures of all arrivals."""
        futures = list(self._futures.values())
        self._futures.clear()
        return futures

    def missing(self) -> dict[str, list[int]]:
        """Returns the workers that others wait for, by barrier."""
        return self._barriers.all_missing()

    def places_of_missing(self, name: str) -> dict[int, str | None]:
        """Returns the workers that have not come to `name`, each with the barrier where it waits, if any."""
        return {worker: self._barriers.place_of(worker) for worker in self._barriers.missing(name)}

    def waiting(self) -> list[WaitingArrival]:
        """Returns the arrivals that wait, but those of workers that have gone on from another barrier.

        These take part in the steps again. If one of them waits indeed, its call comes again.
        """
        arrivals, absent_from = [], self._steps.absent()
        for name, worker in self._futures:
            if worker not in absent_from:
                continue
            given = self._reductions.given(name, worker)
            arrivals.append(
                WaitingArrival(
                    name=name,
                    worker=worker,
                    step=absent_from[worker],
                    number=self.passed.expected(worker),
                    values=None if given is None else given.values,
                    op=None if given is None else given.op,
                    remember=given is None or given.remember,
                )
            )
        return arrivals

    def take_released(self) -> list[Answer]:
        """Releases the barriers to which all have come, and returns how to answer; refuses those stuck."""
        if self._steps.num_complete > self._steps.version:
            return []  # workers resume from a barrier at the version of all steps before it
        answers: list[Answer] = []
        for name, workers in self._barriers.take_released().items():
            given = self._reductions.take(name, workers)
            outcome = outcome_of(name, given, self._members.all, self._steps.version)
            self.passed.note(name, workers, outcome)
            for worker in workers:
                self._steps.rejoin(worker)
                self._clocks.restart(worker)
                future = self._futures.pop((name, worker))
                answers.append(partial(future.answer_with, outcome.answer))
        return [*answers, *self._take_stuck()]

    def _take_stuck(self) -> list[Answer]:
        """Ends barriers at which workers wait for each other, each at another one."""
        stuck = self._barriers.take_stuck()
        answers: list[Answer] = []
        for name, workers in stuck.items():
            self._reductions.take(name, workers)
            for worker in workers:
                future = self._futures.pop((name, worker))
                refuse = partial(_refuse_stuck, stuck, self._members.all)
                answers.append(partial(future.answer_with, refuse))
        return answers


def _refuse_stuck(stuck: Mapping[str, Sequence[int]], members: Members) -> NoReturn:
    places = "; ".join(f"{members.names(workers)} at {name!r}" for name, workers in stuck.items())
    raise ProtocolError(
        f"workers wait for each other at different barriers, which never ends: {places}; each of them must "
        f"come to the same barriers in the same order"
    )
