"""Coordination: how the workers of a job wait for each other, and send each other messages."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.futures import Future
from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.store.parameters import Version

Numbers = NDArray[np.float64]
"""Numbers that are reduced over workers: metrics, not parameters."""

MAX_NUMBERS = CHUNK_BYTES // 8
"""They travel in one message."""


def require_numbers(name: str, values: Numbers) -> None:
    """Raises ProtocolError unless `values` of the all-reduce `name` is float64[N], N <= MAX_NUMBERS."""
    if values.dtype != np.float64 or values.ndim != 1 or values.size > MAX_NUMBERS:
        raise ProtocolError(
            f"all_reduce {name!r} has {values.dtype} of shape {values.shape}, expected float64[N] with N up "
            f"to {MAX_NUMBERS}"
        )


class ReduceOp(enum.Enum):
    """How the numbers of several workers become one, element by element."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result of an all-reduce, float64[N], read-only; all workers continue at `version`, as of a barrier."""

    values: Numbers
    version: Version


@dataclass(frozen=True, slots=True)
class Member:
    """The process that has a worker's place in the job: that worker's index, from 0.

    It chooses its `incarnation` at random, which tells it from another one with the same index.
    """

    worker: int
    incarnation: int


_MAX_REASON = 1000  # characters of an error that others are told

LONGEST_RENEWAL_S = 10.0
"""Half of the time that a server tells of the job's end (`ServerSettings.linger_s`)."""


class WorkerLoss(enum.Enum):
    """What happens when a worker is lost: `cluster.on_worker_loss`."""

    FAIL = "fail"
    """The job ends by an error."""
    WAIT = "wait"
    """The others wait for a process that takes its place."""
    CONTINUE = "continue"
    """The others go on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """How a job loses a worker: of which a server hears nothing for `seconds`, and what happens then."""

    seconds: float
    on_worker_loss: WorkerLoss

    @property
    def renewal_s(self) -> float:
        """Seconds between renewals: one may be late, and an abort is heard of in time."""
        return min(self.seconds / 3, LONGEST_RENEWAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a process that joined has to know."""

    jobs_before: int = 0  # jobs that the store has served before; of several servers all the same
    # barriers that processes before this one have passed in its place; of several servers on the first
    # one, but not 0 if it is more on any
    barriers_passed: int = 0
    # the servers keep an update log: when one is restarted, it goes on where it was
    has_update_log: bool = False
    version: Version = 0  # version of the parameters; of several servers the smallest
    # number of the newest barrier `RESTART`, at which it goes on after the first; of several servers that
    # of the first; 0: none was passed
    restart: int = 0


RESTART = "restart"
"""The name of barriers at which processes in lost ones' places go on; servers keep what is since two."""


def abort_reason(error: BaseException) -> str:
    """Returns the reason that an error is for others to end; see `Coordination.abort`."""
    reason = f"{type(error).__name__}: {error}"[:_MAX_REASON]
    # A file's name may have characters that UTF-8 does not.
    return reason.encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenFile:
    """A file of a pass that a worker is to train, by its number in the order of the pass, from 0."""

    file: int | None = None  # None: none is free now
    was_taken: bool = False  # before, so that some of its rows may be trained
    is_over: bool = False  # all files of the pass are trained


class Coordination(Protocol):
    """Who takes part, and barriers, reductions, clocks and versions that workers wait for."""

    def join(
        self,
        worker: int,
        incarnation: int,
        *,
        terms: Mapping[str, str],
        lease: Lease | None = None,
    ) -> Future[Joined]:
        """Takes a worker's place in the job, before it trains; joining again brings further terms.

        Where lost workers are waited for, a process may take the place of another one: once that one's
        lease has run out, and for that it waits. `incarnation` is that of a `Member`. `terms` are settings in
        which all processes of the job agree, by the names that users know; so they do in `lease`, and with
        None no worker is ever lost.

        Raises:
            JobError: If another process has joined with other terms, or the server has other ones: the
                job ends for all of them, since it cannot run.
            ProtocolError: If the job does not have this worker, or another process has its place and is
                alive; or if servers have served different numbers of jobs, so that their parameters do not
                belong together.
        """

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        """Says that a worker is alive, as each of its other calls does, but for pulls.

        To be called again within `Lease.renewal_s`, for which it waits at most. After one that `is_last` the
        process ends: its lease runs out now, and it makes no other call.

        Raises:
            PlaceLostError: If it has no place in the job any more.
            AbortedError: If the job has ended.
            TransportError: If a server has been away for too long.
        """

    def confirm_place(self, worker: int) -> None:
        """Returns when all servers say that a worker has its place; one that is restarted is waited for.

        For what is done outside the servers, as replacing a file that others rely on.

        Raises:
            ProtocolError: If it has no place in the job any more.
            TransportError: If a server cannot be reached.
        """

    def disconnect(self) -> None:
        """Fails this process's calls that wait for an answer, and all later ones; from any thread."""

    def wait_version(self, at: Version) -> Future[Version]:
        """Waits until the store has version `at`, on every server; returns the smallest version it has.

        Raises WaitTimeoutError if the version does not come; names the workers that are behind.
        """

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        """Waits until every worker that has not left is at the barrier `name`.

        A worker that waits takes part in no step: it leaves steps from `step` on to the others, by number and
        never by time. It continues at the returned version, which is the same for all. Raises
        WaitTimeoutError if some workers do not come; names them.
        """

    def all_reduce(
        self,
        name: str,
        worker: int,
        values: Numbers,
        op: ReduceOp,
        *,
        step: Version,
        remember: bool = True,
    ) -> Future[Reduced]:
        """A barrier to which each worker brings numbers, and from which all take their reduction.

        Numbers, float64[N], are reduced in worker order, so that equal numbers give the same sum to the last
        bit; NaN and infinities go through. `values` may be reused when the call returns; `step` is as of
        `barrier`.

        Without `remember`, for many numbers, a process that comes to this barrier later, in the place of a
        lost one, is answered with the numbers that it brings, at the same version. They are remembered all
        the same if another worker needs that.

        Raises:
            ProtocolError: If `values` is something else, or if workers come with different N or `op`, or with
                no numbers at all: then all waiting workers get it, the barrier is over and its name free.
            WaitTimeoutError: If some workers do not come; names them.
        """

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        """Sets a worker's clock, and waits until every worker that trains has finished `at_least` steps.

        A worker's clock is the number of steps that it has finished since it last left a barrier. A worker
        that waits in a barrier or has left has no clock, so nobody waits for it. Calls of one worker may
        overlap and overtake each other: the largest clock stays. But a worker has all answers before it
        enters a barrier, since its clock starts at 0 after that.

        That is training within a bound; `at_least` is at most `clock`. Returns the number of steps that the
        slowest has finished; `at_least` if no worker trains.

        Raises:
            ProtocolError: If the worker has left, or would wait for itself.
            WaitTimeoutError: If some workers do not get that far; names them, with their clocks.
        """

    def take_file(
        self, worker: int, *, pass_number: int, num_files: int, received: int, waits: bool = False
    ) -> Future[TakenFile]:
        """Takes one of the `num_files` of a pass that no worker has, or none if there is none.

        `received` are the files of this pass that the process was given before. With `waits` the worker says
        that the store has all gradients of these, and takes nothing: it waits until a file is free, as a
        worker that leaves gives back those that it has not finished, or until the pass is over.

        Raises:
            ProtocolError: If the worker has left, or others have other files.
            WaitTimeoutError: If others do not finish their files; names them.
        """

    def leave(self, worker: int, *, step: Version) -> None:
        """Removes a worker for good; it takes part in no step from `step` on."""

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        """Ends the job for all workers at once: that of a worker that ends in error.

        Calls that wait, and every later push, barrier, message and wait, raise an AbortedError that names the
        worker and the reason. Of several aborts the first counts. `comes_again` is that of the error. Raises
        ProtocolError if the worker is not of this job.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes from one worker to another, opaque to stores.

    `sequence` numbers the messages from this sender to this receiver in one exchange: from 0, without gaps.
    The last has no content.
    """

    sender: int
    receiver: int
    sequence: int
    content: bytes | None


class Exchange(Protocol):
    """Mailboxes of the workers of a job."""

    def post(self, exchange: str, message: Message) -> Future[None]:
        """Hands over a message; done once it fits into the receiver's mailbox.

        A sender waits for each answer before it posts the next to the same receiver, and so is never further
        ahead of it than the bound. Posting a message again is no error and changes nothing. The last to a
        receiver has no content.

        An exchange is between all workers of the job and has a name of its own. Each worker posts to others
        and takes its own messages at the same time.

        Raises:
            ProtocolError: If it is not the next, or sender or receiver has left or is not of this job.
            WaitTimeoutError: If the receiver takes nothing; names it.
        """

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """Waits for messages to a worker, in the order of arrival; those of one sender in its order.

        The `received` messages of this exchange that the worker has are dropped, and some of the next ones
        come; none if all workers have posted their last, this one to itself included. Taking from the next
        exchange drops what the one before still holds for this worker.

        Raises:
            ProtocolError: If fewer were sent, or a sender has left without having posted its last.
            WaitTimeoutError: If none comes; names the workers that have not posted their last.
        """
