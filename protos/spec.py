"""What tables, dense blocks, optimizers and initial values are declared to be.

Specs are plain frozen data: they travel in `CreateTable`, stand in checkpoints, and are compared.
Which optimizers exist is the server's business; a spec only names one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_NUM_SHARDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer by name, with the hyper-parameters that differ from its defaults."""

    name: str
    params: Mapping[str, float] = field(default_factory=dict)

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
    """That rows count their shows and clicks, and what these are worth (docs/feature_life.md).

        score = nonclk_coeff * (show - click) + click_coeff * click

    Attributes:
        nonclk_coeff: Worth of a show without a click.
        click_coeff: Worth of a click.
        decay: What a pass leaves of both: each shrink multiplies them by it.
    """

    nonclk_coeff: float = 0.1
    click_coeff: float = 1.0
    decay: float = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSpec:
    """When a key that has no row gets one.

    Attributes:
        policy: "count", "probability" or "score".
        threshold: Occurrences, or the probability of each of them, or the score that a key needs.
        table: Whose score of the same key counts; empty: the key's own.
        counter: "exact", or "bloom": a counting Bloom filter.
        expected_keys: Keys without a row that a Bloom filter is made for.
        false_positive_rate: Of that filter, when it has so many.
        default_value: What each weight of a key without a row reads, in training as well.
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
    """When a key loses its row; 0 switches a rule off.

    Attributes:
        delete_threshold: A shrink removes rows whose score is below.
        max_unseen: A shrink removes rows that were not pushed for more passes than this.
        ttl_s: A shrink removes rows that were last pushed longer ago, in seconds.
        max_rows: A push that finds so many removes some at once.
        max_bytes: The same, for the bytes of rows and index.
        evict: Which rows make room for new ones: "lru", those not pushed for longest, or "score", those of
            the lowest score.
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
        initializer: Of the weights of a row that no push has touched.
        optimizer: Applied to the rows by the server that holds them.
        seed: Of the initial values.
        num_shards: A power of two; fixed for the life of the table.
        records_changes: Servers remember for each worker which rows changed since it last asked for them
            (`Store.pull_changed`). Of a job, not of a model: it stands in no digest, and a checkpoint of
            either kind of table loads into the other.
        statistics: Rows count shows and clicks; None: they do not. Of a job, like `records_changes`, and so
            are the next two, which need it.
        admission: When a key gets a row; None: at its first push.
        expiry: When a key loses its row; None: never by itself.
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
        """What each weight of a key without a row reads, where it does not read its initial value."""
        return 0.0 if self.admission is None else self.admission.default_value


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSegment:
    """`length` consecutive elements of a dense block that start alike."""

    length: int
    initializer: InitializerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A dense block: one flat float32 vector, cut evenly over the servers.

    Attributes:
        name: Unique among the dense blocks of a cluster.
        segments: What the vector consists of, in order.
        optimizer: Element-wise, so that the cut over servers does not show.
        seed: Of the initial values.
    """

    name: str
    segments: tuple[DenseSegment, ...]
    optimizer: OptimizerSpec
    seed: int = 0

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(segment.length for segment in self.segments)
