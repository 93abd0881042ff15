"""Specs: declarations of tables, dense blocks, optimizers and initial values.

Specs are plain frozen data: they travel in `CreateTable`, are saved in checkpoints, and are compared. A spec
names its optimizer; the implementation is the server's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

DEFAULT_NUM_SHARDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A schedule: the factor of the learning rate by batch of any worker (docs/optimizers.md#schedules)."""

    kind: str = "constant"  # after the warm-up: "constant", "linear", "cosine" or "step"
    warmup_steps: int = 0  # steps of linear growth to 1
    total_steps: int = 0  # steps until `end_factor`, with the warm-up; for "linear" and "cosine"
    end_factor: float = 0.0  # final factor, for "linear" and "cosine"
    step_size: int = 0  # steps between two multiplications by `gamma`, for "step"
    gamma: float = 1.0  # see `step_size`


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer by name, with its non-default hyper-parameters and the schedule of its learning rate."""

    name: str
    params: Mapping[str, float] = field(default_factory=dict)
    schedule: ScheduleSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", dict(sorted(self.params.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class InitializerSpec:
    """Initial values, a function of (seed, name, key or position, column) alone.

    "uniform" in [-scale, scale), or "normal" with mean 0 and standard deviation `scale`; 0 gives zeros.
    """

    kind: str = "uniform"
    scale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSpec:
    """Statistics of rows: shows, clicks, and their score (docs/feature_life.md).

        score = nonclk_coeff * (show - click) + click_coeff * click

    Each shrink multiplies shows and clicks by `decay`.
    """

    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay: float = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSpec:
    """Admission: the condition under which a key gets a row."""

    policy: str = "count"  # "count", "probability" or "score"
    threshold: float = 1.0  # occurrences, probability of each occurrence, or score that a key needs
    table: str = ""  # table whose score of the same key counts; empty: this one
    counter: str = "exact"  # "exact", or "bloom": a counting Bloom filter
    expected_keys: int = 0  # capacity of a Bloom filter, in keys without a row
    false_positive_rate: float = 0.01  # of the filter at its capacity
    default_value: float = 0.0  # weight that a key without a row reads, in training as well


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirySpec:
    """Expiry: the rules by which keys lose their rows; 0 switches a rule off."""

    delete_threshold: float = 0.0  # a shrink removes rows of a lower score
    max_unseen: int = 0  # a shrink removes rows without a push for more passes
    ttl_s: float = 0.0  # a shrink removes rows without a push for more seconds
    max_rows: int = 0  # a push to a table with this number of rows evicts some
    max_bytes: int = 0  # the same, for the bytes of rows and index
    # "lru" evicts the least recently pushed rows, "score" those of the lowest score
    evict: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A named set of rows: an embedding of `dim` float32 for each uint64 key."""

    name: str  # unique among the tables of a cluster
    dim: int  # width of the embedding
    initializer: InitializerSpec  # initial weights of a row
    optimizer: OptimizerSpec  # applied by the server of a row
    # weights in the server's memory are bfloat16, rounded at random; else float32. A property of the
    # job, not of the model: checkpoints have float32, and load with either
    is_bfloat16: bool = False
    seed: int = 0  # of the initial values
    num_shards: int = DEFAULT_NUM_SHARDS  # a power of two; fixed for the life of the table
    # servers record the changed rows for each worker (`Store.pull_changed`). A property of the job,
    # not of the model: in no digest, and checkpoints load with or without it
    records_changes: bool = False
    # None: rows count no shows and clicks. Of the job, as are admission and expiry
    statistics: StatisticsSpec | None = None
    admission: AdmissionSpec | None = None  # condition for a row; None: the first push
    expiry: ExpirySpec | None = None  # rules by which rows are removed; None: none

    @property
    def default_value(self) -> float:
        """Weight of keys without a row, where reading creates none."""
        return 0.0 if self.admission is None else self.admission.default_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSegment:
    """Consecutive elements of a dense block with one initializer: a tensor of the model."""

    length: int  # number of elements
    initializer: InitializerSpec  # initial values
    name: str = ""  # of the tensor; empty: unknown, as in older checkpoints
    shape: tuple[int, ...] = ()  # of the tensor, row-major in the block; meaningless without a name
    # `length` initial values that replace the initializer's; empty: none
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense block: one flat float32 vector, split evenly over the servers."""

    name: str  # unique among the dense blocks of a cluster
    segments: tuple[DenseSegment, ...]  # parts of the vector, in order
    # element-wise, so the result does not depend on the split over servers
    optimizer: OptimizerSpec
    seed: int = 0  # of the initial values
    # digest of initial values that workers provide; 0: the initializers make them
    values_digest: int = 0

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(segment.length for segment in self.segments)

    def layout_difference(self, other: "DenseSpec") -> str:
        """Returns the first tensor that differs in another spec; empty: none, or names are unknown.

        With another layout, parameters would be read into the wrong layers.
        """
        if not all(segment.name for segment in (*self.segments, *other.segments)):
            return ""
        for own, others in zip_longest(_tensors(self), _tensors(other), fillvalue="nothing"):
            if own != others:
                return f"{own}, not {others}"
        return ""


def _tensors(spec: DenseSpec) -> list[str]:
    return [f"{segment.name} {list(segment.shape)}" for segment in spec.segments]
