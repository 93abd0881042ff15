"""A worker's place in a job: taken by joining, kept by a lease, left in the end."""

import logging
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from ctr_ps.protos.errors import PlaceLostError, TransportError
from ctr_ps.protos.store import Coordination, Joined, Lease, Member, Version, WorkerLoss
from ctr_ps.ps_worker.job.sections.section import ClusterSection
from ctr_ps.ps_worker.run.abort import abort_by
from ctr_ps.ps_worker.run.membership.lease import LeaseRenewal

logger = logging.getLogger(__name__)


class Membership:
    """The place of a worker that has joined. For one thread.

    Leaving the `with` block by an error ends the job: no other worker waits for one that does not come.

    Attributes:
        member: This process, in its worker's place.
        joined: What the store said.
        has_left: The worker's part in the job is over.
    """

    def __init__(
        self,
        store: Coordination,
        worker: int,
        *,
        terms: Mapping[str, str],
        limits: ClusterSection,
        is_in_process: bool,
    ) -> None:
        """Joins the job.

        Args:
            store: Where the job is.
            worker: Index of this worker.
            terms: Settings in which all workers must agree, by name.
            limits: The lease, and what becomes of the job without this worker.
            is_in_process: The store is in this process, and no lease has to be renewed.

        Raises:
            JobError: If workers do not agree.
            CtrPsError: If servers do not answer, or another process has the place.
        """
        self.member = Member(worker, secrets.randbits(63))
        self.has_left = False
        self._store = store
        self._renewal: LeaseRenewal | None = None
        self._lease = lease = Lease(
            seconds=limits.lease_s, on_worker_loss=WorkerLoss(limits.on_worker_loss)
        )
        self.joined: Joined = self._join(terms)
        if not is_in_process:
            self._renewal = LeaseRenewal(store, worker, lease, on_refusal=self._abort_by)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        refusal = None if self._renewal is None else self._renewal.refusal
        try:
            if refusal is not None and not self.has_left:
                raise refusal from error
            if error is not None and not self.has_left:
                self._abort_by(error)
        finally:
            self.close()

    def _join(self, terms: Mapping[str, str]) -> Joined:
        worker, incarnation = self.member.worker, self.member.incarnation
        return self._store.join(worker, incarnation, terms=terms, lease=self._lease).result()

    def agree(self, terms: Mapping[str, str]) -> None:
        """Brings further terms, of which other workers bring the same sooner or later.

        Raises:
            JobError: If another worker has brought other ones; the job ends for all.
        """
        self._join(terms)

    def _abort_by(self, error: BaseException) -> None:
        """Ends the job by an error, on all servers: one that ended it may not have reached the others.

        A lost place concerns this process alone: the job goes on without it.
        """
        if not isinstance(error, PlaceLostError):
            abort_by(error, self._store, self.member.worker)

    def leave(self, step: Version) -> None:
        """Leaves the job for good: the worker takes part in no step from `step` on.

        Raises:
            AbortedError: If another worker has ended the job.
        """
        # Version 0 is there since the start: this does not wait, and raises if the job has ended by an error.
        self._store.wait_version(0).result()
        try:
            self._store.leave(self.member.worker, step=step)
        except TransportError as error:  # its work is done, and servers end when all have left
            logger.warning("left without an answer, the servers may have ended: %s", error)
        self.has_left = True
        self.close()

    def give_up(self) -> None:
        """Has the servers lose this worker now, as its process ends; no other call may follow."""
        if self._renewal is not None:
            self._renewal.give_up()

    def close(self) -> None:
        """Ends the renewal of the lease."""
        if self._renewal is not None:
            self._renewal.close()
