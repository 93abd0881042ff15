"""Specs: declarations of tables, dense blocks, optimizers and initial values.

Specs are plain frozen data: they travel in `CreateTable`, are saved in checkpoints, and are compared. A spec
only names its optimizer; servers know which exist.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

DEFAULT_NUM_SHARDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A schedule: the factor of the learning rate at each step (docs/optimizers.md#schedules).

    A step is a batch of any worker, in every mode.

    Attributes:
        kind: What follows the warm-up: "constant", "linear", "cosine" or "step".
        warmup_steps: In which the factor grows to 1, by the same amount in each.
        total_steps: After which the factor stays at `end_factor`, those of the warm-up included; of "linear"
            and "cosine".
        end_factor: Factor in the end; of the same two.
        step_size: Steps from one multiplication by `gamma` to the next; of "step".
        gamma: See `step_size`.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    end_factor: float = 0.0
    step_size: int = 0
    gamma: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer by name, with the hyper-parameters that differ from its defaults.

    Attributes:
        name: Of the optimizer.
        params: By name.
        schedule: Of the learning rate; None: it stays as it is.
    """

    name: str
    params: Mapping[str, float] = field(default_factory=dict)
    schedule: ScheduleSpec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", dict(sorted(self.params.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class InitializerSpec:
    """Initial values, a function of (seed, name, key or position, column) alone.

    Attributes:
        kind: "uniform" in [-scale, scale), or "normal" with mean 0 and standard deviation scale.
        scale: 0 gives zeros.
    """

    kind: str = "uniform"
    scale: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsSpec:
    """Statistics of rows: shows, clicks, and their score (docs/feature_life.md).

        score = nonclk_coeff * (show - click) + click_coeff * click

    Attributes:
        nonclk_coeff: Worth of a show without a click.
        click_coeff: Worth of a click.
        decay: Factor by which each shrink multiplies both.
    """

    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay: float = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSpec:
    """Admission: the condition under which a key without a row gets one.

    Attributes:
        policy: "count", "probability" or "score".
        threshold: Occurrences, probability of each occurrence, or score that a key needs.
        table: Table whose score of the same key counts; empty: this one.
        counter: "exact", or "bloom": a counting Bloom filter.
        expected_keys: Keys without a row for which a Bloom filter is sized.
        false_positive_rate: Rate of that filter with `expected_keys` keys.
        default_value: Weight that a key without a row reads, in training as well.
    """

    policy: str = "count"
    threshold: float = 1.0
    table: str = ""
    counter: str = "exact"
    expected_keys: int = 0
    false_positive_rate: float = 0.01
    default_value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpirySpec:
    """Expiry: the rules by which keys lose their rows; 0 switches a rule off.

    Attributes:
        delete_threshold: A shrink removes rows of a lower score.
        max_unseen: A shrink removes rows that were not pushed for more passes than this.
        ttl_s: A shrink removes rows whose last push is more seconds ago.
        max_rows: A push to a table with this number of rows evicts some.
        max_bytes: The same, for the bytes of rows and index.
        evict: "lru" evicts the least recently pushed rows, "score" those of the lowest score.
    """

    delete_threshold: float = 0.0
    max_unseen: int = 0
    ttl_s: float = 0.0
    max_rows: int = 0
    max_bytes: int = 0
    evict: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A named set of rows: an embedding of `dim` float32 for each uint64 key.

    Attributes:
        name: Unique among the tables of a cluster.
        dim: Width of the embedding.
        initializer: Initial weights of a row.
        optimizer: Applied to the rows by the server that holds them.
        seed: Of the initial values.
        num_shards: A power of two; fixed for the life of the table.
        records_changes: Servers record for each worker which rows changed since it last took them
            (`Store.pull_changed`). A property of the job, not of the model: it is in no digest, and a
            checkpoint loads with or without it.
        statistics: Rows count shows and clicks; None: they do not. A property of the job, as are admission
            and expiry.
        admission: Condition for a row; None: the first push.
        expiry: Rules by which rows are removed; None: none.
    """

    name: str
    dim: int
    initializer: InitializerSpec
    optimizer: OptimizerSpec
    seed: int = 0
    num_shards: int = DEFAULT_NUM_SHARDS
    records_changes: bool = False
    statistics: StatisticsSpec | None = None
    admission: AdmissionSpec | None = None
    expiry: ExpirySpec | None = None

    @property
    def default_value(self) -> float:
        """Weight that a key without a row reads where it does not read its initial value."""
        return 0.0 if self.admission is None else self.admission.default_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSegment:
    """Consecutive elements of a dense block with one initializer: a tensor of the model.

    Attributes:
        length: Number of elements.
        initializer: Initial values.
        name: Of the tensor; empty: not known, as in older checkpoints.
        shape: Of the tensor, row-major in the block; counts only with a name.
        values: `length` initial values, in the initializer's place; empty: its own.
    """

    length: int
    initializer: InitializerSpec
    name: str = ""
    shape: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense block: one flat float32 vector, cut evenly over the servers.

    Attributes:
        name: Unique among the dense blocks of a cluster.
        segments: Parts of the vector, in order.
        optimizer: Element-wise, so the result does not depend on the split over servers.
        seed: Of the initial values.
        values_digest: Of the initial values where workers give them, who must agree on them; 0: they follow
            from the initializers.
    """

    name: str
    segments: tuple[DenseSegment, ...]
    optimizer: OptimizerSpec
    seed: int = 0
    values_digest: int = 0

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(segment.length for segment in self.segments)

    def layout_difference(self, other: "DenseSpec") -> str:
        """Returns which tensor of another spec is first where this one has a different one; empty: none is.

        Values of one spec would be read as parameters of other layers by the other. Where names are not
        known nothing is different.
        """
        if not all(segment.name for segment in (*self.segments, *other.segments)):
            return ""
        for own, others in zip_longest(_tensors(self), _tensors(other), fillvalue="nothing"):
            if own != others:
                return f"{own}, not {others}"
        return ""


def _tensors(spec: DenseSpec) -> list[str]:
    return [f"{segment.name} {list(segment.shape)}" for segment in spec.segments]
