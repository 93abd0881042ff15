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
    """

    name: str
    dim: int
    initializer: InitializerSpec
    optimizer: OptimizerSpec
    seed: int = 0
    num_shards: int = DEFAULT_NUM_SHARDS
    records_changes: bool = False


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
