"""Checkpoints: saving the parameters of a run, loading them, resuming it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store.parameters import Version

InferenceDtype = Literal["float32", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceSettings:
    """Contents of an inference checkpoint."""

    # of the rows' weights, another one is a UsageError; dense blocks are float32
    dtype: InferenceDtype = "float32"
    # rows of a lower score (docs/feature_life.md) are left out; above 0 all tables have to keep
    # statistics
    min_score: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in get_args(InferenceDtype):
            raise UsageError(
                f"dtype is {self.dtype!r}, expected one of {', '.join(get_args(InferenceDtype))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A checkpoint to save: full, a delta, or for inference."""

    # a path or URL that does not exist, or a checkpoint of the same kind, which is replaced
    url: str
    # files that travel with the parameters, by name
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    # the checkpoint that the store saved or loaded last, in the same folder as `url`: only rows
    # that changed since are written, and readers of that delta need the base, too. Empty: all rows
    base: str = ""
    # called once, when the snapshot is taken: later pushes are no part of the checkpoint. Pushes
    # are held back for a moment; then rows are copied before their first change
    on_snapshot: Callable[[], None] | None = None
    # save weights alone, to predict with; no delta can be based on it, and nothing can be trained
    # from it. None: all that training needs. With a base it is a UsageError
    inference: InferenceSettings | None = None

    def __post_init__(self) -> None:
        if self.base and self.inference is not None:
            raise UsageError(
                f"checkpoint {self.url!r} is for inference and has the base {self.base!r}, but only "
                "checkpoints for training can be deltas"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """How much of a worker's training is in the parameters: its last push id up to which all is applied.

    All of its batches up to `step` are applied, and `position` is the one in its data after them; empty:
    unknown. Of a cluster `sequence` is the smallest of all servers.
    """

    incarnation: int
    sequence: int
    step: int
    position: str
    # of data from a stream: the position in each partition, by its name
    partitions: Mapping[str, str] = field(default_factory=dict)
    # batches that some server has beyond `step`, of a synchronous step that is not applied on all,
    # and the positions in partitions after them as far as they differ
    sent: int = 0
    sent_partitions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What a store has applied at one moment: its version, batches of all workers, progress of each."""

    version: Version = 0
    batches: int = 0
    workers: Mapping[int, WorkerProgress] = field(default_factory=dict)


class Checkpoints(Protocol):
    """Saving and loading."""

    def require_writable(self, root: str) -> None:
        """Checks before training that checkpoints can be saved into a folder; leaves nothing there.

        Raises CheckpointError if this process or a server cannot, or may not, or sees another storage.
        """

    def save(self, request: SaveRequest) -> str:
        """Writes and publishes a checkpoint; returns the digest of its contents, of a delta "".

        Others may train meanwhile: the checkpoint is a snapshot of one moment, and has a push as a whole or
        not at all. Servers take it one by one: between two synchronous steps all of them have the same steps,
        but of a push applied on arrival one may have its part and another not.

        Raises:
            CheckpointError: If it cannot be written, a table has no scores to go by, or weights are too large
                for the dtype; an older checkpoint there stays as it was.
            UnknownChangesError: If a server does not know what changed since the base; likewise.
            WaitTimeoutError: If another save does not end in time, or pushes do not.
            ProtocolError: If the snapshot was dropped, because it was not written soon enough.
        """

    def load(self, url: str, *, only: Collection[str] = (), token: str = "") -> None:
        """Replaces the parameters by those of a checkpoint, saved from any number of servers.

        `url` is a checkpoint to train from, or a folder of checkpoints, whose latest is meant. With a `token`
        it has to be of the save with this token, as its manifest says. Of tables and dense blocks those of
        `only` are taken, and all others that are declared start fresh, with initial values, whatever the
        checkpoint has. Empty: all, and all must be there.

        Raises:
            CheckpointError: If it is not whole, was altered, does not fit or is of another save, or `only`
                names something that is not there or not declared; nothing was replaced.
            WaitTimeoutError: If a save or pushes do not end in time; likewise.
        """

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], *, batches: int = 0
    ) -> None:
        """Resumes an earlier run whose parameters were loaded, before the first push.

        They have `version`, the `progress` of each worker, which holds until that worker pushes, and
        `batches` of all workers, where schedules of learning rates go on. Raises ProtocolError if a worker
        has pushed, or the job does not have such a worker.
        """
