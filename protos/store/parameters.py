"""Parameters: declaring tables and dense blocks, pulling values, pushing gradients."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
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
    """Embeddings read by a pull.

    Attributes:
        rows: For each table float32[N, D], in the order of its keys.
        version: The rows have all that was applied up to this version, and perhaps more; of several
            servers the smallest.
        bfloat16: The rows cross the wire as bfloat16.
    """

    rows: Mapping[str, Values]
    version: Version
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class PulledPieces:
    """One server's pieces of dense blocks.

    Attributes:
        pieces: By block float32[p].
        version: As of `Pulled`.
        bfloat16: As of `Pulled`.
    """

    pieces: Mapping[str, Values]
    version: Version
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class PushedPulled:
    """One server's answers to a push and the pulls after it."""

    push: Version
    sparse: Pulled
    dense: PulledPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class PushId:
    """Identity of a push: its worker, its number, and what it completes.

    Attributes:
        worker: Index of the worker, from 0.
        incarnation: Chosen at random when the worker starts; tells a restarted worker from its past.
        sequence: Number of this push, from 0, without gaps in one incarnation.
        step: Number of the worker's batches, from the first of its training, that are whole on a server once
            this push and all before it are applied.
        examples: Examples that this push completes; over all pushes each example counts once.
        batches: Batches that this push completes; over all pushes each batch counts once.
        pulled: The version of the parameters that the gradients were computed from; of merged batches the
            oldest.
        position: Position in the worker's data after these `step` batches, opaque to stores; empty: unknown.
        weight: Sum of the weights of these examples; None: each has weight 1.
    """

    worker: int
    incarnation: int
    sequence: int
    step: int
    examples: int
    batches: int
    pulled: Version
    position: str = ""
    weight: float | None = None

    @property
    def divisor(self) -> float:
        """What the sum of a synchronous step is divided by on behalf of this push."""
        return self.examples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """The pushes of a process that all servers have acknowledged.

    Attributes:
        pushes: Of those applied on arrival, how many from the first on, without a gap.
        steps: Of the parts of synchronous steps, one more than the largest step; 0: none.
    """

    pushes: int = 0
    steps: Version = 0


class ParameterReader(Protocol):
    """The read-only part of a store."""

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

        The vectors hold the answer once the future is done. Errors as for `pull_sparse`.
        """
        ...


class Parameters(ParameterReader, Protocol):
    """Tables of rows and dense blocks that are trained."""

    def with_bfloat16(self) -> Self:
        """Returns the same parameters; over the wire what is pulled and pushed here is rounded to bfloat16.

        Not for synchronous steps: a pull or a push with a version is a ProtocolError.
        """
        ...

    def create_table(self, spec: TableSpec) -> None:
        """Declares a table; repeating it with an equal spec is no error.

        Raises:
            SpecConflictError: If it exists with another spec.
            SpecError: If the spec is impossible.
        """
        ...

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """Declares a dense block; repeating it with an equal spec is no error.

        Args:
            spec: The block.
            values: Its initial values, float32[length], if the spec has a digest of them; they do not replace
                those of a block that exists.

        Raises:
            SpecConflictError: If it exists with another spec.
            SpecError: If the spec is impossible, or says that there are values and there are none.
        """
        ...

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """Hands over gradients. A key without a row gets one.

        Args:
            gradients: Sums over examples, each with its number of examples.
            push_id: Identity of the push.
            at: None applies the push on arrival and advances the version by the batches of the push id. A
                version `t` makes it the worker's contribution to step `t`: when the contributions of all
                workers are there, they are added in worker order, divided by the examples of the step,
                applied once, and the version becomes `t + 1`. Every worker takes part in every step, with
                empty gradients if need be, until it waits in a barrier or leaves.

        Returns:
            The version at the time of the answer, which does not wait for the others.

        Raises:
            GradientError: If lengths do not fit or a value is not finite; nothing was applied.
            ProtocolError: If the worker is not at step `at`, or if workers push for steps and on arrival at
                the same time; nothing was applied.
        """
        ...

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

        Args:
            gradients: As of `push_grad`.
            push_id: As of `push_grad`.
            keys: As of `pull_sparse`; keys without rows read their initial values.
            into: As of `pull_dense`.
            at: As of `push_grad`. The pulls wait for the version after it.

        Returns:
            The answers of `pull_sparse` and `pull_dense`. Either is done after the push was acknowledged, and
            raises its error, too.

        Raises:
            CtrPsError: What `push_grad` or a pull raises at once.
        """
        ...


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
