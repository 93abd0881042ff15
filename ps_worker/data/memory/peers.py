"""The workers of a run and their communication, as seen by one of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ctr_ps.protos.store import Exchange, Numbers, ReduceOp


@dataclass(frozen=True, slots=True)
class Peers:
    """All workers of a run, as seen by one of them."""

    store: Exchange  # carries messages
    worker: int  # index of this worker
    num_workers: int
    # reduces float64[N] over all workers; collective: called in the same order by all
    all_reduce: Callable[[Numbers, ReduceOp], Numbers]

    def total(self, *counts: int) -> list[int]:
        """Returns the sums of counts over all workers, up to 2**53; collective."""
        return [int(each) for each in self.all_reduce(np.array(counts, np.float64), ReduceOp.SUM)]


class HasPeers(Protocol):
    """An object with peers, such as the module `ps_worker.fleet`."""

    def peers(self) -> Peers:
        """Returns the workers of the run."""
        ...
