"""Answers at barriers and all-reduces: the numbers that workers bring are reduced, and answers remembered.

Sans-IO: numbers in, answers out; no clock, no locks. arrivals.py knows who waits, and who is missing.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import RESTART, Numbers, Reduced, ReduceOp, Version
from ctr_ps.ps_server.coordination.job_state import PassedBarrier

_OPS: Mapping[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's numbers float64[N], how to reduce them, and whether the answer must be remembered."""

    values: Numbers
    op: ReduceOp
    remember: bool = True


Given = Mapping[int, Contribution | None]
"""Contributions by worker; None for a worker that came without numbers."""


def reduce_numbers(name: str, given: Given, members: Members) -> Numbers | None:
    """Returns float64[N], read-only, reduced in worker order; None if no worker gave numbers.

    In that order a sum is the same to the last bit in any order of arrival. NaN and infinities propagate as
    in IEEE 754; a maximum or minimum over a NaN is NaN. Raises ProtocolError if they differ in length or op.
    """
    if not any(given.values()):
        return None
    if len({_kind(each) for each in given.values()}) > 1:
        told = ", ".join(
            f"{members.name(worker)} {_kind(given[worker])}" for worker in sorted(given)
        )
        raise ProtocolError(
            f"workers called all_reduce {name!r} with different arguments: {told}; all must give "
            "equally many numbers and the same op"
        )
    first, *others = (each for _, each in sorted(given.items()) if each is not None)
    total = first.values.copy()
    with np.errstate(all="ignore"):  # what overflows is infinite, as for any sum
        for each in others:
            _OPS[first.op](total, each.values, out=total)
    total.flags.writeable = False
    return total


class Outcome:
    """How a barrier answers the workers that it releases.

    The first answer makes the reduction, so that this is done outside of the coordinator's lock.
    """

    def __init__(
        self,
        version: Version,
        reduce: Callable[[], Numbers | None],
        *,
        num_values: int,
        remember: bool,
    ) -> None:
        """`reduce` returns the numbers, None for a barrier, or raises ProtocolError."""
        self.version = version  # the version at which the workers continue
        self.num_values = num_values  # numbers that it has: 0 for a barrier
        # whether the numbers are for processes in the workers' places, too
        self.remember = remember
        self._reduce: Callable[[], Numbers | None] | None = reduce
        self._values: Numbers | None = None

    def answer(self, brought: Numbers | None = None) -> Version | Reduced:
        """Returns the answer to a worker; raises ProtocolError if numbers of the workers do not fit.

        What one has `brought` that comes again is its answer if the numbers of all are forgotten.
        """
        if (reduce := self._reduce) is not None:
            self._values = values = reduce()
            self._reduce = None  # it has what each worker brought
        else:
            values = self._values  # read once: another thread may forget them now
        values = brought if values is None else values
        return self.version if values is None else Reduced(values, self.version)

    def forget_values(self) -> None:
        """Drops the numbers; an error stays."""
        with suppress(ProtocolError):
            self.answer()
            self._values = None
            self.num_values = 0


def outcome_of(name: str, given: Given, members: Members, version: Version) -> Outcome:
    """Returns the outcome of the barrier `name`; it is remembered if one of the workers needs that."""
    brought = [each for each in given.values() if each is not None]
    return Outcome(
        version,
        partial(reduce_numbers, name, given, members),
        num_values=max((each.values.size for each in brought), default=0),
        remember=not brought or any(each.remember for each in brought),
    )


def _kind(contribution: Contribution | None) -> str:
    if contribution is None:
        return "nothing"
    return f"{contribution.values.size} numbers for {contribution.op.name}"


MAX_PASSED = 2**18
"""Barriers of all workers that are remembered: far more than a job has whose processes are replaced."""

MAX_PASSED_VALUES = 2**23  # numbers in the answers to them: 64 MiB


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """A barrier that workers have passed together; `numbers` are those that it has for each of them."""

    name: str
    outcome: Outcome
    numbers: dict[int, int]


class PassedBarriers:
    """What workers were answered at the barriers that they passed, by number. Not thread-safe.

    A process in another's place comes to its barriers once more: the first, and those from the newest
    `RESTART` on. It is answered as that one was; and so is a worker that did not get its answer.

    Numbers that need not be remembered are kept until the next barrier is passed: all workers have come to
    it, so each has got its answer to the one before.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._passed: deque[_Passed] = deque()  # the oldest first
        self._by_number: dict[tuple[int, int], _Passed] = {}
        self._num_values = 0
        self._newest: dict[int, int] = {}
        self._expected: dict[int, int] = {}

    def newest(self, worker: int) -> int:
        """Returns the number of the last barrier that a worker has passed; 0: none."""
        return self._newest.get(worker, 0)

    def restart(self, worker: int) -> int:
        """Returns the number of the newest barrier `RESTART` that a worker has passed; 0: none."""
        found = next((each for each in reversed(self._passed) if each.name == RESTART), None)
        return 0 if found is None else found.numbers.get(worker, 0)

    def outcome(self, name: str, worker: int, number: int) -> Outcome | None:
        """Returns how a worker was answered; None: it has not passed this barrier.

        Raises ProtocolError if it passed another one then, or long ago.
        """
        if number > self.newest(worker):
            return None
        if (passed := self._by_number.get((worker, number))) is None:
            raise ProtocolError(
                f"{self._members.name(worker)} called its barrier {number}, {name!r}, again, but this "
                "server no longer keeps the result: start the job again from its checkpoint"
            )
        if passed.name != name:
            raise ProtocolError(
                f"{self._members.name(worker)} called {name!r} as its barrier {number}, but the lost process "
                f"called {passed.name!r}: a replacement must call the same barriers in the same order as "
                "the lost process"
            )
        return passed.outcome

    def expect(self, worker: int, number: int) -> None:
        """A worker comes to a barrier that it has not passed."""
        self._expected[worker] = number

    def note(
        self, name: str, workers: Sequence[int], outcome: Outcome, absent: Collection[int] = ()
    ) -> None:
        """Workers pass a barrier together; how those are answered that were not expected is not kept.

        With them it is passed by the `absent`: a process that takes such a place comes to where they are as
        one in the place of a lost worker does.
        """
        numbers = {each: self._expected.pop(each) for each in workers if each in self._expected}
        if numbers:
            numbers |= dict.fromkeys(absent, max(numbers.values()))
            self._add(_Passed(name, outcome, numbers))

    def _add(self, passed: _Passed) -> None:
        if self._passed and not (before := self._passed[-1].outcome).remember:
            self._num_values -= before.num_values
            before.forget_values()
            self._num_values += before.num_values
        self._newest.update(passed.numbers)
        self._passed.append(passed)
        self._by_number.update(dict.fromkeys(passed.numbers.items(), passed))
        self._num_values += passed.outcome.num_values
        while len(self._by_number) > MAX_PASSED or self._num_values > MAX_PASSED_VALUES:
            self._forget(0)
        if passed.name == RESTART:
            # Up to the one before: another server may not have passed this one yet.
            _, *restarts = [k for k, each in enumerate(self._passed) if each.name == RESTART][::-1]
            for _ in range(restarts[0] - 1 if restarts else 0):
                self._forget(1)

    def _forget(self, index: int) -> None:
        oldest = self._passed[index]
        del self._passed[index]
        self._num_values -= oldest.outcome.num_values
        for key in oldest.numbers.items():
            del self._by_number[key]

    def expected(self, worker: int) -> int:
        """Returns the number of the barrier that a worker waits at; 0: it has none."""
        return self._expected.get(worker, 0)

    def state(self) -> list[PassedBarrier]:
        """Returns the barriers that were passed, but for those that ended in an error."""
        state = []
        for passed in self._passed:
            try:
                answer = passed.outcome.answer()
            except ProtocolError:
                continue
            values = None
            if isinstance(answer, Reduced):
                values = answer.values.astype("<f8").tobytes().hex()
            for index, (worker, number) in enumerate(passed.numbers.items()):
                state.append(
                    PassedBarrier(
                        worker=worker,
                        number=number,
                        name=passed.name,
                        version=passed.outcome.version,
                        values=None if index else values,
                        remember=passed.outcome.remember,
                        with_last=index > 0,
                    )
                )
        return state

    def restore(self, state: Sequence[PassedBarrier]) -> None:
        """Takes over what `state` returned."""
        together: list[tuple[PassedBarrier, dict[int, int]]] = []
        for each in state:
            if not each.with_last:
                together.append((each, {}))
            together[-1][1][each.worker] = each.number
        for first, numbers in together:
            values: Numbers | None = None
            if first.values is not None:
                values = np.frombuffer(bytes.fromhex(first.values), "<f8").astype(np.float64)
            outcome = Outcome(
                first.version,
                partial(_same, values),
                num_values=0 if values is None else values.size,
                remember=first.remember,
            )
            self._add(_Passed(first.name, outcome, numbers))


def _same(values: Numbers | None) -> Numbers | None:
    return values
