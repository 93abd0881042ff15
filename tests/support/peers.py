"""Workers that communicate through stores."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from ctr_ps.protos.store import Numbers, ReduceOp, Store
from ctr_ps.ps_worker.data.global_shuffle import Peers

T = TypeVar("T")

LIMIT_S = 100.0


@dataclass
class StoreFleet:
    """One worker's `peers()`, as the module `ps_worker.fleet` has it."""

    store: Store
    worker: int
    num_workers: int

    def __post_init__(self) -> None:
        self._num_barriers = count()

    def peers(self) -> Peers:
        return Peers(self.store, self.worker, self.num_workers, self._all_reduce)

    def _all_reduce(self, values: Numbers, op: ReduceOp) -> Numbers:
        name = f"meeting-{next(self._num_barriers)}"
        return self.store.all_reduce(name, self.worker, values, op, step=0).result().values


def fleets_of(stores: Sequence[Store]) -> list[StoreFleet]:
    return [StoreFleet(store, worker, len(stores)) for worker, store in enumerate(stores)]


def on_each(work: Callable[[StoreFleet], T], fleets: Sequence[StoreFleet]) -> list[T]:
    """Runs `work` for all workers concurrently; raises the first error."""
    with ThreadPoolExecutor(len(fleets)) as pool:
        running = [pool.submit(work, fleet) for fleet in fleets]
        return [each.result(LIMIT_S) for each in running]
