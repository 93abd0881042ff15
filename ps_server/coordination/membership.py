"""The workers of a job: how many there are, who has joined on which terms, who is lost, and who has left.

    join --> present --leave--> left
               |  ^
               |  `-- a sign of life, or another process in its place
       silent for a lease --> lost

A worker that has left stays so; another process may take its place then, to leave the other servers.

Sans-IO, as every rule in this package: events in, answers out; time is an event, too. No clock, no locks.
"""

import math
from collections.abc import Collection, Mapping

from protos.errors import JobError, NotJoinedError, ProtocolError
from protos.role import Members
from protos.runtime.environment import version_term
from protos.store import Lease, Member, WorkerLoss
from ps_server.coordination.job_state import MembersState

MAX_TERMS = 256
MAX_TERM = 2**16
"""Characters of the name of a term, or of its value."""
MAX_TOLD = 5
"""Settings that an error lists."""
MAX_SHOWN = 100
"""Characters of a value in an error."""
MAX_LEASE_S = 86_400.0


class Membership:
    """The workers of a job, each present until it leaves; heter trainers are among them. Not thread-safe.

    A place is taken once, unless the job waits for lost workers: a process in another's place goes on where
    the servers say that one was.

    Attributes:
        all: Workers of the job, including those that have left, and their names.
        left: Workers that have left.
        lost: Workers that were silent for a whole lease, until their next sign of life.
        replaced: Workers whose process was lost, and whose place another one has taken.
        lease: How the job loses a worker; None: never, or nobody has joined.
    """

    def __init__(self, members: Members) -> None:
        self.all = members
        self.left: set[int] = set()
        self.lost: set[int] = set()
        self.replaced: set[int] = set()
        self.lease: Lease | None = None
        self._incarnations: dict[int, int] = {}
        self._candidates: dict[int, int] = {}  # processes that wait for the place of another one
        self._silent_s: dict[int, float] = {}
        terms = members.terms | version_term()
        self._terms = {name: (value, "the server") for name, value in terms.items()}

    def join(self, member: Member, terms: Mapping[str, str], lease: Lease | None) -> bool:
        """A process takes the place of a worker, or begins to wait for it; taking it again is a no-op.

        Args:
            member: The worker and the process.
            terms: Settings that all processes have in common, by name.
            lease: How the job loses a worker.

        Returns:
            Whether it has taken the place of another process now.

        Raises:
            ProtocolError: If the job does not have this worker, or another process has its place for good.
            JobError: If another process has terms that differ; says which.
        """
        worker, name = member.worker, self.name(member.worker)
        if len(terms) > MAX_TERMS or any(
            len(text) > MAX_TERM for text in (*terms, *terms.values())
        ):
            raise ProtocolError(
                f"{name} has {len(terms)} terms, expected up to {MAX_TERMS} of {MAX_TERM} characters"
            )
        if lease is not None and not 0 < lease.seconds <= MAX_LEASE_S:
            raise ProtocolError(
                f"{name} has a lease of {lease.seconds} s, expected up to {MAX_LEASE_S:g}"
            )
        if self.all_joined:
            self.require(worker)  # a stranger's terms do not end a job that runs
        if self._incarnations.get(worker) == member.incarnation:
            return False
        if worker in self._incarnations:
            self._require_vacant(worker)
        self._require_agreement(worker, terms)
        self.require(worker)
        for term, value in terms.items():
            self._terms.setdefault(term, (value, name))
        self.lease = self.lease or lease
        self._candidates[worker] = member.incarnation
        # One that has left may not have left the other servers: another process leaves these for it.
        if worker not in self._incarnations or worker in self.left or worker in self.lost:
            return self._take_place(worker)
        return False

    def _require_agreement(self, worker: int, terms: Mapping[str, str]) -> None:
        """Raises JobError if others have other terms: a wrong job file differs in more than one setting."""
        differences = [
            f"{_setting(name, value)} ({holder} has {_setting(name, expected)})"
            for name, value in terms.items()
            for expected, holder in [self._terms.get(name, (value, ""))]
            if value != expected
        ]
        if not differences:
            return
        told = "; ".join(differences[:MAX_TOLD])
        more = len(differences) - MAX_TOLD
        raise JobError(
            f"{self.name(worker)} has other settings than the rest of the job: {told}"
            f"{f'; and {more} more' if more > 0 else ''}. Give all processes of a job the same job, --set "
            f"and environment"
        )

    def _require_vacant(self, worker: int) -> None:
        """Raises ProtocolError unless the place of a worker becomes free when it is lost, or has left."""
        if self.lease is not None and self.lease.on_worker_loss is WorkerLoss.WAIT:
            return
        raise ProtocolError(
            f"{self.name(worker)} of this job is another process, which joined before. If that one has died, "
            f'this one cannot take its place, since cluster.on_worker_loss is not "wait": end the job, and '
            f"start it again from its checkpoint. Else two processes have {self.all.variables(worker)}"
        )

    def _take_place(self, worker: int) -> bool:
        """The candidate takes the place of a worker; returns whether another process had it."""
        is_replaced = worker in self._incarnations
        if is_replaced:
            self.replaced.add(worker)
        self._incarnations[worker] = self._candidates.pop(worker)
        self._silent_s[worker] = 0.0
        self.lost.discard(worker)
        return is_replaced

    def has_place(self, member: Member) -> bool:
        """Whether a process that joined has its place now.

        Raises:
            ProtocolError: If it waits no more: the process that has the place is alive.
        """
        if self._incarnations.get(member.worker) == member.incarnation:
            return True
        if self._candidates.get(member.worker) == member.incarnation:
            return False
        raise ProtocolError(
            f"{self.name(member.worker)} of this job is another process, which is alive: two processes have "
            f"{self.all.variables(member.worker)}"
        )

    def hear_of(self, member: Member) -> None:
        """A process gives a sign of life; raises ProtocolError unless it has a place."""
        self.require_place(member)
        self._silent_s[member.worker] = 0.0
        self.lost.discard(member.worker)
        self._candidates.pop(member.worker, None)

    def require_place(self, member: Member) -> None:
        """Raises ProtocolError unless the process has a place."""
        worker, name = member.worker, self.name(member.worker)
        if self._incarnations.get(worker) == member.incarnation:
            if worker not in self.left or worker not in self.lost:
                return
            raise ProtocolError(
                f"{name} was silent for longer than its lease, and the others have gone on "
                f"without it"
            )
        self.require(worker)
        if worker in self._incarnations:
            raise ProtocolError(
                f"{name} of this job is another process by now: this one was silent for longer than "
                f"its lease, or two have {self.all.variables(worker)}"
            )
        raise NotJoinedError(
            f"{name} has not joined this job: was this server restarted in the middle of it? "
            f"Then start the job again from its checkpoint"
        )

    def would_return(self, member: Member) -> bool:
        """Whether a sign of life of a process that has a place changes who may have it next."""
        worker = member.worker
        if self._incarnations.get(worker) != member.incarnation or worker in self.left:
            return False
        return worker in self.lost or worker in self._candidates

    def end_lease(self, worker: int) -> None:
        """A process ends, so its lease does, too; without a lease a no-op."""
        if self.lease is not None and self.is_present(worker):
            self._silent_s[worker] = math.inf

    def pass_time(self, seconds: float) -> list[int]:
        """Time passes; returns the workers that were silent for a lease by now, for `lose`, ascending."""
        limit_s = math.inf if self.lease is None else self.lease.seconds
        silent = []
        for worker in sorted(self._incarnations):
            if worker in self.left:
                continue
            self._silent_s[worker] += seconds
            if self._silent_s[worker] >= limit_s and worker not in self.lost:
                silent.append(worker)
        return silent

    def lose(self, worker: int) -> bool:
        """A worker is lost; returns whether a process that waited for its place has taken it."""
        self.lost.add(worker)
        return worker in self._candidates and self._take_place(worker)

    def incarnation_of(self, worker: int) -> int | None:
        """Returns the incarnation of the process that has a worker's place; None: nobody has."""
        return self._incarnations.get(worker)

    def name(self, worker: int) -> str:
        """Returns a worker's name for messages; see `protos.role.Members`."""
        return self.all.name(worker)

    def names(self, workers: Collection[int]) -> str:
        """Returns the names of workers for messages."""
        return self.all.names(workers)

    @property
    def silent_s(self) -> dict[int, float]:
        """Seconds since the last sign of life, by worker that has joined and not left."""
        return {
            worker: seconds
            for worker, seconds in self._silent_s.items()
            if worker in self._incarnations and worker not in self.left
        }

    @property
    def present(self) -> list[int]:
        """Workers that have not left, ascending."""
        return [worker for worker in range(self.all.total) if worker not in self.left]

    @property
    def num_present(self) -> int:
        """Workers that have not left."""
        return self.all.total - len(self.left)

    @property
    def all_joined(self) -> bool:
        """Whether every worker has joined, also if it was lost or has left since."""
        return len(self._incarnations) == self.all.total

    @property
    def all_left(self) -> bool:
        """Whether every worker has left."""
        return self.num_present == 0

    def is_present(self, worker: int) -> bool:
        """Whether the job has this worker and it has not left."""
        return 0 <= worker < self.all.total and worker not in self.left

    def state(self) -> MembersState:
        """Returns who takes part, for `restore`; the calls of processes that wait for a place come again."""
        return MembersState(
            incarnations=dict(self._incarnations),
            terms=dict(self._terms),
            lease=self.lease,
            left=sorted(self.left),
            lost=sorted(self.lost),
            candidates=dict(self._candidates),
        )

    def restore(self, state: MembersState) -> None:
        """Takes over what `state` returned; every lease begins anew."""
        self._incarnations = dict(state.incarnations)
        self._silent_s = dict.fromkeys(state.incarnations, 0.0)
        self._terms = dict(state.terms)
        self.lease = state.lease
        self.left, self.lost = set(state.left), set(state.lost)
        self._candidates = dict(state.candidates)

    def require(self, worker: int) -> None:
        """Raises ProtocolError unless the job has this worker, present or not."""
        if not 0 <= worker < self.all.total:
            raise ProtocolError(
                f"worker {worker} called, but this job has {self.all}, from 0: PADDLE_TRAINERS_NUM must be "
                f"the same everywhere"
            )

    def leave(self, worker: int) -> None:
        """Removes a worker for good.

        Raises:
            ProtocolError: If the job does not have it.
        """
        self.require(worker)
        self.left.add(worker)


def _setting(name: str, value: str) -> str:
    """Returns a setting as a job file has it, cut to what a message can hold."""
    shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
    return f"{name} = {shown or 'nothing'}"
