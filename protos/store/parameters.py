"""Parameters: declaring tables and dense blocks, pulling values and changes, pushing gradients."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from ctr_ps.protos.futures import Combined, Future, Shared
from ctr_ps.protos.gradients import Gradients, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import DenseSpec, TableSpec

Version = int
"""Number of steps applied: one for a synchronous step, one for each batch pushed on arrival."""


class Missing(enum.Enum):
    """What a pull reads for a key that has no row. No pull ever creates a row."""

    INITIAL = "initial"
    """The row's seeded initial value: training."""
    ZEROS = "zeros"
    """Zeros: evaluation and inference, where an untrained embedding would be noise."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Embeddings read by a pull: `rows` are float32[N, D] of each table, in the order of its keys.

    They have all that was applied up to `version`, and perhaps more; of several servers it is the smallest.
    With `bfloat16` they cross the wire as such.
    """

    rows: Mapping[str, Values]
    version: Version
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class PulledPieces:
    """One server's pieces of dense blocks, float32[p] by block; the other fields are as of `Pulled`."""

    pieces: Mapping[str, Values]
    version: Version
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class PushedPulled:
    """One server's answers to a push and the pulls after it."""

    push: Version
    sparse: Pulled
    dense: PulledPieces


FILE = "\0"
"""Begins the name of a file that workers take from a queue, among names of partitions.

Positions in a file compare as text. Workers take turns in it: so a server keeps what it has of each worker,
whatever process has the place, and servers together have what the least of them has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushId:
    """Identity of a push: its worker, its number, and what it completes."""

    worker: int  # index of the worker, from 0
    # chosen at random when the worker starts; tells a restarted worker from its past
    incarnation: int
    sequence: int  # number of this push, from 0, without gaps in one incarnation
    # number of the worker's batches, from the first of its training, that are whole on a server
    # once this push and all before it are applied
    step: int
    examples: int  # examples that this push completes; over all pushes each example counts once
    batches: int  # batches that this push completes; over all pushes each batch counts once
    # the version of the parameters that the gradients were computed from; of merged batches the
    # oldest
    pulled: Version
    # position in the worker's data after these `step` batches, opaque to stores; empty: unknown
    position: str = ""
    weight: float | None = None  # sum of the weights of these examples; None: each has weight 1
    # of data from a stream: the position in each partition of which rows were taken since the push
    # before, in the first push of an incarnation of all; of files from a queue likewise, by `FILE` and number
    partitions: Mapping[str, str] = field(default_factory=dict)

    @property
    def divisor(self) -> float:
        """What the sum of a synchronous step is divided by on behalf of this push."""
        return self.examples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """The pushes of a process that all servers have acknowledged."""

    pushes: int = 0  # of those applied on arrival, how many from the first on, without a gap
    steps: Version = 0  # of the parts of synchronous steps, one more than the largest step; 0: none


class ParameterReader(Protocol):
    """The read-only part of a store."""

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """Reads the embeddings of `keys`, for each table uint64[N], unique.

        Waits until the store has the version `at`; None reads what is there.

        Raises:
            UnknownTableError: If a table does not exist.
            WaitTimeoutError: If the version does not come; names the workers that are behind.
        """

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """Reads dense blocks into float32 vectors of their full length, and returns the version read.

        The vectors hold the answer once the future is done. Errors as for `pull_sparse`.
        """


class Parameters(ParameterReader, Protocol):
    """Tables of rows and dense blocks that are trained."""

    def with_bfloat16(self) -> Self:
        """Returns the same parameters; over the wire what is pulled and pushed here is rounded to bfloat16.

        Not for synchronous steps: a pull or a push with a version is a ProtocolError.
        """

    def create_table(self, spec: TableSpec) -> None:
        """Declares a table; repeating it with an equal spec is no error.

        Raises:
            SpecConflictError: If it exists with another spec.
            SpecError: If the spec is impossible.
        """

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """Declares a dense block; repeating it with an equal spec is no error.

        `values` are its initial ones, float32[length], if the spec has a digest of them; they do not replace
        those of a block that exists.

        Raises:
            SpecConflictError: If it exists with another spec.
            SpecError: If the spec is impossible, or says that there are values and there are none.
        """

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """Hands over gradients. A key without a row gets one.

        Without `at` the push is applied on arrival and advances the version by the batches of the push id. A
        version `t` makes it the worker's contribution to step `t`: when the contributions of all workers are
        there, they are added in worker order, divided by the examples of the step, applied once, and the
        version becomes `t + 1`. Every worker takes part in every step, with empty gradients if need be, until
        it waits in a barrier or leaves. The answer is the version at its time: it does not wait for the
        others.

        Raises:
            GradientError: If lengths do not fit or a value is not finite; nothing was applied.
            ProtocolError: If the worker is not at step `at`, or if workers push for steps and on arrival at
                the same time; nothing was applied.
        """

    def push_pull(
        self,
        gradients: Gradients,
        push_id: PushId,
        *,
        keys: Mapping[str, Keys],
        into: Mapping[str, Values],
        at: Version | None = None,
    ) -> tuple[Future[Pulled], Future[Version]]:
        """Hands over gradients, and asks for what the next step reads: in one call to a server where it fits.

        Arguments and errors are those of `push_grad`, `pull_sparse` and `pull_dense`. The pulls wait for the
        version after `at`; keys without rows read their initial values. Either answer is done after the push
        was acknowledged, and raises its error, too.
        """


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows that changed since a worker last asked: keys uint64[N] and weights float32[N, D] of each table.

    `version` is as of `Pulled`. With `has_more` there may be more: ask again.
    """

    rows: Mapping[str, tuple[Keys, Values]]
    version: Version
    has_more: bool


class Changes(Protocol):
    """Subscriptions to the changes of tables."""

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """Takes rows that changed since this worker last took them: by a load, or by a push of another.

        A row that only the worker's own pushes on arrival changed does not count: the worker knows the
        result. If another worker changed it too, it counts.

        Rows in an answer count as known to the worker even if the answer is lost: after an error the worker
        has to end. Rows that change meanwhile come again. Each server sends at most `max_rows`, at least 1;
        fewer come where more would not fit a message.

        Raises:
            UnknownTableError: If a table does not exist.
            ProtocolError: If one does not record changes, if `max_rows` is less than 1, or if the worker is
                not of this job.
        """


def push_then_pull(
    store: Parameters,
    gradients: Gradients,
    push_id: PushId,
    *,
    keys: Mapping[str, Keys],
    into: Mapping[str, Values],
    at: Version | None,
) -> tuple[Future[Pulled], Future[Version]]:
    """`Parameters.push_pull` in a call each."""
    pushed = store.push_grad(gradients, push_id, at=at)
    if at is None:
        pushed.result()
    then = None if at is None else at + 1
    rows = store.pull_sparse(keys, missing=Missing.INITIAL, at=then)
    read = store.pull_dense(into, at=then) if into else None

    def both() -> Pulled:
        pushed.result()
        return rows.result()

    pulled = Shared(both)

    def version() -> Version:
        of_rows = pulled.result().version
        return of_rows if read is None else read.result()

    return pulled, Combined(version)
