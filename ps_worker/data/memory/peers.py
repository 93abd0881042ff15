"""All workers of a run, as one of them reaches the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from protos.store import Numbers, ReduceOp, Store


@dataclass(frozen=True, slots=True)
class Peers:
    """One worker's way to the others.

    Attributes:
        store: Carries messages.
        worker: Which of the workers this is.
        num_workers: How many there are.
        all_reduce: Reduces float64[N] over all workers; all of them call it, in the same order.
    """

    store: Store
    worker: int
    num_workers: int
    all_reduce: Callable[[Numbers, ReduceOp], Numbers]

    def total(self, *counts: int) -> list[int]:
        """Returns the sums over all workers of counts up to 2**53; all workers call it."""
        return [int(each) for each in self.all_reduce(np.array(counts, np.float64), ReduceOp.SUM)]


class HasPeers(Protocol):
    """Whatever knows its peers: the module `ps_worker.fleet` for one."""

    def peers(self) -> Peers:
        """Returns this worker's way to the others."""
        ...
