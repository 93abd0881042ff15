"""The workers of a job: how many there are, who has joined on which terms, who is lost, and who has left.

    ask --the place is free--> join --> present --leave--> left
                                          |  ^
                                          |  `-- a sign of life, or another process in its place
                                  silent for a lease --> lost

A worker that has left stays so; another process may take its place then, to leave the other servers. In an
elastic job that one takes part again, until all have left; a place that nobody has taken counts as left.
A process asks all servers before it takes a place on any: one that is alive for one keeps its place on all.

Sans-IO, as every rule in this package: events in, answers out; time is an event, too. No clock, no locks.
"""

import math
from collections.abc import Collection, Mapping
from itertools import zip_longest

from ctr_ps.protos.errors import JobError, NotJoinedError, PlaceLostError, ProtocolError
from ctr_ps.protos.format import FORMAT, require_format
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Lease, Member, PushId, WorkerLoss
from ctr_ps.ps_server.coordination.job_state import MembersState

MAX_TERMS = 256
MAX_TERM = 2**16  # characters of the name of a term, or of its value
MAX_TOLD = 5  # settings that an error lists
MAX_SHOWN = 100
"""Characters of a value in an error."""
MAX_LEASE_S = 86_400.0


class Membership:
    """The workers of a job, each present until it leaves; heter trainers are among them. Not thread-safe.

    A place is taken once, unless the job is elastic or waits for lost workers: a process in another's place
    goes on where the servers say that one was.
    """

    def __init__(self, members: Members) -> None:
        self.all = members  # workers of the job, including those that have left, and their names
        self.left: set[int] = set(members.optional)
        # workers that were silent for a whole lease, until their next sign of life
        self.lost: set[int] = set()
        # workers whose process was lost, and whose place another one has taken
        self.replaced: set[int] = set()
        # how the job loses a worker; None: never, or nobody has joined
        self.lease: Lease | None = None
        self._incarnations: dict[int, int] = {}
        self._candidates: dict[int, int] = {}  # the last process that asked for a place
        self._silent_s: dict[int, float] = {}
        self._formats: dict[int, int] = {}  # of the processes' messages
        self._terms = {name: (value, "the server") for name, value in members.terms.items()}

    @property
    def incarnations(self) -> Mapping[int, int]:
        """The processes that have places, by worker."""
        return self._incarnations

    def join(
        self,
        member: Member,
        terms: Mapping[str, str],
        lease: Lease | None,
        *,
        only_asks: bool = False,
        format: int = FORMAT,
    ) -> bool:
        """A process takes the place of a worker, or asks for it; taking it again adds terms.

        Returns whether it has taken the place of another process now. One that only asks takes nothing:
        `may_join` says when it can.

        Raises:
            ProtocolError: If the job does not have this worker, another process has its place for good, or
                the format of its messages does not work with that of another member.
            JobError: If another process has terms that differ; says which.
        """
        worker, name = member.worker, self.name(member.worker)
        for other, its_format in self.formats.items():
            if other != worker:
                require_format(format, name, own=its_format, whose_own=self.name(other))
        num_terms = len(self._terms.keys() | terms.keys())
        if num_terms > MAX_TERMS or any(len(text) > MAX_TERM for text in (*terms, *terms.values())):
            raise ProtocolError(
                f"{name} joins with {num_terms} terms, expected up to {MAX_TERMS}, each of up to {MAX_TERM} "
                "characters"
            )
        if lease is not None and not 0 < lease.seconds <= MAX_LEASE_S:
            raise ProtocolError(
                f"{name} has a lease of {lease.seconds} s, expected more than 0 and up to {MAX_LEASE_S:g}"
            )
        if self.all_joined:
            self.require(worker)  # a stranger's terms do not end a job that runs
        if self._incarnations.get(worker) == member.incarnation:
            self._require_agreement(worker, terms)
            self._terms = {term: (value, name) for term, value in terms.items()} | self._terms
            return False
        waits = self.lease is not None and self.lease.on_worker_loss is WorkerLoss.WAIT
        if worker in self._incarnations and not (waits or self.all.is_elastic):
            raise ProtocolError(
                f"another process joined as {name} before. If it has died, end the job and start it again "
                'from its checkpoint: only cluster.on_worker_loss = "wait" allows a replacement. '
                f"Otherwise two processes have {self.all.variables(worker)}"
            )
        self._require_agreement(worker, terms)
        self.require(worker)
        for term, value in terms.items():
            self._terms.setdefault(term, (value, name))
        self.lease = self.lease or lease
        if only_asks:
            self._candidates[worker] = member.incarnation
            return False
        if not self._is_free(worker):
            raise self._is_alive(worker)
        is_replaced = worker in self._incarnations
        if is_replaced:
            self.replaced.add(worker)
        self._incarnations[worker] = member.incarnation
        self._formats[worker] = format
        self._candidates.pop(worker, None)
        self._silent_s[worker] = 0.0
        self.lost.discard(worker)
        if self.all.is_elastic and not self.all_left:
            self.left.discard(worker)
        return is_replaced

    def _is_free(self, worker: int) -> bool:
        # One that has left may not have left the other servers: another process leaves these for it.
        return worker not in self._incarnations or worker in self.left or worker in self.lost

    def _is_alive(self, worker: int) -> ProtocolError:
        return ProtocolError(
            f"another process, which is alive, has joined as {self.name(worker)}: two processes have "
            f"{self.all.variables(worker)}"
        )

    def _require_agreement(self, worker: int, terms: Mapping[str, str]) -> None:
        """Raises JobError if others have other terms: a wrong job file differs in more than one setting."""
        differences = [
            f"{_setting(name, value, expected)} ({holder} has {_setting(name, expected, value)})"
            for name, value in terms.items()
            for expected, holder in [self._terms.get(name, (value, ""))]
            if value != expected
        ]
        if not differences:
            return
        told = "; ".join(differences[:MAX_TOLD])
        more = len(differences) - MAX_TOLD
        raise JobError(
            f"{self.name(worker)} has other settings than the rest of the job: "
            f"{told}{f'; and {more} more' if more > 0 else ''}. Give all processes the same job file or "
            "script, --set options and environment"
        )

    def may_join(self, member: Member) -> bool:
        """Whether a process has its place, or asked for it and could take it now.

        Raises ProtocolError if it asks in vain: the process that has the place is alive.
        """
        worker = member.worker
        if self._incarnations.get(worker) == member.incarnation:
            return True
        if self._candidates.get(worker) == member.incarnation:
            return self._is_free(worker)
        raise self._is_alive(worker)

    def hear_of(self, member: Member) -> None:
        """A process gives a sign of life; raises ProtocolError unless it has a place."""
        self.require_place(member)
        self._silent_s[member.worker] = 0.0
        self.lost.discard(member.worker)
        self._candidates.pop(member.worker, None)

    def require_place(self, member: Member) -> None:
        """Raises ProtocolError unless the process has its place."""
        worker, name = member.worker, self.name(member.worker)
        if self._incarnations.get(worker) == member.incarnation:
            if not self._went_on_without(worker):
                return
            raise PlaceLostError(
                f"{name} was silent for longer than its lease, and the other workers continued without it"
            )
        self.require(worker)
        if worker in self._incarnations:
            raise PlaceLostError(
                f"another process has taken the place of {name}: this one was silent for longer than its "
                f"lease, or two processes have {self.all.variables(worker)}"
            )
        raise NotJoinedError(
            f"{name} has not joined this job: if this server was restarted during the job, start the job "
            "again from its checkpoint"
        )

    def has_joined(self, worker: int) -> bool:
        """Whether a process has joined as this worker."""
        return worker in self._incarnations

    def _went_on_without(self, worker: int) -> bool:
        """Whether a worker was lost, and left the others for that."""
        return worker in self.left and worker in self.lost

    def require_not_gone(self, push_id: PushId) -> None:
        """Raises ProtocolError if a process that pushes has lost its place since its call came.

        Nobody's place is not another's: a store in process takes pushes of workers that never join.
        """
        worker, held_by = push_id.worker, self._incarnations.get(push_id.worker)
        if held_by is not None and (
            held_by != push_id.incarnation or self._went_on_without(worker)
        ):
            self.require_place(Member(worker, push_id.incarnation))

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
        """Time passes; returns the workers that were silent for a lease by now, ascending: they are lost."""
        limit_s = math.inf if self.lease is None else self.lease.seconds
        silent = []
        for worker in sorted(self._incarnations):
            if worker in self.left:
                continue
            self._silent_s[worker] += seconds
            if self._silent_s[worker] >= limit_s and worker not in self.lost:
                silent.append(worker)
        return silent

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
    def formats(self) -> dict[int, int]:
        """Formats of the messages of processes that have a place, by worker that has not left."""
        return {each: of for each, of in self._formats.items() if each not in self.left}

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
        """Whether every worker that the job waits for has joined, also if it was lost or has left since."""
        missing = self.all.total - len(self._incarnations.keys() | {*self.all.optional})
        return not missing

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
            formats=dict(self._formats),
        )

    def restore(self, state: MembersState) -> None:
        """Takes over what `state` returned; every lease begins anew."""
        self._incarnations = dict(state.incarnations)
        self._silent_s = dict.fromkeys(state.incarnations, 0.0)
        self._terms = dict(state.terms)
        self.lease = state.lease
        self.left, self.lost = set(state.left), set(state.lost)
        self._candidates = dict(state.candidates)
        self._formats = dict(state.formats)

    def require(self, worker: int) -> None:
        """Raises ProtocolError unless the job has this worker, present or not."""
        if not 0 <= worker < self.all.total:
            raise ProtocolError(
                f"worker {worker} called, but this job has {self.all}, numbered from 0: set the same "
                "PADDLE_TRAINERS_NUM everywhere"
            )

    def leave(self, worker: int) -> None:
        """Removes a worker for good; raises ProtocolError if the job does not have it."""
        self.require(worker)
        self.left.add(worker)


def _setting(name: str, value: str, other: str) -> str:
    """Returns a setting as a job file has it, cut to what a message can hold.

    Of one with several lines it shows the first, and the first that differs from `other`.
    """
    (first, *lines), (_, *others) = value.split("\n"), other.split("\n")
    differing = (line for line, its in zip_longest(lines, others) if line != its)
    shown = [first or "nothing"] + [f"with {next(differing, '') or 'nothing'}"] * bool(lines)
    cut = [text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..." for text in shown]
    return f"{name} = {' '.join(cut)}"
