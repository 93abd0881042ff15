"""Pushes from their first chunk until they count: assembled, entered once, applied in order, recorded.

    chunk --take--> waits for others | known: answered as the first time | ready: all of the push
    ready --refuse--> refused again when it comes again
          --enter_part--> a part of a step --step complete--> applied by the caller --> step_applied
          --begin_arrival--> applied by the caller --> arrival_applied, or abandon_arrival

Each arrow takes the lock once, but `take` of a push that is one chunk, which needs none, and the wait for an
answer, which takes it once more. Nothing of a push changes parameters before all of it was checked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ctr_ps.protos.errors import ProtocolError, counted
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import (
    Acknowledged,
    Applied,
    Future,
    Member,
    PushId,
    Staleness,
    Version,
    WorkerProgress,
)
from ctr_ps.protos.store.moves import Cut, SeenPushes
from ctr_ps.ps_server.coordination.arrivals import Answer
from ctr_ps.ps_server.coordination.job_state import Chunk, WaitingChunk, WaitingPart
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.pending_calls import PendingCalls, T, raise_error
from ctr_ps.ps_server.coordination.push_assembly import PushAssembler
from ctr_ps.ps_server.coordination.push_ledger import (
    MAX_VERSION,
    PushLedger,
    PushState,
    lost_pushes,
    progress_of,
    require_plausible,
)
from ctr_ps.ps_server.coordination.steps import CompleteStep, StepAggregator


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What follows from a part that was taken, or a step that was applied."""

    answers: list[Answer]  # to the calls that it makes ready; `answer_all` answers them
    # the step that the caller applies now; None: none is complete, or another thread applies one
    complete: CompleteStep | None
    at: Version  # the version once all complete steps are applied


class PushIntake:
    """All pushes of a job, to be applied on arrival or as parts of steps. Thread-safe.

    Its ledger, and examples (by worker) and staleness of the applied pushes need the lock.
    """

    def __init__(self, members: Membership, steps: StepAggregator, calls: PendingCalls) -> None:
        self._members = members
        self._steps = steps
        self._calls = calls
        self._assembler = PushAssembler(members.all)
        self.ledger = PushLedger(members.all)
        self.examples: dict[int, int] = {}
        self.staleness = Staleness()

    @property
    def version(self) -> Version:
        """Steps applied."""
        return self._steps.version

    @property
    def batches(self) -> int:
        """Batches applied, those of the runs that this one resumes included."""
        return self._steps.batches

    def require_push(self, push_id: PushId) -> None:
        """Raises ProtocolError unless the job has the worker, and the push id's numbers are plausible."""
        self._members.require(push_id.worker)
        require_plausible(self._members.name(push_id.worker), push_id)

    def take(
        self, chunk: Chunk, push_id: PushId, step: Version | None
    ) -> list[Chunk] | Future[Version]:
        """Takes a chunk of a worker's part of `step`, or of a push to be applied on arrival.

        Returns all chunks of the push, in order, if none is missing any more: the caller checks it, and
        enters or refuses it. Else the answer: now if others are missing, as to the first if it came before.
        Raises ProtocolError if the worker is not of this job; of a push that is several chunks also if it
        contradicts others of them, comes too late, or another process has the worker's place.
        """
        self.require_push(push_id)
        if chunk.num_chunks == 1 and not chunk.chunk:
            return [chunk]
        self._assembler.check(push_id, chunk)
        with self._calls.lock:
            self._members.require_not_gone(push_id)
            came_before = self._has_entered(push_id, step) or self._assembler.is_complete(push_id)
            chunks = None if came_before else self._assembler.add(push_id, chunk)
        if came_before:
            return self.when_pushed(push_id, step)
        return Answered(self.version) if chunks is None else chunks

    def _has_entered(self, push_id: PushId, step: Version | None) -> bool:
        if step is not None:
            return self._steps.has_part(push_id.worker, step)
        return self.ledger.state(push_id) is not PushState.NEW

    def refuse(self, push_id: PushId, error: Exception) -> None:
        """A push that was taken in several chunks was refused: they are refused if they come again."""
        with self._calls.change(even_if_failed=True):
            self._assembler.refuse(push_id, error)

    def when_pushed(self, push_id: PushId, step: Version | None) -> Future[Version]:
        """Answers a push that came before as that one is: once it is applied, or its step waits for others.

        The future raises what that one raised.
        """
        name = f"push {push_id.sequence} of {self._members.name(push_id.worker)}"

        def poll() -> Callable[[], Version] | None:
            if self._assembler.is_complete(push_id):
                return None
            if not self._has_entered(push_id, step):
                refusal = self._assembler.refusal(push_id)
                return partial(
                    raise_error, refusal or ProtocolError(f"{name} failed, see the server's log")
                )
            is_applying = (
                self._steps.num_complete > self._steps.version
                if step is not None
                else self.ledger.state(push_id) is PushState.APPLYING
            )
            return None if is_applying else (lambda: self.version)

        return self._calls.wait(poll, lambda: f"{name} is still being applied")

    def begin_arrival(self, push_id: PushId) -> bool:
        """A push begins to be applied on arrival; ends with `arrival_applied` or `abandon_arrival`.

        Returns whether it is new; else it came before, and `when_pushed` answers it. Raises ProtocolError if
        a synchronous step waits for parts or is being applied, the worker is not of this job, or another
        process has its place.
        """
        with self._calls.lock:
            self._calls.require_no_failure()
            self._members.require_not_gone(push_id)
            if self.ledger.begin(push_id) is not PushState.NEW:
                return False
            try:
                self._steps.begin_arrival(push_id.worker)
            except ProtocolError:
                self.ledger.abandon(push_id)
                raise
            self._assembler.enter(push_id)
            return True

    def arrival_applied(self, push_id: PushId) -> list[Answer]:
        """Counts a push that was applied on arrival; see the invariants for the lock around it.

        Returns answers to the calls that it makes ready, for `answer_all`.
        """
        with self._calls.lock:
            self.ledger.note(push_id)
            self._count(push_id, version=self._steps.version, batches=push_id.batches)
            self._steps.end_arrival(push_id.batches)
            return self._calls.take_ready()

    def abandon_arrival(self, push_id: PushId) -> None:
        """A push could not be applied on arrival: it does not count."""
        with self._calls.change(even_if_failed=True):
            self.ledger.abandon(push_id)
            self._steps.end_arrival(0)

    def _count(self, push_id: PushId, *, version: Version, batches: int) -> None:
        """Counts a push that is applied to `version`; needs the lock."""
        self.staleness = self.staleness.add(max(0, version - push_id.pulled), batches)
        self.examples[push_id.worker] = self.examples.get(push_id.worker, 0) + push_id.examples

    def enter_part(self, gradients: Gradients, push_id: PushId, step: Version) -> StepOutcome:
        """Takes a worker's part of a synchronous step, once.

        Raises ProtocolError if the worker is not at this step or has gradients of no examples, or another
        process has its place.
        """
        has_own = gradients.dense and all(grad.examples for grad in gradients.dense.values())
        if push_id.divisor <= 0 and (gradients.sparse or (gradients.dense and not has_own)):
            raise ProtocolError(
                f"{self._members.name(push_id.worker)} pushed gradients for step {step} with "
                f"{push_id.divisor:g} examples in its push id, expected more than 0: the step is divided by "
                "them"
            )
        with self._calls.lock:
            self._calls.require_no_failure()
            self._members.require_not_gone(push_id)
            if self._steps.has_part(push_id.worker, step):
                self.ledger.duplicates += 1
            else:
                self._steps.add(push_id, step, gradients)
            self._assembler.enter(push_id)
            # First, since it may raise, and a step that was taken is to be applied.
            answers = self._calls.take_ready()
            return StepOutcome(answers, self._steps.take_complete_step(), self._steps.num_complete)

    def hold_part(self, part: WaitingPart) -> None:
        """Takes over a part of `waiting`, whose process may have its place no more."""
        with self._calls.lock:
            self._steps.add(part.push_id, part.step, part.gradients)

    def take_complete_step(self) -> CompleteStep | None:
        """Returns the next step to apply; its taker then calls `step_applied`, or `Coordinator.step_failed`.

        None if none is complete, or another is being applied: who applies that takes the next one, too.
        """
        with self._calls.lock:
            return None if self._calls.failure else self._steps.take_complete_step()

    def step_applied(self, step: CompleteStep) -> StepOutcome:
        """Moves the version on; see the invariants for the lock around it."""
        with self._calls.lock:
            for push_id in step.push_ids:
                self.ledger.note_part(push_id)
                self._count(push_id, version=step.step, batches=1)
            self._steps.step_applied(sum(push_id.batches for push_id in step.push_ids))
            answers = self._calls.take_ready()
            following = None if self._calls.failure else self._steps.take_complete_step()
            return StepOutcome(answers, following, self._steps.num_complete)

    def at_version(self, at: Version | None, answer: Callable[[], T]) -> Future[T]:
        """Answers once the version is `at`; None answers now.

        The future raises WaitTimeoutError if the version does not come, naming the workers that are behind.
        """
        self._calls.require_no_failure()
        if at is None:
            return Answered(answer())

        def describe() -> str:
            step = self._steps.version
            late = (
                f"version {at} was not reached within {self._calls.wait_limit_s:g} s: step {step}"
            )
            if self._steps.num_complete > step:
                return f"{late} is still being applied; see the server's log"
            return (
                f"{late} lacks the gradients of {self._members.names(self._steps.behind(step))}; "
                f"see their logs"
            )

        return self._calls.wait(
            lambda: answer if self._steps.version >= at else None,
            describe,
            self._calls.for_version,
        )

    def when_applied(self, at: Version | None = None) -> Future[Version]:
        """Answers with the version, once it is `at`; None: once all steps complete now are applied."""
        at = self._steps.num_complete if at is None else at
        version = self._steps.version
        return Answered(version) if version >= at else self.at_version(at, lambda: self.version)

    # A move of shards

    @property
    def in_steps(self) -> bool:
        """Whether the last push was a part of a step."""
        return self._steps.in_steps

    def seen(self) -> Cut:
        """Returns the steps that have begun, and the pushes on arrival that have come."""
        with self._calls.lock:
            seen = {
                worker: SeenPushes(
                    incarnation=member.incarnation,
                    pushes=max(self.ledger.num_seen(member), self._assembler.num_seen(member)),
                )
                for worker, member in self._present().items()
            }
            # A version of arrivals is no number of steps.
            return Cut(step=self._steps.num_begun if self._steps.in_steps else 0, seen=seen)

    def is_in(self, cut: Cut, push_id: PushId, step: Version | None) -> bool:
        """Whether a push is before a cut."""
        if step is not None:
            return step < cut.step
        seen = cut.seen.get(push_id.worker)
        if seen is None or seen.incarnation != push_id.incarnation:
            return False
        return push_id.sequence < seen.pushes

    def when_drained(self, cut: Cut, disturbed_by: Callable[[], str]) -> Future[Cut]:
        """Answers with `cut` once all pushes before it are applied, and no other; others are to wait.

        The future raises ProtocolError when there is a call, `disturbed_by`, that waits meanwhile.
        """

        def lacks(worker: int, seen: SeenPushes) -> bool:
            incarnation = self._members.incarnations.get(worker)
            if incarnation is None:  # a server that has lost its disk knows nobody
                return seen.pushes > 0
            if not self._members.is_present(worker) or incarnation != seen.incarnation:
                return False
            return self.ledger.num_applied(Member(worker, incarnation)) < seen.pushes

        def missing() -> list[int]:
            """Returns workers of which some are not."""
            if self._steps.version < cut.step:  # also if no part has come here yet
                return self._steps.behind(self._steps.version)
            return [worker for worker, seen in cut.seen.items() if lacks(worker, seen)]

        def poll() -> Callable[[], Cut] | None:
            if by := disturbed_by():
                return partial(raise_error, ProtocolError(f"a worker waits for {by}"))
            is_behind = max(self._steps.num_begun, cut.step) > self._steps.version
            return None if is_behind or missing() else (lambda: cut)

        return self._calls.wait(
            poll, lambda: f"pushes of {self._members.names(missing())} did not come in time"
        )

    def look_again(self) -> None:
        """Something has changed, besides pushes, that calls wait for."""
        with self._calls.change(even_if_failed=True):
            pass

    def lower(self, progress: Mapping[int, WorkerProgress]) -> None:
        """All workers have this progress, the least of any server: rows may come from one that had less."""
        with self._calls.lock:
            self.ledger.restore(progress)

    def _present(self) -> dict[int, Member]:
        """Returns the processes whose pushes may still come: not of those that were lost for good."""
        incarnations = self._members.incarnations.items()
        return {
            worker: Member(worker, incarnation)
            for worker, incarnation in incarnations
            if self._members.is_present(worker)
        }

    # State; all of this needs the lock

    def require_acknowledged(self, member: Member, acknowledged: Acknowledged) -> None:
        """Raises LostPushesError if pushes of a process are missing that were acknowledged."""
        name = self._members.name(member.worker)
        if (pushes := self.ledger.num_applied(member)) < acknowledged.pushes:
            raise lost_pushes(
                name,
                f"{counted(acknowledged.pushes, 'push')} acknowledged, but this server has {pushes}",
            )
        if (step := self._steps.next_step(member.worker)) < acknowledged.steps:
            raise lost_pushes(
                name,
                f"its part of step {acknowledged.steps - 1} was acknowledged, but that of step {step} is "
                "missing",
            )

    def applied(self) -> Applied:
        """Returns what is applied."""
        return Applied(version=self.version, batches=self.batches, workers=self.ledger.progress())

    def progress(self) -> dict[int, WorkerProgress]:
        """Returns the progress by worker, of those that read a stream with the parts that wait."""
        found = self.ledger.progress()
        for push_id in self._steps.waiting_ids():
            if push_id.partitions or (push_id.worker in found and found[push_id.worker].partitions):
                before = found.get(
                    push_id.worker, replace(progress_of(push_id), step=0, position="")
                )
                found[push_id.worker] = replace(
                    before,
                    sent=push_id.step - before.step,
                    sent_partitions={**before.sent_partitions, **push_id.partitions},
                )
        return found

    def waiting(self) -> list[WaitingPart | WaitingChunk]:
        """Returns the parts of steps that are not applied, and the chunks of pushes that lack others."""
        return [*self._steps.waiting(), *self._assembler.waiting()]

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], batches: int
    ) -> None:
        """Resumes an earlier run; its workers' progress holds until they push.

        Raises ProtocolError if this run has begun, or the other had more workers.
        """
        if max(version, batches) > MAX_VERSION:
            raise ProtocolError(
                f"a run cannot resume at version {version} with {batches} batches, expected each up to "
                f"{MAX_VERSION}"
            )
        for worker, each in progress.items():
            self._members.require(worker)
            require_plausible(self._members.name(worker), each)
        self._steps.resume(version, batches)
        # Else it comes late: pushes that complete no batch leave the version as it is.
        if not self.ledger.has_begun:
            self.ledger.restore(progress)
