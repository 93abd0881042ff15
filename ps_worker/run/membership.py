"""A worker's place in a job: taken by joining, kept by a lease, left in the end.

An error of a worker ends the job for all: the servers tell the others, which do not wait for it then. A
worker that has joined aborts the job. One that has not, as its files are missing, joins to do so: else the
others would wait for it at the start.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from ctr_ps.protos.errors import CtrPsError, PlaceLostError, TransportError, UsageError, comes_again
from ctr_ps.protos.role import HeterRole, WorkerRole
from ctr_ps.protos.store import (
    Coordination,
    Joined,
    Lease,
    Member,
    Version,
    WorkerLoss,
    abort_reason,
)
from ctr_ps.ps_worker.job.sections import ClusterSection

logger = logging.getLogger(__name__)


class Membership(AbstractContextManager["Membership"]):
    """The place of a worker that has joined. For one thread.

    Leaving the `with` block by an error ends the job: no other worker waits for one that does not come.
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
        """Joins the job, in whose `terms`, settings by name, all workers must agree.

        Where the store is in this process, no lease has to be renewed.

        Raises:
            JobError: If workers do not agree.
            CtrPsError: If servers do not answer, or another process has the place.
        """
        self.member = Member(worker, secrets.randbits(63))
        self.has_left = False  # the worker's part in the job is over
        self._store = store
        self._renewal: LeaseRenewal | None = None
        self._lease = lease = Lease(
            seconds=limits.lease_s, on_worker_loss=WorkerLoss(limits.on_worker_loss)
        )
        self.joined: Joined = self.agree(terms)  # what the store said
        if not is_in_process:
            self._renewal = LeaseRenewal(store, worker, lease, on_refusal=self._abort_by)

    @property
    def refusal(self) -> CtrPsError | None:
        """Why this process has no place in the job any more, as far as known; None: it has."""
        return None if self._renewal is None else self._renewal.refusal

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        refusal = self.refusal
        try:
            if refusal is not None and not self.has_left:
                raise refusal from error
            if error is not None and not self.has_left:
                self._abort_by(error)
        finally:
            self.close()

    def agree(self, terms: Mapping[str, str]) -> Joined:
        """Joins with terms, at first or further ones; other workers bring the same sooner or later.

        Raises JobError if another worker has brought other ones; the job ends for all.
        """
        worker, incarnation = self.member.worker, self.member.incarnation
        return self._store.join(worker, incarnation, terms=terms, lease=self._lease).result()

    def _abort_by(self, error: BaseException) -> None:
        """Ends the job by an error, on all servers: one that ended it may not have reached the others.

        A lost place concerns this process alone: the job goes on without it.
        """
        if not isinstance(error, PlaceLostError):
            abort_by(error, self._store, self.member.worker)

    def leave(self, step: Version) -> None:
        """Leaves the job for good: the worker takes part in no step from `step` on.

        Raises AbortedError if another worker has ended the job.
        """
        # Version 0 is there since the start: this does not wait, and raises if the job has ended by an error.
        self._store.wait_version(0).result()
        try:
            self._store.leave(self.member.worker, step=step)
        except TransportError as error:  # its work is done, and servers end when all have left
            logger.warning(
                "left the job without an answer from the servers, which may have ended: %s", error
            )
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


class LeaseRenewal:
    """Renews the lease of a worker until it is closed, or a server refuses it or is gone.

    In a thread: also while the worker computes or waits for long.
    """

    def __init__(
        self,
        store: Coordination,
        worker: int,
        lease: Lease,
        *,
        on_refusal: Callable[[CtrPsError], None] = lambda _: None,
    ) -> None:
        """Starts the thread, which calls `on_refusal` with a refusal while the store can still be called."""
        # Why it ended: this process has no place in the job, or there is no job, and its calls fail.
        self.refusal: CtrPsError | None = None
        self._on_refusal = on_refusal
        self._store = store
        self._worker = worker
        self._pause_s = lease.renewal_s
        self._is_over = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._renew_forever, name="lease", daemon=True)
        self._thread.start()

    def _renew_forever(self) -> None:
        pause_s = self._pause_s
        while not self._is_over.wait(pause_s):
            began = time.monotonic()
            try:
                self._store.renew(self._worker)
            except CtrPsError as error:
                if self._is_over.is_set():
                    break
                logger.warning("lease refused: %s", error)
                self.refusal = error
                self._on_refusal(error)
                self._store.disconnect()
                return
            # It waits for a pause's time where a server is away: no other one is to wait for two.
            pause_s = max(began + self._pause_s - time.monotonic(), 0.0)
        if self._is_given_up:
            try:
                self._store.renew(self._worker, is_last=True)
            except CtrPsError as error:
                logger.warning("could not give up the lease, which will expire: %s", error)

    def give_up(self) -> None:
        """Ends the thread, and the lease: whoever waits for this worker to be lost need not wait longer."""
        self._is_given_up = True
        self._is_over.set()
        self._thread.join()

    def close(self) -> None:
        """Ends the thread, after the call that it is in."""
        self._is_over.set()


def abort_by(error: BaseException, store: Coordination, worker: int) -> None:
    """Ends the job by an error of a worker that has joined, on all servers that can be reached."""
    try:
        store.abort(worker, abort_reason(error), comes_again=comes_again(error))
    except CtrPsError as failure:
        logger.warning("not all other workers could be told of the error: %s", failure)


@contextmanager
def job_ends_by_errors(role: WorkerRole | HeterRole) -> Iterator[None]:
    """Ends the job by an error of the block, as `abort_before_joining` does."""
    try:
        yield
    except Exception as error:
        abort_before_joining(role, error)
        raise


def abort_before_joining(role: WorkerRole | HeterRole, error: BaseException) -> None:
    """Ends the job for all by an error of a worker that has not joined, if the servers answer soon.

    A UsageError is left to this process: a wrong job file is so for all, and servers that stay are not lost.
    So is an error of a worker that nobody waits for.
    """
    is_optional = role.worker_index in role.members.optional
    if role.is_in_process or is_optional or isinstance(error, UsageError):
        return
    # Imported late: a run in one process needs no gRPC.
    from ctr_ps.ps_worker.cluster.connect import abort_unjoined

    abort_unjoined(role, error)
