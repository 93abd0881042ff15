"""The seam: what a trainer asks of the parameters, wherever they are.

`ps_server.store.ParameterStore` is a store in process, `ps_worker.cluster.client.ClusterClient`
is one over gRPC; one contract suite (tests/contract) runs over both.

Calls that move data return futures: complete already in process, pending over the wire. Waiting for
one never lasts longer than the store's time limits, then it raises.
"""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

from protos.errors import UsageError
from protos.gradients import Gradients, Values
from protos.keys import Keys
from protos.spec import DenseSpec, TableSpec
from protos.store.message import Message
from protos.store.numbers import Numbers
from protos.store.save_status import SaveStatus
from protos.store.staleness import Staleness
from protos.store.table_status import Shrunk, TableStatus

Version = int
"""How many steps have been applied: one a synchronous step, one a batch pushed to be applied on arrival."""

T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """An answer that may still be on its way."""

    def result(self) -> T_co:
        """Waits for the answer, at most for the store's time limit, and returns it or raises."""
        ...


class Missing(enum.Enum):
    """What a pull reads for a key that has no row. No pull ever creates a row."""

    INITIAL = "initial"
    """The row's seeded initial value: training."""
    ZEROS = "zeros"
    """Zeros: evaluation and inference, where an untrained embedding would be noise."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows that changed since a worker last asked.

    Attributes:
        rows: For each table asked for uint64[N] and float32[N, D]: keys and weights.
        version: The rows have all that was applied up to this version, and perhaps more; of several
            servers the smallest.
        has_more: There may be more: ask again.
    """

    rows: Mapping[str, tuple[Keys, Values]]
    version: Version
    has_more: bool


class ReduceOp(enum.Enum):
    """How the numbers of several workers become one, element by element."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Reduced:
    """What all workers' numbers come to.

    Attributes:
        values: float64[N], read-only.
        version: At which all workers go on, as after a barrier.
    """

    values: Numbers
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class PushId:
    """Who pushes, and which push it is.

    Attributes:
        worker: Index of the worker, from 0.
        incarnation: Chosen at random when the worker starts; tells a restarted worker from its past.
        sequence: Number of this push, from 0, without gaps in one incarnation.
        step: Batches of the worker, from the first of its training on, that are whole on a server once this
            push and all before it are applied.
        examples: Examples that this push completes; over all pushes each example counts once.
        batches: Batches that this push completes; over all pushes each batch counts once.
        pulled: The version of the parameters that the gradients were computed from; of merged batches the
            oldest.
        position: Where in its data the worker goes on after these `step` batches, in words of its own; empty:
            it does not say.
    """

    worker: int
    incarnation: int
    sequence: int
    step: int
    examples: int
    batches: int
    pulled: Version
    position: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """How much of a worker's training is in the parameters: its last push id up to which all is applied.

    Attributes:
        incarnation: See `PushId`.
        sequence: See `PushId`; of a cluster the smallest of all servers.
        step: All of the worker's batches up to this number are applied.
        position: Where in its data they end; empty: the worker does not say.
    """

    incarnation: int
    sequence: int
    step: int
    position: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """Embeddings that were read.

    Attributes:
        rows: For each table float32[N, D], in the order of its keys.
        version: The rows have all that was applied up to this version, and perhaps more; of several
            servers the smallest.
    """

    rows: Mapping[str, Values]
    version: Version


InferenceDtype = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """What of a model is saved to predict with.

    Attributes:
        dtype: Of the rows' weights, another one is a UsageError; dense blocks are float32.
        min_score: Rows of a lower score (docs/feature_life.md) are left out; above 0 all tables have to keep
            statistics.
    """

    dtype: InferenceDtype = "float32"
    min_score: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in get_args(InferenceDtype):
            raise UsageError(
                f"dtype is {self.dtype!r}, expected one of {', '.join(get_args(InferenceDtype))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """What a store holds and has seen.

    Attributes:
        version: Steps applied.
        tables: By name.
        examples: Examples pushed so far, by worker.
        left: Workers that have left.
        staleness: Of the batches pushed so far. A push counts as many times as it completes batches, a
            worker's part of a synchronous step once; each with the version that it was applied to minus the
            version that it was computed from. Every server counts every batch, by its own versions.
        progress: How much of each worker's training is in the parameters; of one without, nothing.
        last_save: Of the last save; None: there was none.
    """

    version: Version
    tables: Mapping[str, TableStatus]
    examples: Mapping[int, int]
    left: frozenset[int]
    staleness: Staleness
    progress: Mapping[int, WorkerProgress]
    last_save: SaveStatus | None = None


class Store(Protocol):
    """All parameters of a job: tables of rows and dense blocks. Thread-safe."""

    def create_table(self, spec: TableSpec) -> None:
        """Declares a table; again with an equal spec is no error.

        Raises:
            SpecConflictError: If it exists with another spec.
        """
        ...

    def create_dense(self, spec: DenseSpec) -> None:
        """Declares a dense block; again with an equal spec is no error.

        Raises:
            SpecConflictError: If it exists with another spec.
        """
        ...

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """Reads embeddings.

        Args:
            keys: For each table uint64[N], unique.
            missing: What a key without a row reads.
            at: Wait until the store has this version; None reads what is there.

        Returns:
            The rows, and the version that they have at least.

        Raises:
            UnknownTableError: If a table does not exist.
            WaitTimeoutError: If the version does not come; names the workers that are behind.
        """
        ...

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """Reads dense blocks into float32 vectors of their full length, and returns the version read.

        The vectors hold the answer once the future has one. Errors as for `pull_sparse`.
        """
        ...

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """Takes rows that changed since this worker last took them: by a load, or by a push of another.

        What it pushes itself to be applied on arrival does not count: it knows what comes of it, and if
        another changed the row, too, then that counts.

        What was taken counts as known to the worker, also if the answer is lost on its way: after an error
        it cannot go on. What changes meanwhile comes again.

        Args:
            tables: Which to take from; they record changes.
            worker: Who asks.
            max_rows: At most so many rows from each server, at least 1; fewer come where more would not fit a
                message.

        Raises:
            UnknownTableError: If a table does not exist.
            ProtocolError: If one does not record changes, if `max_rows` is less than 1, or if the worker is
                not of this job.
        """
        ...

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """Hands over gradients. A key without a row gets one.

        Args:
            gradients: Sums over examples, each with its number of examples.
            push_id: Who pushes.
            at: None applies on arrival, and moves the version on by the batches of the push id. A version `t`
                makes this the worker's part of step `t`: when
                all workers' parts are there they are added in worker order, divided by the examples of
                the step, applied once, and the version becomes `t + 1`. Every worker takes part in
                every step, with empty gradients if need be, until it waits in a barrier or is done.

        Returns:
            The version at the time of the answer, which does not wait for the others.

        Raises:
            GradientError: If lengths do not fit or a value is not finite; nothing was applied.
            ProtocolError: If the worker is not at step `at`, or if workers push for steps and on arrival at
                the same time; nothing was applied.
        """
        ...

    def post(self, exchange: str, message: Message) -> Future[None]:
        """Hands over a message; done once it fits into what may wait for its receiver.

        A sender waits for each answer before it posts the next to the same receiver, and so is never further
        ahead of it than the bound. Posting again what was posted is no error and changes nothing.

        Args:
            exchange: Name of an exchange between all workers of the job, unique to it. Each worker posts to
                others and takes what is for it at the same time.
            message: The next to this receiver. The last has no content.

        Raises:
            ProtocolError: If it is not the next, or sender or receiver is done or not of this job.
            WaitTimeoutError: If the receiver takes nothing; names it.
        """
        ...

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """Waits for messages to a worker, in the order in which they came; those of one sender in its order.

        To take from the next exchange forgets what the one before still holds for this worker.

        Args:
            exchange: See `post`.
            worker: The receiver.
            received: How many messages of this exchange it has: the next ones come, and these are forgotten.

        Returns:
            Some messages; none if all workers have posted their last, also this one to itself.

        Raises:
            ProtocolError: If there are not so many, or a sender is done without having posted its last.
            WaitTimeoutError: If none comes; names the workers that have not posted their last.
        """
        ...

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        """Waits until every worker that is not done has come to the barrier `name`.

        A worker that waits takes part in no step: it leaves steps from `step` on to the others, by
        number and never by time. It goes on at the version that the barrier returns, the same for all.

        Raises:
            WaitTimeoutError: If some do not come; names them.
        """
        ...

    def all_reduce(
        self, name: str, worker: int, values: Numbers, op: ReduceOp, *, step: Version
    ) -> Future[Reduced]:
        """A barrier to which each worker brings numbers, and from which all take what they come to.

        They are reduced in worker order, so that the same numbers give the same sum to the last bit; NaN and
        infinities go through.

        Args:
            name: As of a barrier.
            worker: Who comes.
            values: float64[N]; may be reused when the call returns.
            op: What becomes of them.
            step: As for `barrier`.

        Raises:
            ProtocolError: If `values` is something else, or if workers come with different N or `op`, or with
                no numbers at all: then all who wait get it, the barrier is over and its name free again.
            WaitTimeoutError: If some do not come; names them.
        """
        ...

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        """Says how far a worker is, and waits until no other is too far behind: training within a bound.

        A worker's clock is the number of steps that it has finished since it last left a barrier. One that
        waits in a barrier or is done has none, so nobody waits for it. Calls of one worker may overlap and
        overtake each other: the largest clock stays. But a worker has all answers before it comes to a
        barrier, since from there it counts anew.

        Args:
            worker: Who says so.
            clock: Steps that it has finished.
            at_least: Wait until every worker that trains has finished so many; at most `clock`.

        Returns:
            How many steps the slowest has finished; `at_least` if nobody trains any more.

        Raises:
            ProtocolError: If the worker is done, or would wait for itself.
            WaitTimeoutError: If some do not get so far; names them, with their clocks.
        """
        ...

    def leave(self, worker: int, *, step: Version) -> None:
        """Says that a worker has left for good, and takes part in no step from `step` on."""
        ...

    def require_writable(self, root: str) -> None:
        """Finds out before training whether checkpoints can be saved into a folder; leaves nothing there.

        Raises:
            CheckpointError: If this process or a server cannot, or may not, or sees another storage.
        """
        ...

    def save(
        self,
        url: str,
        attachments: Mapping[str, bytes],
        *,
        base: str = "",
        on_snapshot: Callable[[], None] | None = None,
    ) -> str:
        """Writes a whole checkpoint to `url`, publishes it, and returns the model's digest; of a delta "".

        Others may train meanwhile: the checkpoint is of one moment, the cut, and has a push as a whole or not
        at all. Servers are cut one by one: between two synchronous steps all of them have the same steps, but
        of a push applied on arrival one may have its part and another not.

        Args:
            url: A path or URL where there is nothing, or a checkpoint, which is replaced.
            attachments: Files that travel with the parameters, by name.
            base: The checkpoint that the store saved or loaded last, in the same folder as `url`: only rows
                that changed since are written, and who reads that delta needs the base, too. Empty: all rows.
            on_snapshot: Called once, when the snapshot is taken: later pushes are no part of the checkpoint.
                Pushes are held back for a moment; then rows are copied before their first change.

        Raises:
            CheckpointError: If it cannot be written; an older checkpoint there stays as it was.
            UnknownChangesError: If a server does not know what changed since the base; likewise.
            WaitTimeoutError: If another save does not end in time, or pushes do not.
            ProtocolError: If there is no such cut any more.
        """
        ...

    def save_inference(
        self, url: str, attachments: Mapping[str, bytes], settings: InferenceSettings
    ) -> str:
        """Writes a checkpoint to predict with, weights alone, and returns the digest of what it holds.

        Others may train meanwhile, as for `save`. No delta can be based on it, and nothing can be trained on
        from it.

        Args:
            url: As for `save`.
            attachments: As for `save`.
            settings: What of the model is written.

        Raises:
            CheckpointError: If it cannot be written, a table has no scores to go by, or weights are too large
                for the dtype; an older checkpoint there stays as it was.
            ProtocolError: If there is no such cut any more.
            WaitTimeoutError: If another save does not end in time.
        """
        ...

    def load(self, url: str, *, only: Collection[str] = (), token: str = "") -> None:
        """Replaces the parameters by those of a checkpoint, saved from any number of servers.

        Args:
            url: A checkpoint to train on from, or a folder of checkpoints, whose latest is meant.
            only: Tables and dense blocks to take from it; all others that are declared begin anew, with
                initial values, whatever the checkpoint has. Empty: all, and all must be there.
            token: Of the save that it has to be of, as whoever has read its manifest knows; empty: any.

        Raises:
            CheckpointError: If it is not whole, was altered, does not fit or is of another save, or `only`
                names something that is not there or not declared; nothing was replaced.
            WaitTimeoutError: If a save or pushes do not end in time; likewise.
        """
        ...

    def resume(self, version: Version, progress: Mapping[int, WorkerProgress]) -> None:
        """Goes on with an earlier run whose parameters were loaded, before anybody has pushed.

        Args:
            version: That of the parameters.
            progress: How much of each worker's training is in them; holds until that worker pushes.

        Raises:
            ProtocolError: If somebody has pushed, or the job does not have such a worker.
        """
        ...

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """Ends a pass over the data: rows age, and those that have expired are removed.

        Tables that keep statistics decay them and count the pass for rows that were not pushed; then each
        table's own rules (`TableSpec.expiry`) say which rows go. A removed key is one without a row, as if it
        had never been pushed. Others may push and pull meanwhile; while they wait in a barrier, the same rows
        go on any number of servers.

        Args:
            max_norm: Also removes, from all tables, the rows whose weights have an L2 norm of at most this.
            dry_run: Says what would be removed, and changes nothing.

        Returns:
            What was removed and what is left, by table.

        Raises:
            ProtocolError: If `max_norm` is negative or not finite, or a table has replicas; nothing was
                changed.
        """
        ...

    def digest(self) -> str:
        """Returns the digest of all parameters and optimizer states of rows, in hexadecimal.

        Equal models have equal digests on any number of servers: docs/checkpoint.md says what is hashed.
        """
        ...

    def status(self) -> StoreStatus:
        """Returns what the store holds and has seen, summed over servers."""
        ...
