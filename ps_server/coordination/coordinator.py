"""One job as a server sees it: who takes part, what was pushed, who waits for whom, and why it has ended.

    push --------> pushes.py ---------+
    barrier, message -> rendezvous.py +--> pending_calls.py: the lock, the calls that wait
    join, leave, loss --> here -------+

The rules are in the sans-IO classes below these. The coordinator decides; it touches no parameters.

Invariants:
- The lock is held for decisions only. Under it no parameters are read or written, no call is answered and no
  other lock is waited for, so whatever else is held, it can be taken, and `status` never waits for a step.
- Who applies holds `Snapshots.changing` and takes this lock inside it, around the parameters and the record
  of the change (`step_applied`, `arrival_applied`). A snapshot has `changing` to itself, so its parameters,
  version and progress are of one moment, with each step and push as a whole or not at all.
- One step at a time is taken to be applied, in order, and the version moves on when it is applied. No pull at
  that version is answered before, and no barrier is released while a complete step is not applied.
- A step that fails may be applied in part, so it ends the job, as an abort does: every call that waits
  raises, and so does every later one but `status`, `shrink`, `digest` and `pull_changed`.
- Who has the place of a worker is checked when a call comes. For a push it is checked under the lock again as
  it enters: that of a process that has lost its place meanwhile does not.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ctr_ps.protos.errors import AbortedError, JobError, ProtocolError
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.role import Members
from ctr_ps.protos.runtime.environment import memory_error_of
from ctr_ps.protos.store import (
    Acknowledged,
    Applied,
    Future,
    Joined,
    Lease,
    Member,
    PushId,
    SaveStatus,
    StoreStatus,
    TableStatus,
    Version,
    WorkerLoss,
    WorkerProgress,
)
from ctr_ps.ps_server.coordination.arrivals import Arrivals
from ctr_ps.ps_server.coordination.job_state import JobState, Waiting, WaitingMessage
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.pending_calls import PendingCalls, raise_error
from ctr_ps.ps_server.coordination.push_ledger import require_number
from ctr_ps.ps_server.coordination.pushes import PushIntake
from ctr_ps.ps_server.coordination.rendezvous import Rendezvous
from ctr_ps.ps_server.coordination.steps import CompleteStep, StepAggregator

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 5.0
"""A wait that is shorter is nobody's concern."""
NEXT_WAIT_S = 30.0
"""Between two times that waits are told, however many there are: steps of a slow worker are many."""

_NEEDS_WORKER_0 = ", and the job cannot continue without worker 0, which saves and evaluates"

_HOW_TO_RESUME = (
    " [the servers keep their update logs: to resume from them, start all servers and workers "
    "again]"
)


class Coordinator:
    """The workers of one job, as one store sees them. Thread-safe."""

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
        """Expects all workers at version 0; see `Engine` for the settings.

        `on_failure` is called once, from any thread, with the reason for which the job ends before its time.
        """
        self._jobs_before = jobs_before
        self._has_update_log = has_update_log
        self.on_failure = on_failure
        # whether a job that has failed can go on from the servers' update logs
        self.can_resume = False
        self._members = Membership(members)
        self._steps = StepAggregator(self._members)
        self._waited_s: dict[str, float] = {}  # for workers that others miss, by place
        self._quiet_s = 0.0  # until these waits may be told again
        arrivals = Arrivals(self._members, self._steps)
        self._calls = PendingCalls(self._steps, arrivals, wait_limit_s=wait_limit_s)
        self._passed, self._clocks = arrivals.passed, arrivals.clocks
        self.pushes = PushIntake(self._members, self._steps, self._calls)  # what they push
        # where they wait for each other
        self.rendezvous = Rendezvous(
            self._members, self._steps, arrivals, self._calls, inbox_bytes=inbox_bytes
        )

    def join(
        self,
        member: Member,
        terms: Mapping[str, str],
        lease: Lease | None,
        *,
        only_asks: bool = False,
        format: int = FORMAT,
    ) -> Future[Joined]:
        """See `protos.store.Store`; of this store alone. The others are as for `Membership.join`."""
        if self.failure:
            raise AbortedError(
                f"the job of this server has ended: {self.failure}. Restart the servers before the next job"
            )
        worker = member.worker

        def joined() -> Joined:
            return Joined(
                jobs_before=self._jobs_before,
                barriers_passed=self._passed.newest(worker),
                has_update_log=self._has_update_log,
                version=self._steps.version,
                restart=self._passed.restart(worker),
            )

        def poll() -> Callable[[], Joined] | None:
            try:
                return joined if self._members.may_join(member) else None
            except ProtocolError as error:
                return partial(raise_error, error)

        def describe() -> str:
            return (
                f"the place of {self._members.name(worker)} is held by another process, which is "
                f"silent, but whose lease did not expire within {self._calls.wait_limit_s:g} s: raise "
                "--wait-limit, or lower cluster.lease_s"
            )

        try:
            with self._calls.change():
                if self._members.join(member, terms, lease, only_asks=only_asks, format=format):
                    self.rendezvous.forget_arrivals(worker)
        except JobError as error:
            if not self._members.all_joined:  # else it is refused alone
                self._fail(str(error), comes_again=True)
            raise
        return self._calls.wait(poll, describe)

    def admit(self, member: Member, acknowledged: Acknowledged | None = None) -> bool:
        """A process calls, which is a sign of life, and says what was acknowledged of its pushes, if it does.

        Returns whether it was admitted; not if that changes who may have its place next: `bring_back` admits
        it, once that is in the update log.

        Raises:
            ProtocolError: If it does not have its place.
            LostPushesError: If pushes are missing that were acknowledged.
        """
        with self._calls.lock:
            if self._members.would_return(member):
                return False
            self._members.hear_of(member)
            if acknowledged is not None:
                self.pushes.require_acknowledged(member, acknowledged)
        return True

    def bring_back(self, member: Member) -> None:
        """A process that `admit` did not admit keeps its place; raises ProtocolError unless it has it."""
        with self._calls.lock:
            was_lost = member.worker in self._members.lost
            self._members.hear_of(member)
        if was_lost:
            logger.info("%s is back", self._members.name(member.worker))

    def require_place(self, member: Member) -> None:
        """Raises ProtocolError unless the process has its place; it is no sign of life."""
        with self._calls.lock:
            self._members.require_place(member)

    def require_own_place(self, push_id: PushId) -> None:
        """Raises ProtocolError if another process has joined as the worker that pushes.

        For a store in process, where calls are not admitted and nobody has to join.
        """
        with self._calls.lock:
            if self._members.has_joined(push_id.worker):
                self._members.require_place(Member(push_id.worker, push_id.incarnation))

    def end_lease(self, worker: int) -> None:
        """Expires the lease of a worker at its own request: it counts as lost when time next passes."""
        with self._calls.lock:
            self._members.end_lease(worker)
        logger.info("%s gives up its lease", self._members.name(worker))

    def take_replaced(self, worker: int) -> bool:
        """Whether another process has taken the place of this worker, of this job, since the last call."""
        self._members.require(worker)
        with self._calls.lock:
            is_replaced = worker in self._members.replaced
            self._members.replaced.discard(worker)
        return is_replaced

    @property
    def deals_files(self) -> bool:
        """Whether workers take files from the queue."""
        return self.rendezvous.files.pass_number > 0

    @property
    def waits_for_lost(self) -> bool:
        """Whether another process may take the place of a lost one."""
        lease = self._members.lease
        return lease is not None and lease.on_worker_loss is WorkerLoss.WAIT

    def pass_time(self, seconds: float) -> list[int]:
        """Time passes without a sign of life of some workers; returns those to `lose`."""
        with self._calls.change(even_if_failed=True):  # one that waits for a place may be refused
            if self.failure:
                return []
            missing = self.rendezvous.missing()
            if behind := self._steps.missing():
                missing[f"step {self._steps.num_complete}"] = behind
            silent = self._members.pass_time(seconds)
        self._tell_waits(seconds, missing)
        return silent

    def _tell_waits(self, seconds: float, missing: Mapping[str, Sequence[int]]) -> None:
        """Says now and then which workers others wait for, by place, and for how long."""
        self._waited_s = {place: self._waited_s.get(place, 0.0) + seconds for place in missing}
        self._quiet_s = max(0.0, self._quiet_s - seconds)
        long = {place: each for place, each in self._waited_s.items() if each >= FIRST_WAIT_S}
        if long and not self._quiet_s:
            self._quiet_s = NEXT_WAIT_S
            for place, waited_s in long.items():
                names = self._members.names(missing[place])
                logger.info("waiting for %s at=%s waited_s=%.0f", names, place, waited_s)

    def lose(self, workers: Sequence[int]) -> None:
        """Workers are lost: by the rule of the job it ends, or they leave, or others take their places."""
        with self._calls.change(even_if_failed=True):
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
                self._members.lost.add(worker)
                if rule is WorkerLoss.CONTINUE and worker != 0:
                    self._leave(worker, self._steps.next_step(worker))
        if rule is WorkerLoss.FAIL or (rule is WorkerLoss.CONTINUE and 0 in workers):
            why = "" if rule is WorkerLoss.FAIL else _NEEDS_WORKER_0
            self._fail(
                f"no call from {self._members.names(workers)} for {lease.seconds:g} s "
                f"(cluster.lease_s), so they are lost{why}: see their logs and machines, and start "
                "the job again from its checkpoint"
            )

    def leave(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`; after a failure, too."""
        with self._calls.change(even_if_failed=True):
            require_number(self._members.name(worker), "step", step)
            self._leave(worker, step)

    def _leave(self, worker: int, step: Version) -> None:
        self._members.leave(worker)
        self._steps.leave(worker, step)
        self.rendezvous.leave(worker)
        self.pushes.examples.setdefault(worker, 0)

    def all_left(self) -> bool:
        """Whether every worker has left, and all steps are applied that still can be."""
        with self._calls.lock:
            is_applied = self._steps.num_complete == self._steps.version
            return self._members.all_left and (is_applied or bool(self.failure))

    def move_away(self) -> None:
        """The store is in the shard map no more: leases end elsewhere, nobody is to wait here."""
        self._calls.move_away()

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        """See `protos.store.Store`."""
        with self._calls.lock:
            self._members.require(worker)
            has_left = not self._members.is_present(worker)
        name = self._members.name(worker)
        if has_left:
            raise ProtocolError(f"{name} has left, so it cannot abort the job")
        self._fail(f"{name} aborted the job: {reason}", comes_again=comes_again)

    def step_failed(self, step: CompleteStep, error: BaseException) -> None:
        """Ends the job: every call that waits raises, and so does every later one that needs the step."""
        if (no_memory := memory_error_of(error)) is not None:
            self._calls.lacks_memory = True
            self._fail(f"step {step.step} could not be applied: {no_memory}")
            return
        self._fail(
            f"step {step.step} could not be applied ({error!r}) and may be in the parameters in part: "
            "see the server's log, restart the servers and load the last checkpoint",
            comes_again=True,
        )

    def _fail(self, failure: str, *, comes_again: bool = False) -> None:
        """Ends the job; a process in the place of a lost one can only go on if such places may be taken."""
        can_resume = (
            self._has_update_log
            and self.waits_for_lost
            and not (comes_again or self.lacks_memory)  # then this server goes on alone
        )
        if self._calls.fail(f"{failure}{_HOW_TO_RESUME}" if can_resume else failure):
            self.can_resume = can_resume
            self.on_failure(self.failure)

    @property
    def failure(self) -> str:
        """Why the job has ended before its time; empty: it has not."""
        return self._calls.failure

    @property
    def lacks_memory(self) -> bool:
        """Whether the job has failed since this process has no memory left."""
        return self._calls.lacks_memory

    def require_no_failure(self) -> None:
        """Raises AbortedError if the job has ended before its time, NoMemoryError if it lacked memory."""
        self._calls.require_no_failure()

    def state(self) -> JobState:
        """Returns what `restore` needs, besides what `waiting` returns."""
        with self._calls.lock:
            return JobState(
                members=self._members.state(),
                version=self._steps.version,
                batches=self._steps.batches,
                next_step=self._steps.next_steps_without_waiting(),
                since=dict(self._steps.since),
                absent_from=dict(self._steps.absent_from),
                in_steps=self._steps.in_steps,
                progress=self.pushes.ledger.progress(),
                applied=self.pushes.ledger.applied(),
                examples=dict(self.pushes.examples),
                staleness=self.pushes.staleness,
                passed=self._passed.state(),
                clocks=dict(self._clocks.by_worker),
                inboxes=self.rendezvous.mailbox.state(),
                files=self.rendezvous.files.state(),
            )

    def formats(self) -> dict[int, int]:
        """See `Membership.formats`."""
        with self._calls.lock:
            return self._members.formats

    def waiting(self) -> list[Waiting]:
        """Returns what is part of what this knows, and waits for others or is to be taken by them."""
        with self._calls.lock:
            return [*self.pushes.waiting(), *self.rendezvous.waiting()]

    def restore(self, state: JobState) -> None:
        """Takes over what `state` returned, before anything was called."""
        with self._calls.lock:
            self._members.restore(state.members)
            self._steps.restore(state)
            self.pushes.ledger.restore(state.progress)
            self.pushes.ledger.restore_applied(state.applied)
            self.pushes.examples = dict(state.examples)
            self.pushes.staleness = state.staleness
            self._passed.restore(state.passed)
            self._clocks.by_worker = dict(state.clocks)
            self.rendezvous.mailbox.restore(state.inboxes)
            self.rendezvous.files.restore(state.files)

    def hold(self, waiting: WaitingMessage) -> None:
        """Takes over a message of `waiting`, after `restore`."""
        with self._calls.lock:
            self.rendezvous.mailbox.hold(waiting)

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], batches: int
    ) -> None:
        """See `PushIntake.resume`."""
        with self._calls.lock:
            self.pushes.resume(version, progress, batches)

    def applied(self) -> Applied:
        """Returns what is applied.

        Raises AbortedError if the job has ended by an error: after a failed step the parameters may have a
        part of it.
        """
        with self._calls.lock:
            self.require_no_failure()
            return self.pushes.applied()

    def status(
        self, tables: Mapping[str, TableStatus], last_save: SaveStatus | None
    ) -> StoreStatus:
        """Returns the status of a store that has `tables` and was last saved so."""
        with self._calls.lock:
            return StoreStatus(
                version=self._steps.version,
                tables=tables,
                examples=dict(self.pushes.examples),
                left=frozenset(self._members.left),
                lost=frozenset(self._members.lost),
                awaited=frozenset(self._steps.missing()),
                staleness=self.pushes.staleness,
                progress=self.pushes.progress(),
                last_save=last_save,
                duplicates=self.pushes.ledger.duplicates,
                batches=self._steps.batches,
                silent_s=self._members.silent_s,
                lease_s=lease.seconds if (lease := self._members.lease) else None,
            )
