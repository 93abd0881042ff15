"""Barriers: who has come, who is missing, which are complete.

Sans-IO: arrivals and departures in, releases out; no clock, no locks. A barrier waits for every worker that
has not left.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_BARRIERS
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Numbers, Reduced
from ctr_ps.ps_server.coordination.all_reduce import Outcome
from ctr_ps.ps_server.coordination.job_state import PassedBarrier
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.names import require_name


class Barriers:
    """All barriers of a job. Not thread-safe."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._waiting: dict[str, set[int]] = {}

    def arrive(self, name: str, worker: int) -> None:
        """A worker comes to the barrier `name`; to come again changes nothing.

        Raises:
            ProtocolError: If it has left or is not of this job, waits at too many others, or the name is too
                long.
        """
        require_name("barrier", name)
        if not self._members.is_present(worker):
            raise ProtocolError(
                f"{self._members.name(worker)} came to barrier {name!r}, but has left or is not of this job "
                f"(members: {self._members.names(self._members.present)}); after a job that failed, restart "
                f"the servers that stayed"
            )
        others = [place for place, at in self._waiting.items() if worker in at and place != name]
        if len(others) >= MAX_BARRIERS:
            raise ProtocolError(
                f"{self._members.name(worker)} came to barrier {name!r} while it waits at {len(others)} "
                f"others, as {others[0]!r}: a worker waits at one barrier at a time"
            )
        self._waiting.setdefault(name, set()).add(worker)

    def give_up(self, name: str, worker: int) -> None:
        """A worker stops waiting."""
        self._waiting.get(name, set()).discard(worker)
        self._forget_empty()

    def leave(self, worker: int) -> None:
        """Forgets where a worker waited that has left, or whose process was replaced."""
        for waiting in self._waiting.values():
            waiting.discard(worker)
        self._forget_empty()

    def _forget_empty(self) -> None:
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if waiting}

    def missing(self, name: str) -> list[int]:
        """Returns the workers that have neither left nor come to `name`, ascending."""
        waiting = self._waiting.get(name, set())
        return [worker for worker in self._members.present if worker not in waiting]

    def all_missing(self) -> dict[str, list[int]]:
        """Returns `missing` of each barrier at which a worker waits for others."""
        return {name: missing for name in self._waiting if (missing := self.missing(name))}

    def place_of(self, worker: int) -> str | None:
        """Returns the barrier at which a worker waits; None if it waits nowhere."""
        return next((name for name, waiting in self._waiting.items() if worker in waiting), None)

    def take_stuck(self) -> dict[str, list[int]]:
        """Returns, and forgets, the workers by barrier if all wait for each other for ever; else nothing.

        That is when every worker waits, but not at the same barrier; to be called after `take_released`.
        """
        if sum(map(len, self._waiting.values())) < self._members.num_present:
            return {}
        waiting = {name: sorted(workers) for name, workers in self._waiting.items() if workers}
        if not waiting or set(self._members.present) - set().union(*waiting.values()):
            return {}
        self._waiting.clear()
        return waiting

    def take_released(self) -> dict[str, list[int]]:
        """Returns, and forgets, the barriers to which all have come, with their workers."""
        released = {
            name: sorted(waiting)
            for name, waiting in self._waiting.items()
            # Counted first: to look for each worker at each arrival would take the square of their number.
            if 0 < len(waiting) >= self._members.num_present and not self.missing(name)
        }
        for name in released:
            del self._waiting[name]
        return released


MAX_PASSED = 2**16
"""Barriers of all workers that are remembered: far more than a job has whose processes are replaced."""

MAX_PASSED_VALUES = 2**23
"""Numbers in the answers to them: 64 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """A barrier that workers have passed together; `numbers` are its numbers, by worker."""

    name: str
    outcome: Outcome
    numbers: dict[int, int]


class PassedBarriers:
    """What workers were answered at the barriers that they passed, by number. Not thread-safe.

    A process in another's place comes to its barriers once more, from the first on, and is answered as that
    one was; and so is a worker that did not get its answer.

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

    def outcome(self, name: str, worker: int, number: int) -> Outcome | None:
        """Returns how a worker was answered; None: it has not passed this barrier.

        Raises:
            ProtocolError: If it passed another one then, or long ago.
        """
        if number > self.newest(worker):
            return None
        if (passed := self._by_number.get((worker, number))) is None:
            raise ProtocolError(
                f"{self._members.name(worker)} has passed its barrier {number} too long ago to come to "
                f"{name!r} again: start the job again from its checkpoint"
            )
        if passed.name != name:
            raise ProtocolError(
                f"{self._members.name(worker)} came to barrier {name!r} as its barrier {number}, which was "
                f"{passed.name!r} before: a process in another's place must come to the same barriers in the "
                f"same order"
            )
        return passed.outcome

    def expect(self, worker: int, number: int) -> None:
        """A worker comes to a barrier that it has not passed."""
        self._expected[worker] = number

    def note(self, name: str, workers: Sequence[int], outcome: Outcome) -> None:
        """Workers pass a barrier together; how those are answered that were not expected is not kept."""
        numbers = {each: self._expected.pop(each) for each in workers if each in self._expected}
        if numbers:
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
            oldest = self._passed.popleft()
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
            values = _to_hex(answer.values) if isinstance(answer, Reduced) else None
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
        together: list[list[PassedBarrier]] = []
        for each in state:
            if each.with_last:
                together[-1].append(each)
            else:
                together.append([each])
        for first, *others in together:
            values = None if first.values is None else _from_hex(first.values)
            outcome = Outcome(
                first.version,
                partial(_same, values),
                num_values=0 if values is None else values.size,
                remember=first.remember,
            )
            numbers = {each.worker: each.number for each in (first, *others)}
            self._add(_Passed(first.name, outcome, numbers))


def _to_hex(values: Numbers) -> str:
    return values.astype("<f8").tobytes().hex()


def _from_hex(digits: str) -> Numbers:
    return np.frombuffer(bytes.fromhex(digits), "<f8").astype(np.float64)


def _same(values: Numbers | None) -> Numbers | None:
    return values
