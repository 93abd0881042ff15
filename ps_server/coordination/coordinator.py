"""How the workers of a job keep together: steps, barriers, clocks, messages, progress, who has left.

    push --part of a step--> steps.py --complete--> CompleteStep --the store applies it--> step_applied
    push --on arrival--> begin_arrival, the store applies it, end_arrival
    pull, barrier, message --> a future, answered by the event that makes it ready

The rules are in the sans-IO classes; here is the one lock around them, and the futures of the calls that
wait. The coordinator decides; it touches no parameters.

Invariants:
- The lock is held for decisions only. Under it no parameters are read or written, no call is answered and no
  other lock is waited for, so whatever else is held, it can be taken, and `status` never waits for a step.
- Who applies holds `Snapshots.changing` and takes this lock inside it, around the parameters and the record
  of the change (`step_applied`, `note_applied`). A snapshot has `changing` to itself, so its parameters
  and progress are of one moment, with each step as a whole or not at all; the version counts synchronous
  steps exactly, and a push on arrival just after it was applied.
- One step at a time is taken to be applied, in order, and the version moves on when it is applied. No pull at
  that version is answered before, and no barrier is released while a complete step is not applied.
- A step that fails may be applied in part, so it ends the job, as an abort does: every call that waits
  raises, and so does every later one but `status`, `shrink`, `digest` and `pull_changed`.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from protos.errors import (
    AbortedError,
    JobError,
    NoMemoryError,
    PlaceLostError,
    ProtocolError,
    WaitTimeoutError,
    counted,
)
from protos.futures import Answered, WaitingFuture
from protos.gradients import Gradients
from protos.limits import CHUNK_BYTES
from protos.role import Members
from protos.runtime.malloc import memory_error_of
from protos.store import (
    Acknowledged,
    Applied,
    Future,
    Joined,
    Lease,
    Member,
    Message,
    Numbers,
    PushId,
    Reduced,
    ReduceOp,
    SaveStatus,
    Staleness,
    StoreStatus,
    TableStatus,
    Version,
    WorkerLoss,
    WorkerProgress,
    require_numbers,
)
from ps_server.coordination.all_reduce import Contribution, Reductions, outcome_of
from ps_server.coordination.barrier import Barriers, PassedBarriers
from ps_server.coordination.clocks import Clocks
from ps_server.coordination.job_state import (
    Chunk,
    JobState,
    Waiting,
    WaitingArrival,
    WaitingMessage,
)
from ps_server.coordination.mailbox import Mailbox
from ps_server.coordination.membership import Membership
from ps_server.coordination.missing_workers import MissingWorkers
from ps_server.coordination.push_assembly import PushAssembler
from ps_server.coordination.push_ledger import (
    MAX_VERSION,
    PushLedger,
    PushState,
    lost_pushes,
    require_plausible,
)
from ps_server.coordination.steps import CompleteStep, StepAggregator

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NEEDS_WORKER_0 = ", and the others cannot go on without worker 0, which saves and evaluates"

_HOW_TO_RESUME = (
    " [the servers keep their update logs: start all servers and workers again to go on from them]"
)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingCall:
    """A call that waits; `poll` needs the lock and returns how to answer it once that is possible."""

    future: WaitingFuture[Any]
    poll: Callable[[], Callable[[], Any] | None]


class _PendingCalls:
    """Calls that wait for the same value to change. Not thread-safe.

    Until it has changed none of them is polled: all workers wait for a version while all push, and to poll
    every call at every push would take the square of their number in each step.
    """

    def __init__(self, value: Callable[[], object]) -> None:
        """Has no calls; `value` returns what they wait for."""
        self._value = value
        self._polled_at: object = None
        self._calls: list[_PendingCall] = []

    def add(self, call: _PendingCall) -> None:
        """Adds a call that is not ready at the present value."""
        if not self._calls:  # else the others may have been polled at an older one
            self._polled_at = self._value()
        self._calls.append(call)

    def remove(self, future: WaitingFuture[Any]) -> None:
        """Removes a call that waits no longer."""
        self._calls = [call for call in self._calls if call.future is not future]

    def take_all(self) -> list[WaitingFuture[Any]]:
        """Removes and returns the futures of all."""
        futures = [call.future for call in self._calls]
        self._calls.clear()
        return futures

    def take_ready(self) -> list[Callable[[], None]]:
        """Removes calls that are ready, and returns how to answer them; removes cancelled ones, too."""
        if not self._calls or (value := self._value()) == self._polled_at:
            return []
        self._polled_at = value
        pending: list[_PendingCall] = []
        answers: list[Callable[[], None]] = []
        for call in self._calls:
            if (answer := call.poll()) is not None:
                answers.append(partial(call.future.answer_with, answer))
            elif not call.future.cancelled():
                pending.append(call)
        self._calls = pending
        return answers


class Coordinator:
    """The workers of one job, as one store sees them. Thread-safe.

    Attributes:
        lacks_memory: Whether the job has failed since this process has no memory left.
    """

    def __init__(
        self,
        members: Members,
        *,
        wait_limit_s: float,
        inbox_bytes: int,
        on_failure: Callable[[str], None] = lambda _: None,
        jobs_before: int = 0,
        has_update_log: bool = False,
    ) -> None:
        """Expects all workers at version 0.

        Args:
            members: Workers of the job, and its heter trainers.
            wait_limit_s: How long a call waits for other workers, in seconds.
            inbox_bytes: Limit of the messages that wait for one worker.
            on_failure: Called once, from any thread, with the reason for which the job ends before its time.
            jobs_before: Jobs before this one.
            has_update_log: See `Joined`.
        """
        self._jobs_before = jobs_before
        self._has_update_log = has_update_log
        self._on_failure = on_failure
        self._wait_limit_s = wait_limit_s
        self._lock = threading.Lock()
        self._members = Membership(members)
        self._assembler = PushAssembler(members)
        self._steps = StepAggregator(self._members)
        self._ledger = PushLedger(members)
        self._barriers = Barriers(self._members)
        self._barrier_futures: dict[tuple[str, int], WaitingFuture[Any]] = {}
        self._passed = PassedBarriers(members)
        self._reductions = Reductions()
        self._clocks = Clocks(self._members)
        self._mailbox = Mailbox(self._members, inbox_bytes=inbox_bytes)
        self._missing_workers = MissingWorkers(members)
        steps = self._steps  # through self it would be a cycle, for the garbage collector
        self._wait_for_version = _PendingCalls(lambda: steps.version)
        self._wait_for_clocks = _PendingCalls(self._clocks.slowest)
        self._wait_for_others = _PendingCalls(object)  # polled at each change
        self._pending = (self._wait_for_version, self._wait_for_clocks, self._wait_for_others)
        self._examples: dict[int, int] = {}
        self._staleness = Staleness()
        self._failure = ""  # why the job ended before its time
        self._can_resume = False
        self.lacks_memory = False

    @property
    def version(self) -> Version:
        """Steps applied."""
        return self._steps.version

    @property
    def batches(self) -> int:
        """Batches applied, those of the runs that this one resumes included."""
        return self._steps.batches

    def join(
        self,
        member: Member,
        terms: Mapping[str, str],
        lease: Lease | None,
        *,
        only_asks: bool = False,
    ) -> Future[Joined]:
        """See `protos.store.Store`; of this store alone. `only_asks` is as for `Membership.join`."""
        if self._failure:
            raise AbortedError(
                f"the job of this server has ended: {self._failure}. Restart the servers for the next one"
            )
        worker = member.worker

        def joined() -> Joined:
            return Joined(
                jobs_before=self._jobs_before,
                barriers_passed=self._passed.newest(worker),
                has_update_log=self._has_update_log,
                version=self._steps.version,
            )

        def poll() -> Callable[[], Joined] | None:
            try:
                return joined if self._members.may_join(member) else None
            except ProtocolError as error:
                return partial(_raise, error)

        def describe() -> str:
            return (
                f"{self._members.name(worker)} of this job is another process, which gave no sign of life, "
                f"but whose lease has not run out within {self._wait_limit_s:g} s: see --wait-limit and "
                f"cluster.lease_s"
            )

        try:
            with self._change():
                if self._members.join(member, terms, lease, only_asks=only_asks):
                    self._forget_arrivals(worker)
        except JobError as error:
            if not self._members.all_joined:  # else it is refused alone
                self._fail(str(error), comes_again=True)
            raise
        return self._wait(poll, describe)

    def hear_of(self, member: Member) -> None:
        """A process gives a sign of life; raises ProtocolError unless it has its place."""
        with self._lock:
            was_lost = member.worker in self._members.lost
            self._members.hear_of(member)
        if was_lost:
            logger.info("%s is back", self._members.name(member.worker))

    def require_acknowledged(self, member: Member, acknowledged: Acknowledged) -> None:
        """Raises LostPushesError if pushes of a process are missing that were acknowledged."""
        with self._lock:
            pushes = self._ledger.num_applied(member)
            steps = self._steps.next_step(member.worker)
        if pushes < acknowledged.pushes:
            lost = f"acknowledged to it: {counted(acknowledged.pushes, 'push')}, there: {pushes}"
        elif steps < acknowledged.steps:
            lost = (
                f"its part of step {acknowledged.steps - 1} was acknowledged, and that of step {steps} is "
                f"not there"
            )
        else:
            return
        raise lost_pushes(self._members.name(member.worker), lost)

    def require_place(self, member: Member) -> None:
        """Raises ProtocolError unless the process has its place; it is no sign of life."""
        with self._lock:
            self._members.require_place(member)

    def would_return(self, member: Member) -> bool:
        """Whether a sign of life of a process that has a place changes who may have it next."""
        with self._lock:
            return self._members.would_return(member)

    def end_lease(self, worker: int) -> None:
        """The lease of a worker runs out by what it says itself: it is lost when time next passes."""
        with self._lock:
            self._members.end_lease(worker)
        logger.info("%s ends its lease", self._members.name(worker))

    def take_replaced(self, worker: int) -> bool:
        """Whether another process has taken the place of this worker since the last call."""
        with self._lock:
            is_replaced = worker in self._members.replaced
            self._members.replaced.discard(worker)
        return is_replaced

    @property
    def waits_for_lost(self) -> bool:
        """Whether another process may take the place of a lost one."""
        lease = self._members.lease
        return lease is not None and lease.on_worker_loss is WorkerLoss.WAIT

    def pass_time(self, seconds: float) -> list[int]:
        """Time passes without a sign of life of some workers; returns those to `lose`."""
        with self._change(even_if_failed=True):  # one that waits for a place may be refused now
            if self._failure:
                return []
            lines = self._missing_workers.pass_time(seconds, self._missing())
            silent = self._members.pass_time(seconds)
        for line in lines:
            logger.info(line)
        return silent

    def _missing(self) -> dict[str, list[int]]:
        """Returns the workers that others wait for, by the place where they do; needs the lock."""
        places = {f"barrier {name}": of for name, of in self._barriers.all_missing().items()}
        if behind := self._steps.missing():
            places[f"step {self._steps.num_complete}"] = behind
        return places

    def lose(self, workers: Sequence[int]) -> None:
        """Workers are lost: by the rule of the job it ends, or they leave, or others take their places."""
        with self._change(even_if_failed=True):
            lease = self._members.lease
            if lease is None:
                return
            rule = lease.on_worker_loss
            for worker in workers:
                logger.warning(
                    "%s is lost silent_s=%g on_worker_loss=%s",
                    self._members.name(worker),
                    lease.seconds,
                    rule.value,
                )
                self._members.lose(worker)
                if rule is WorkerLoss.CONTINUE and worker != 0:
                    self._leave(worker, self._steps.next_step(worker))
        if rule is WorkerLoss.FAIL or (rule is WorkerLoss.CONTINUE and 0 in workers):
            why = "" if rule is WorkerLoss.FAIL else _NEEDS_WORKER_0
            self._fail(
                f"nothing was heard of {self._members.names(workers)} for {lease.seconds:g} s "
                f"(cluster.lease_s), so they are lost{why}: see their logs and machines, and start the job "
                f"again from its checkpoint"
            )

    def _forget_arrivals(self, worker: int) -> None:
        """Another process has a worker's place, and comes by itself to where that one waits.

        At the first barrier it may not have loaded yet. In the steps and clocks the worker stays absent: that
        one had ended its steps before the barrier, so there are none for the new process to take part in.
        """
        self._barriers.leave(worker)
        error = PlaceLostError(
            f"another process has taken the place of {self._members.name(worker)} while this one waited"
        )
        for name in [name for name, of in self._barrier_futures if of == worker]:
            self._reductions.take(name, [worker])
            future = self._barrier_futures.pop((name, worker))
            self._wait_for_others.add(_PendingCall(future, lambda: partial(_raise, error)))

    # State

    def call_on_failure(self, on_failure: Callable[[str], None]) -> None:
        """Has this called instead of what `__init__` was given."""
        self._on_failure = on_failure

    def state(self) -> JobState:
        """Returns what `restore` needs, besides what `waiting` returns."""
        with self._lock:
            return JobState(
                members=self._members.state(),
                version=self._steps.version,
                batches=self._steps.batches,
                next_step=self._steps.next_steps_without_waiting(),
                since=self._steps.since(),
                absent_from=self._steps.absent(),
                progress=self._ledger.progress(),
                applied=self._ledger.applied(),
                examples=dict(self._examples),
                staleness=self._staleness,
                passed=self._passed.state(),
                clocks=self._clocks.state(),
                inboxes=self._mailbox.state(),
            )

    def waiting(self) -> list[Waiting]:
        """Returns what is part of what this knows, and waits for others or is to be taken by them."""
        with self._lock:
            arrivals = []
            for name, worker in self._barrier_futures:
                given = self._reductions.given(name, worker)
                arrivals.append(
                    WaitingArrival(
                        name=name,
                        worker=worker,
                        step=self._steps.absent()[worker],
                        number=self._passed.expected(worker),
                        values=None if given is None else given.values,
                        op=None if given is None else given.op,
                        remember=given is None or given.remember,
                    )
                )
            return [
                *self._steps.waiting(),
                *self._assembler.waiting(),
                *arrivals,
                *self._mailbox.waiting(),
            ]

    def restore(self, state: JobState) -> None:
        """Takes over what `state` returned, before anything was called."""
        with self._lock:
            self._members.restore(state.members)
            self._steps.restore(
                state.version, state.batches, state.next_step, state.since, state.absent_from
            )
            self._ledger.restore(state.progress)
            self._ledger.restore_applied(state.applied)
            self._examples = dict(state.examples)
            self._staleness = state.staleness
            self._passed.restore(state.passed)
            self._clocks.restore(state.clocks)
            self._mailbox.restore(state.inboxes)

    def hold(self, waiting: WaitingMessage) -> None:
        """Takes over a message of `waiting`, after `restore`."""
        with self._lock:
            self._mailbox.hold(waiting)

    def require_push(self, push_id: PushId) -> None:
        """Raises ProtocolError unless the job has the worker, and the push id's numbers are plausible."""
        self._members.require(push_id.worker)
        require_plausible(self._members.name(push_id.worker), push_id)

    def _require_place(self, push_id: PushId) -> None:
        """Raises ProtocolError if another process has the place of the one that pushes; needs the lock.

        It may have taken it after the call came. In process nobody joins.
        """
        if self._members.incarnation_of(push_id.worker) is not None:
            self._members.require_place(Member(push_id.worker, push_id.incarnation))

    def _require_number(self, worker: int, what: str, number: int) -> None:
        if number > MAX_VERSION:
            raise ProtocolError(
                f"{self._members.name(worker)} says {what} {number}, expected up to {MAX_VERSION}"
            )

    def require_member(self, worker: int) -> None:
        """Raises ProtocolError unless the job has this worker."""
        self._members.require(worker)

    def status(
        self, tables: Mapping[str, TableStatus], last_save: SaveStatus | None
    ) -> StoreStatus:
        """Returns the status of a store that has `tables` and was last saved so."""
        with self._lock:
            return StoreStatus(
                version=self._steps.version,
                tables=tables,
                examples=dict(self._examples),
                left=frozenset(self._members.left),
                lost=frozenset(self._members.lost),
                staleness=self._staleness,
                progress=self._ledger.progress(),
                last_save=last_save,
                duplicates=self._ledger.duplicates,
                batches=self._steps.batches,
                silent_s=self._members.silent_s,
                lease_s=lease.seconds if (lease := self._members.lease) else None,
            )

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], batches: int
    ) -> None:
        """Resumes an earlier run; its workers' progress holds until they push.

        Raises:
            ProtocolError: If this run has begun, or the other had more workers.
        """
        with self._lock:
            if max(version, batches) > MAX_VERSION:
                raise ProtocolError(
                    f"a run cannot resume at version {version} with {batches} batches, above {MAX_VERSION}"
                )
            for worker, each in progress.items():
                self._members.require(worker)
                require_plausible(self._members.name(worker), each)
            self._steps.resume(version, batches)
            # Else it comes late: pushes that complete no batch leave the version as it is.
            if not self._ledger.has_begun:
                self._ledger.restore(progress)

    def applied(self) -> Applied:
        """Returns what is applied.

        Raises:
            AbortedError: If the job has ended by an error: after a failed step the parameters may have a part
                of it.
        """
        with self._lock:
            self.require_no_failure()
            return Applied(
                version=self._steps.version,
                batches=self._steps.batches,
                workers=self._ledger.progress(),
            )

    # Pushes

    def assemble(self, chunk: Chunk, push_id: PushId) -> list[Chunk] | None:
        """Takes a chunk of a push; returns all of its chunks, in order, if it was the last to come.

        Raises:
            ProtocolError: If it contradicts other chunks of the push, comes too late, the worker is not of
                this job, or another process has its place.
            Exception: That for which the push was refused.
        """
        with self._lock:
            self.require_push(push_id)
            self._require_place(push_id)
            return self._assembler.add(push_id, chunk)

    def refuse_push(self, push_id: PushId, error: Exception) -> None:
        """A push that was assembled was refused: its chunks are refused if they come again."""
        with self._change(even_if_failed=True), suppress(ProtocolError):
            self._require_place(push_id)
            self._assembler.refuse(push_id, error)

    def has_push(self, push_id: PushId, step: Version | None) -> bool:
        """Whether all of the push came before, to be applied on arrival or as the worker's part of `step`.

        Raises:
            ProtocolError: If another process has the worker's place.
        """
        with self._lock:
            self._require_place(push_id)
            return self._has_entered(push_id, step) or self._assembler.is_complete(push_id)

    def _has_entered(self, push_id: PushId, step: Version | None) -> bool:
        if step is not None:
            return self._steps.has_part(push_id.worker, step)
        return self._ledger.state(push_id) is not PushState.NEW

    def begin_arrival(self, push_id: PushId) -> bool:
        """A push begins to be applied on arrival; ends with `end_arrival` or `abandon_arrival`.

        Returns:
            Whether it is new; else it came before, and `when_pushed` answers it.

        Raises:
            ProtocolError: If a synchronous step waits for parts or is being applied, the worker is not of
                this job, or another process has its place.
        """
        with self._lock:
            self.require_no_failure()
            self._require_place(push_id)
            if self._ledger.begin(push_id) is not PushState.NEW:
                return False
            try:
                self._steps.begin_arrival(push_id.worker)
            except ProtocolError:
                self._ledger.abandon(push_id)
                raise
            self._assembler.enter(push_id)
            return True

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
                    _raise, refusal or ProtocolError(f"{name} failed, see the server's log")
                )
            is_applying = (
                self._steps.num_complete > self._steps.version
                if step is not None
                else self._ledger.state(push_id) is PushState.APPLYING
            )
            return None if is_applying else (lambda: self.version)

        return self._wait(poll, lambda: f"{name} is still being applied")

    def note_applied(self, push_id: PushId) -> None:
        """Records a push on arrival as progress; see the invariants for the lock around it."""
        with self._lock:
            self._ledger.note(push_id)

    def end_arrival(self, push_id: PushId) -> Version:
        """Counts a push that was applied on arrival, and returns the version."""
        with self._change():
            self._count(push_id, version=self._steps.version, batches=push_id.batches)
            return self._steps.end_arrival(push_id.batches)

    def abandon_arrival(self, push_id: PushId) -> None:
        """A push could not be applied on arrival: it does not count."""
        with self._change(even_if_failed=True):
            self._ledger.abandon(push_id)
            self._steps.end_arrival(0)

    def push_part(self, gradients: Gradients, push_id: PushId, step: Version) -> None:
        """Takes a worker's part of a synchronous step, once.

        Raises:
            ProtocolError: If the worker is not at this step or has gradients of no examples, or another
                process has its place.
        """
        has_own = gradients.dense and all(grad.examples for grad in gradients.dense.values())
        if push_id.divisor <= 0 and (gradients.sparse or (gradients.dense and not has_own)):
            raise ProtocolError(
                f"{self._members.name(push_id.worker)} pushed gradients for step {step} that says it has "
                f"{push_id.divisor:g} examples: a step is divided by the examples of its push ids"
            )
        with self._change():
            self._require_place(push_id)
            if self._steps.has_part(push_id.worker, step):
                self._ledger.duplicates += 1
            else:
                self._steps.add(push_id, step, gradients)
            self._assembler.enter(push_id)

    def _count(self, push_id: PushId, *, version: Version, batches: int) -> None:
        """Counts a push that is applied to `version`; needs the lock."""
        self._staleness = self._staleness.add(max(0, version - push_id.pulled), batches)
        self._examples[push_id.worker] = self._examples.get(push_id.worker, 0) + push_id.examples

    # Complete steps

    def take_complete_step(self) -> CompleteStep | None:
        """Returns the next step to apply; its taker then calls `step_applied` or `step_failed`.

        None if none is complete, or another is being applied: who applies that takes the next one, too.
        """
        with self._lock:
            return None if self._failure else self._steps.take_complete_step()

    def step_applied(self, step: CompleteStep) -> None:
        """Moves the version on; see the invariants for the lock around it. `answer_ready` follows."""
        with self._lock:
            for push_id in step.push_ids:
                self._ledger.note_part(push_id)
                self._count(push_id, version=step.step, batches=1)
            self._steps.step_applied(sum(push_id.batches for push_id in step.push_ids))

    def step_failed(self, step: CompleteStep, error: BaseException) -> None:
        """Ends the job: every call that waits raises, and so does every later one that needs the step."""
        if (no_memory := memory_error_of(error)) is not None:
            self.lacks_memory = True
            self._fail(f"step {step.step} could not be applied: {no_memory}")
            return
        self._fail(
            f"step {step.step} could not be applied ({error!r}), and parameters may have a part of it: "
            f"see the server's log, restart the servers and load the last checkpoint",
            comes_again=True,
        )

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            self._members.require(worker)
            has_left = not self._members.is_present(worker)
        if has_left:
            raise ProtocolError(
                f"{self._members.name(worker)} has left, so it cannot abort the job"
            )
        self._fail(
            f"{self._members.name(worker)} aborted the job: {reason}", comes_again=comes_again
        )

    def _fail(self, failure: str, *, comes_again: bool = False) -> None:
        """Ends the job; a process in the place of a lost one can only go on if such places may be taken."""
        with self._lock:
            is_first = not self._failure
            if is_first:
                self._can_resume = (
                    self._has_update_log
                    and self.waits_for_lost
                    and not (comes_again or self.lacks_memory)  # then this server goes on alone
                )
                self._failure = f"{failure}{_HOW_TO_RESUME}" if self._can_resume else failure
            failure = self._failure
            futures = [future for calls in self._pending for future in calls.take_all()]
            futures += self._barrier_futures.values()
            self._barrier_futures.clear()
        for future in futures:
            future.answer_with(self.require_no_failure)
        if is_first:
            self._on_failure(failure)

    @property
    def failure(self) -> str:
        """Why the job has ended before its time; empty: it has not."""
        return self._failure

    @property
    def can_resume(self) -> bool:
        """Whether a job that has failed can go on from the servers' update logs."""
        return self._can_resume

    def require_no_failure(self) -> None:
        """Raises AbortedError if the job has ended before its time, NoMemoryError if it lacked memory."""
        if self._failure:
            raise (NoMemoryError if self.lacks_memory else AbortedError)(self._failure)

    def when_applied(self) -> Future[Version]:
        """Answers with the version, once all steps that are complete now are applied."""
        with self._lock:
            version, at = self._steps.version, self._steps.num_complete
        return Answered(version) if version == at else self.at_version(at, lambda: self.version)

    # Waiting

    def at_version(self, at: Version | None, answer: Callable[[], T]) -> Future[T]:
        """Answers once the version is `at`; None answers now.

        The future raises WaitTimeoutError if the version does not come, naming the workers that are behind.
        """
        self.require_no_failure()
        if at is None:
            return Answered(answer())

        def describe() -> str:
            step = self._steps.version
            if self._steps.num_complete > step:
                return (
                    f"version {at} did not come within {self._wait_limit_s:g} s: step {step} is still being "
                    f"applied; see the server's log"
                )
            return (
                f"version {at} did not come within {self._wait_limit_s:g} s: step {step} lacks the "
                f"gradients of {self._members.names(self._steps.behind(step))}; see their logs"
            )

        return self._wait(
            lambda: answer if self._steps.version >= at else None, describe, self._wait_for_version
        )

    def _wait(
        self,
        poll: Callable[[], Callable[[], T] | None],
        describe: Callable[[], str],
        pending: _PendingCalls | None = None,
    ) -> Future[T]:
        """Answers as soon as `poll` says how; `describe` is the message when that is not in time.

        Args:
            poll: Needs the lock.
            describe: Needs the lock.
            pending: Where the call waits if it is not ready; None: where it is polled at each change.
        """
        pending = pending or self._wait_for_others

        def give_up() -> WaitTimeoutError:
            with self._lock:
                pending.remove(future)
                return WaitTimeoutError(describe())

        future: WaitingFuture[T] = WaitingFuture(self._wait_limit_s, give_up)
        with self._lock:
            answer = poll()
            if answer is None:
                self.require_no_failure()
                pending.add(_PendingCall(future, poll))
                return future
        return Answered(answer())

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
        future: WaitingFuture[Any] = WaitingFuture(
            self._wait_limit_s, lambda: self._barrier_timeout(name, worker, future)
        )
        with self._change():
            self._require_number(worker, "step", step)
            if number is not None:
                if (outcome := self._passed.outcome(name, worker, number)) is not None:
                    brought = None if contribution is None else contribution.values
                    return Answered(outcome.answer(brought))
                self._passed.expect(worker, number)
            self._barriers.arrive(name, worker)
            self._barrier_futures[name, worker] = future
            self._reductions.give(name, worker, contribution)
            self._steps.leave(worker, step)
            self._clocks.pause(worker)
        return future

    def _barrier_timeout(self, name: str, worker: int, future: Future[Any]) -> WaitTimeoutError:
        with self._lock:
            missing = self._barriers.missing(name)
            places = {other: self._barriers.place_of(other) for other in missing}
            is_applying = self._steps.num_complete > self._steps.version
            # A worker that has come again waits by its newer call.
            if self._barrier_futures.get((name, worker)) is future:
                self._barriers.give_up(name, worker)
                del self._barrier_futures[name, worker]
        if not missing and is_applying:
            return WaitTimeoutError(
                f"barrier {name!r}: all workers came, but steps were not applied within "
                f"{self._wait_limit_s:g} s; see the server's log"
            )
        elsewhere = "".join(
            f"; {self._members.name(other)} waits at {place!r}"
            for other, place in places.items()
            if place
        )
        return WaitTimeoutError(
            f"barrier {name!r}: {self._members.names(missing)} did not come within {self._wait_limit_s:g} s; "
            f"see their logs{elsewhere}"
        )

    def advance(
        self, worker: int, clock: int, *, at_least: int, after_barrier: int | None = None
    ) -> Future[int]:
        """See `protos.store.Store`; `after_barrier` is the number of the barrier that it came to last."""

        def poll() -> Callable[[], int] | None:
            slowest = self._clocks.slowest()
            if slowest is None:
                return lambda: at_least
            return None if slowest < at_least else lambda: slowest

        def describe() -> str:
            clocks = self._clocks.behind(at_least).items()
            behind = ", ".join(
                f"{self._members.name(worker)} only {clock}" for worker, clock in clocks
            )
            return (
                f"not all workers finished {counted(at_least, 'step')} within {self._wait_limit_s:g} s: "
                f"{behind}; see their logs"
            )

        with self._change():
            if after_barrier is not None and after_barrier < self._passed.newest(worker):
                return Answered(at_least)  # it comes late, and its worker has counted from 0 since
            self._require_number(worker, "clock", clock)
            self._clocks.advance(worker, clock, at_least)
        return self._wait(poll, describe, self._wait_for_clocks)

    def post(self, exchange: str, message: Message) -> Future[None]:
        """See `protos.store.Store`."""

        def poll() -> Callable[[], None] | None:
            if (fault := self._mailbox.fault_of_post(exchange, message)) is not None:
                return partial(_refuse, fault)
            return _nothing if self._mailbox.is_accepted(exchange, message) else None

        def describe() -> str:
            return (
                f"exchange {exchange!r}: worker {message.receiver} took no messages within "
                f"{self._wait_limit_s:g} s, so there is no room for more; see its log"
            )

        with self._change():
            self._mailbox.post(exchange, message)
        return self._wait(poll, describe)

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """See `protos.store.Store`."""

        def poll() -> Callable[[], Sequence[Message]] | None:
            messages = self._mailbox.take(exchange, worker, CHUNK_BYTES)
            if messages is not None:
                return lambda: messages
            fault = self._mailbox.fault_of_take(exchange, worker)
            return None if fault is None else partial(_refuse, fault)

        def describe() -> str:
            return (
                f"exchange {exchange!r}: nothing came for worker {worker} within {self._wait_limit_s:g} s: "
                f"{self._members.names(self._mailbox.missing(exchange, worker))} have not posted their last "
                f"message; see their logs"
            )

        with self._change():
            self._mailbox.acknowledge(exchange, worker, received)
        return self._wait(poll, describe)

    def leave(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`; after a failure, too."""
        with self._change(even_if_failed=True):
            self._require_number(worker, "step", step)
            self._leave(worker, step)

    def _leave(self, worker: int, step: Version) -> None:
        self._members.leave(worker)
        self._steps.leave(worker, step)
        self._barriers.leave(worker)
        self._clocks.pause(worker)
        self._mailbox.leave(worker)
        self._examples.setdefault(worker, 0)

    def all_left(self) -> bool:
        """Whether every worker has left, and all steps are applied that still can be."""
        with self._lock:
            is_applied = self._steps.num_complete == self._steps.version
            return self._members.all_left and (is_applied or bool(self._failure))

    # Answers

    @contextmanager
    def _change(self, *, even_if_failed: bool = False) -> Iterator[None]:
        """Holds the lock for an event; then, without it, answers the calls that are ready."""
        with self._lock:
            if not even_if_failed:
                self.require_no_failure()
            yield
            answers = self._take_answers()
        for answer in answers:
            answer()

    def answer_ready(self) -> None:
        """Answers the calls that a step made ready."""
        with self._lock:
            answers = self._take_answers()
        for answer in answers:
            answer()

    def _take_answers(self) -> list[Callable[[], None]]:
        if self._failure:
            return []  # all who wait were told
        # In this order: a call that waits for slower workers is answered when these are in a barrier, before
        # the barrier is released and they count from 0 again.
        ready = [answer for calls in self._pending for answer in calls.take_ready()]
        return [*ready, *self._take_released()]

    def _take_released(self) -> list[Callable[[], None]]:
        if self._steps.num_complete > self._steps.version:
            return []  # workers resume from a barrier at the version of all steps before it
        answers: list[Callable[[], None]] = []
        for name, workers in self._barriers.take_released().items():
            given = self._reductions.take(name, workers)
            outcome = outcome_of(name, given, self._members.all, self._steps.version)
            self._passed.note(name, workers, outcome)
            for worker in workers:
                self._steps.rejoin(worker)
                self._clocks.restart(worker)
                future = self._barrier_futures.pop((name, worker))
                answers.append(partial(future.answer_with, outcome.answer))
        return [*answers, *self._take_stuck()]

    def _take_stuck(self) -> list[Callable[[], None]]:
        """Ends barriers at which workers wait for each other, each at another one."""
        stuck = self._barriers.take_stuck()
        answers: list[Callable[[], None]] = []
        for name, workers in stuck.items():
            self._reductions.take(name, workers)
            for worker in workers:
                future = self._barrier_futures.pop((name, worker))
                answers.append(
                    partial(future.answer_with, partial(_refuse_stuck, stuck, self._members.all))
                )
        return answers


def _refuse_stuck(stuck: Mapping[str, Sequence[int]], members: Members) -> NoReturn:
    places = "; ".join(f"{members.names(workers)} at {name!r}" for name, workers in stuck.items())
    raise ProtocolError(
        f"workers wait for each other at different barriers, which never ends: {places}; each of them must "
        f"come to the same barriers in the same order"
    )


def _raise(error: Exception) -> NoReturn:
    raise error


def _nothing() -> None:
    return None


def _refuse(fault: str) -> NoReturn:
    raise ProtocolError(f"{fault}; all workers must take part in an exchange to its end")
