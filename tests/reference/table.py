"""A table as a dict, in float64: the reference for the sharded implementation."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.spec import TableSpec
from tests.reference.initializers import initial_row
from tests.reference.optimizers import UPDATES, Memory, Vector


class ReferenceTable:
    """Weights and optimizer memory by key, and for each of some subscribers the keys that changed."""

    def __init__(self, spec: TableSpec, subscribers: Iterable[int] = ()) -> None:
        self.spec = spec
        self.weights: dict[int, Vector] = {}
        self.memories: dict[int, Memory] = {}
        self.changed: dict[int, set[int]] = {subscriber: set() for subscriber in subscribers}

    def initial(self, key: int) -> Vector:
        spec = self.spec
        return np.array(initial_row(spec.initializer, spec.seed, spec.name, key, spec.dim))

    def pull(self, keys: Iterable[int], *, reads_initial: bool) -> NDArray[np.float64]:
        missing = self.initial if reads_initial else lambda _: np.zeros(self.spec.dim)
        rows = [self.weights[key] if key in self.weights else missing(key) for key in keys]
        return np.array(rows).reshape(-1, self.spec.dim)

    def push(self, keys: Iterable[int], values: NDArray[np.float64], examples: int) -> None:
        """Applies one row after the other, so a key may be repeated."""
        optimizer = self.spec.optimizer
        for key, value in zip(keys, values, strict=True):
            weights = self.weights.get(key, self.initial(key))
            memory = self.memories.setdefault(key, {})
            self.weights[key] = UPDATES[optimizer.name](
                weights, memory, value / examples, **optimizer.params
            )
            self.mark(key)

    def write(self, key: int, weights: Vector) -> None:
        self.weights[key] = weights
        self.mark(key)

    def evict(self, max_norm: float) -> int:
        small = [key for key, row in self.weights.items() if np.linalg.norm(row) <= max_norm]
        for key in small:
            del self.weights[key]
            self.memories.pop(key, None)
            for changed in self.changed.values():
                changed.discard(key)
        return len(small)

    def mark(self, key: int) -> None:
        for changed in self.changed.values():
            changed.add(key)
