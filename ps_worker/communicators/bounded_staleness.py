"""Asynchronous training in which no worker runs far ahead of the slowest.

    step c may begin  <=>  every worker that trains has finished at least c - max_staleness steps

A step is a batch; it is finished when every server has acknowledged all of its gradients. So step c reads
rows and dense parameters with all gradients of steps before c - max_staleness, and `max_staleness = 0` is a
barrier before each step. Workers that are done, or wait in a barrier, delay no other.

The stale synchronous parallel model of Ho et al., "More effective distributed ML via a stale synchronous
parallel parameter server", NIPS 2013.
"""

import threading
from collections.abc import Mapping
from typing import Any

from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Coordination, Future, Member, Pulled, Store, Version
from ctr_ps.ps_worker.communicators.asynchronous import AsyncCommunicator
from ctr_ps.ps_worker.communicators.merging import MergedPush


class BoundedStalenessCommunicator(AsyncCommunicator):
    """The worker's side: an asynchronous communicator that waits before it pulls. Thread-safe."""

    def __init__(
        self,
        store: Store,
        *,
        member: Member,
        max_staleness: int,  # steps that this worker may run ahead of the slowest
        max_merge_var_num: int,  # capped by the bound
        max_merge_dense_num: int,  # capped by the bound
        # there are no other workers and no calls to wait for, so each training thread has a step in
        # flight; the lower limit counts
        is_alone: bool = False,
        **settings: Any,  # other arguments of `AsyncCommunicator`
    ) -> None:
        self._clocks: Coordination = store
        self._receiving = threading.Lock()
        self._restart()
        super().__init__(
            store,
            member=member,
            max_merge_var_num=max_merge_var_num,
            max_merge_dense_num=max_merge_dense_num,
            **settings,
        )
        self._max_staleness = max_staleness
        self._is_alone = is_alone
        self._most_merged = (max_merge_var_num, max_merge_dense_num)
        self.begin(thread_num=1)

    def begin(self, thread_num: int) -> None:
        """Adapts to the number of threads, so that no two steps of this worker wait for each other."""
        with self._changed:
            self._bound = self._max_staleness
            if self._is_alone:
                self._bound = min(self._bound, thread_num - 1)
            # A thread that pulls ahead has begun two steps; those of all threads must be within the bound.
            self.is_overlapped = self._bound >= 2 * thread_num
            # Batches waiting to be merged are unfinished, and so is one of each thread that pulls ahead.
            ahead = thread_num - 1 if self.is_overlapped else 0
            longest = max(1, self._bound - ahead)
            sparse, dense = self._most_merged
            self._merges = (min(sparse, longest), min(dense, longest))

    def _restart(self) -> None:
        self._begun = 0
        self._acknowledged_sparse = self._acknowledged_dense = 0
        self._slowest = 0  # known steps that every worker has finished
        self._slowest_in_dense = 0  # the same at the last request of dense parameters

    @property
    def _finished(self) -> int:
        return min(self._acknowledged_sparse, self._acknowledged_dense)

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Requests embeddings, once no worker is more than the bound behind."""
        with self._changed:
            needed = self._begun - self._bound
            self._begun += 1
            self._background.wait_until(lambda: self._finished >= needed)
            finished, is_near = self._finished, self._slowest >= needed
        if not is_near:
            self._learn_slowest(finished, at_least=needed)
        if self._slowest_in_dense < needed:
            self._receive()
        return super().pull(keys)

    def rejoin(self, version: Version) -> None:
        """Restarts the count of steps: the servers do so after a barrier."""
        with self._changed:
            self._restart()
        super().rejoin(version)

    def _acknowledge(self, push: MergedPush) -> None:
        with self._changed:
            before = self._finished
            self._acknowledged_sparse += push.batches
            self._acknowledged_dense += push.dense_batches
            finished = self._finished
            self._changed.notify_all()
        if finished > before:
            self._learn_slowest(finished, at_least=0)

    def _receive(self) -> None:
        # Called by the receiver thread, or by a training thread that needs newer parameters.
        with self._receiving:
            slowest = self._slowest
            super()._receive()
            self._slowest_in_dense = slowest

    def _learn_slowest(self, finished: int, *, at_least: int) -> None:
        """Reports this worker's clock, and waits until the slowest has finished `at_least` steps."""
        slowest = self._clocks.advance(self._worker, finished, at_least=at_least).result()
        with self._changed:
            self._slowest = max(self._slowest, slowest)
