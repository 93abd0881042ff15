"""The calls of CPU trainers that wait for the thread which trains.

    threads of the service: train, attend --> Joining --next--> the thread that trains --> answers

A call that comes again, as its answer was lost, waits for the same answer; an answer is kept until the CPU
trainer has said that it arrived.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ctr_ps.protos.errors import CtrPsError, ProtocolError, WaitTimeoutError
from ctr_ps.protos.wire.heter import Attend, Train, Trained

B = TypeVar("B")
T = TypeVar("T")


class Joining(Generic[B]):
    """Which batches a heter trainer trains on together, and when it comes to a barrier. Not thread-safe.

    synchronous   one batch of each CPU trainer that it serves and that has not come to a barrier: a step
    otherwise     what is there, in the order in which it came, up to a limit

    It comes to a barrier when those that it serves have, since others may take further steps with other heter
    trainers. Where it takes over from one that is lost, it serves all.
    """

    def __init__(self, waits_for: Collection[int], *, is_sync: bool, max_joined: int) -> None:
        """Has no batches; asynchronously, it joins up to `max_joined`."""
        # the CPU trainers without which it does not come to a barrier, nor synchronously to a step
        self.waits_for = set(waits_for)
        self._is_sync = is_sync
        self._max_joined = max_joined
        self._batches: deque[tuple[int, B]] = deque()
        self._attending: dict[int, Attend] = {}

    def add(self, worker: int, batch: B) -> None:
        """Takes a batch of a CPU trainer; raises ProtocolError if it may not have one now."""
        if worker not in self.waits_for:
            raise ProtocolError(
                f"worker {worker} sent a batch to a heter trainer that serves only the workers "
                f"{sorted(self.waits_for)}: give all processes the same list of heter trainers"
            )
        if self._is_sync and any(other == worker for other, _ in self._batches):
            raise ProtocolError(
                f"worker {worker} sent a second batch in one synchronous step: set train.thread_num = 1"
            )
        self._batches.append((worker, batch))

    def attend(self, barrier: Attend) -> None:
        """A CPU trainer comes to a barrier."""
        self._attending[barrier.member.worker] = barrier

    def remove(self, workers: Collection[int]) -> list[B]:
        """CPU trainers have left, or are lost; returns their batches, which nobody waits for."""
        self.waits_for.difference_update(workers)
        for worker in workers:
            self._attending.pop(worker, None)
        dropped = [batch for worker, batch in self._batches if worker in workers]
        self._batches = deque(each for each in self._batches if each[0] not in workers)
        return dropped

    def missing(self) -> list[int]:
        """Returns the CPU trainers that others wait for, ascending."""
        here = {worker for worker, _ in self._batches} | self._attending.keys()
        return sorted(self.waits_for - here) if here else []

    def take(self) -> list[B] | Attend | None:
        """Returns batches to train on together, or the barrier to come to; None until something comes."""
        if self._attending and not self._batches and self.waits_for <= self._attending.keys():
            barrier = next(iter(self._attending.values()))
            self._attending.clear()
            return barrier
        if not self._batches or (self._is_sync and self.missing()):
            return None
        if self._is_sync:
            step = sorted(self._batches, key=lambda of: of[0])
            self._batches.clear()
            return [batch for _, batch in step]
        number = min(len(self._batches), self._max_joined)
        return [self._batches.popleft()[1] for _ in range(number)]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A batch, and its answer to come."""

    batch: Train
    answer: Future[Trained] = field(default_factory=Future)


@dataclass(slots=True)
class _Sender:
    """One process of a CPU trainer: the answers that may be asked for again, by number."""

    incarnation: int
    answers: dict[int, Future[Trained]] = field(default_factory=dict)
    settled: int = 0


class Inbox:
    """Calls that wait for the thread that trains. Thread-safe."""

    def __init__(
        self,
        joining: Joining[Waiting],
        require: Callable[[Train], None],
        *,
        barriers_passed: int,
        wait_limit_s: float,
    ) -> None:
        """Takes calls from now on, which wait for others up to a limit; the job has passed some barriers.

        `require` raises ProtocolError unless a batch fits the model.
        """
        self._joining = joining
        self._require = require
        self._barriers_passed = barriers_passed
        self._wait_limit_s = wait_limit_s
        self._senders: dict[int, _Sender] = {}
        # Answers that are due when the thread has pushed what it had.
        self._attended: list[Future[None]] = []
        self._changed = threading.Condition()
        self._error: CtrPsError | None = None

    def train(self, batch: Train) -> Trained:
        """Waits for the batch to be trained on.

        Raises:
            ProtocolError: If it does not fit, or its answer was given and forgotten.
            WaitTimeoutError: If the batches of others do not come.
            CtrPsError: Why the heter trainer ends.
        """
        self._require(batch)
        with self._changed:
            answer = self._answer_of(batch)
        return self._wait(answer, f"the batch of worker {batch.member.worker}")

    def _answer_of(self, batch: Train) -> Future[Trained]:
        if self._error is not None:
            raise self._error
        sender = self._senders.get(batch.member.worker)
        if sender is None or sender.incarnation != batch.member.incarnation:
            sender = self._senders[batch.member.worker] = _Sender(batch.member.incarnation)
        if batch.number in sender.answers:
            return sender.answers[batch.number]
        if batch.number < sender.settled:
            raise ProtocolError(
                f"worker {batch.member.worker} sent batch {batch.number} again after its answer"
            )
        waiting = Waiting(batch)
        self._joining.add(batch.member.worker, waiting)
        sender.settled = max(sender.settled, batch.settled)
        for number in [number for number in sender.answers if number < sender.settled]:
            del sender.answers[number]
        sender.answers[batch.number] = waiting.answer
        self._changed.notify_all()
        return waiting.answer

    def attend(self, barrier: Attend) -> None:
        """A CPU trainer comes to a barrier; returns when all of its batches are with the servers.

        Raises:
            CtrPsError: As `train` does.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if barrier.number < self._barriers_passed:
                return  # it comes again
            answer: Future[None] = Future()
            self._joining.attend(barrier)
            self._attended.append(answer)
            self._changed.notify_all()
        self._wait(answer, f"worker {barrier.member.worker} at the barrier {barrier.name!r}")

    def next(self, limit_s: float) -> list[Waiting] | Attend | None:
        """Returns what to do next; None if that does not come within `limit_s`.

        To be called when the servers have the gradients of what was returned before.
        """
        with self._changed:
            self._answer_attended()
            found = self._joining.take()
            if found is None:
                self._changed.wait(limit_s)
                self._answer_attended()
                found = self._joining.take()
            if isinstance(found, Attend):
                self._barriers_passed = found.number + 1
            return found

    def remove(self, workers: Collection[int]) -> bool:
        """CPU trainers have left, or are lost; returns whether there are any others to serve."""
        with self._changed:
            for waiting in self._joining.remove(workers):
                worker = waiting.batch.member.worker
                waiting.answer.set_exception(ProtocolError(f"worker {worker} has left the job"))
            return bool(self._joining.waits_for)

    def fail(self, error: CtrPsError) -> None:
        """Answers all calls, also later ones, with an error."""
        with self._changed:
            self._error = error
            answers: list[Future[Any]] = [*self._attended]
            answers += (each for of in self._senders.values() for each in of.answers.values())
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)

    def _answer_attended(self) -> None:
        for answer in self._attended:
            answer.set_result(None)
        self._attended.clear()

    def _wait(self, answer: Future[T], what: str) -> T:
        try:
            return answer.result(self._wait_limit_s)
        except TimeoutError:
            with self._changed:
                missing = self._joining.missing()
        raise WaitTimeoutError(
            f"heter trainer: {what} waited {self._wait_limit_s:g} s (cluster.wait_timeout_s) for batches "
            f"of workers {missing}"
        )
