"""Asynchronous training: no worker waits for another, except for worker 0 at the start of a fresh model.

    training threads --push--> merger --sender thread--> servers
    training threads <--lend-- mirror <--receiver thread-- servers       dense parameters
    training threads <--pull-------------------------- servers           embeddings, a batch ahead

Otherwise only a full queue blocks training. No gradient waits longer than `max_delay_ms` to be merged; dense
parameters are fetched after each dense push.

Worker 0 trains the first batches of a fresh model alone. The next ones are trained in step: each is pushed by
itself, and a worker pulls rows after its own gradients are applied
(docs/decisions/0033-the-first-steps-of-async.md).
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np

from ctr_ps.protos.errors import WaitTimeoutError
from ctr_ps.protos.futures import Shared
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import (
    Coordination,
    Future,
    Member,
    Missing,
    Parameters,
    Pulled,
    Store,
    Version,
)
from ctr_ps.ps_worker.communicators.communicator import Background, Communicator, StepPush
from ctr_ps.ps_worker.communicators.merging import GradientMerger, MergedPush
from ctr_ps.ps_worker.job.model import DENSE_BLOCK

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4  # pushes in flight at which the sender waits for the oldest to be acknowledged

BATCHES_IN_STEP = 1000
"""Applied batches of all workers from which on a worker merges, and reads rows without its last gradients.
While Adagrad's sums are small, gradients of old rows are too large together, and merging leaves dense
parameters too few steps."""

FIRST_BATCHES = 32
"""Batches applied to a fresh model before workers other than worker 0 begin: two large batches at once are
too much for an untrained model."""

_FAR = 2**40  # the clock of a worker that nobody waits for


class DenseMirror:
    """A worker's copies of the dense parameters. Thread-safe; one receiver.

    receiver:  buffer = mirror.spare() ... fill ... mirror.publish(buffer)
    trainer:   with mirror.lend() as params: ...          the newest published, unchanged while lent

    Training threads never wait for a transfer, and never see half of one.
    """

    def __init__(self, num_params: int) -> None:
        self._num_params = num_params
        self._lock = threading.Lock()
        self._lent: dict[int, int] = {}
        self._buffers = [np.zeros(num_params, np.float32)]
        self._current = 0

    def spare(self) -> int:
        """Returns the number of a buffer that is not lent."""
        with self._lock:
            for number in range(len(self._buffers)):
                if number != self._current and not self._lent.get(number):
                    return number
            # At most one more than there are training threads.
            self._buffers.append(np.zeros(self._num_params, np.float32))
            return len(self._buffers) - 1

    def buffer(self, number: int) -> Values:
        """Returns a buffer by its number."""
        return self._buffers[number]

    def publish(self, number: int) -> None:
        """Makes a filled buffer the one to lend."""
        with self._lock:
            self._current = number

    @contextmanager
    def lend(self) -> Iterator[Values]:
        """Lends the newest parameters."""
        with self._lock:
            number = self._current
            self._lent[number] = self._lent.get(number, 0) + 1
        try:
            yield self._buffers[number]
        finally:
            with self._lock:
                self._lent[number] -= 1


class AsyncCommunicator(Communicator):
    """The worker's side of asynchronous training. Thread-safe."""

    is_overlapped = True

    def __init__(
        self,
        store: Parameters,  # destination of gradients
        *,
        member: Member,  # this process, in its worker's place
        num_params: int,  # length of the dense block
        max_merge_var_num: int,  # batches to merge before a sparse push
        max_merge_dense_num: int,  # batches to merge before a dense push
        send_queue_size: int,  # batches in the queue at which `push` blocks
        max_delay_ms: float,  # longest that a gradient waits to be merged
        stall_limit_s: float = 600.0,  # longest that `push` and `flush` wait for the sender
        # clocks on which workers other than 0 wait for the first batches; None: no waiting
        clocks: Coordination | None = None,
    ) -> None:
        super().__init__(member)
        self._store = store
        self._worker = member.worker
        self._start_clocks = clocks
        self._has_begun = False
        self._num_params = num_params
        self._mirror = DenseMirror(num_params)
        self._merges = (max_merge_var_num, max_merge_dense_num)
        self._merger = GradientMerger(
            sparse_batches=1, dense_batches=1, max_delay_s=max_delay_ms / 1000
        )
        self._queue_size = max(send_queue_size, max_merge_var_num)
        self._is_flushing = False
        self._applied: Version = 0  # as of the newest rows used
        self._in_flight: SimpleQueue[tuple[MergedPush, Future[Version]] | None] = SimpleQueue()
        self._outstanding = 0
        self._background = Background(
            stall_limit_s=stall_limit_s, stalled="servers did not take the waiting gradients"
        )
        self._changed = self._background.changed
        self._receive()
        self._background.start("sender", self._send_forever)
        self._background.start("receiver", self._receive_forever)

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Requests embeddings as they are now; in step, as they are when the result is requested."""
        if self._applied < BATCHES_IN_STEP:
            return Shared(lambda: self._pull_in_step(keys))
        return self._store.pull_sparse(keys, missing=Missing.INITIAL)

    def _pull_in_step(self, keys: Mapping[str, Keys]) -> Pulled:
        """Pulls once no push is in flight or ready."""
        with self._changed:
            self._background.wait_until(lambda: not self._outstanding and not self._merger.is_full)
        self._keep_order()
        return self._store.pull_sparse(keys, missing=Missing.INITIAL).result()

    def _keep_order(self) -> None:
        """Worker 0 starts the others once it has trained the first batches."""
        if self._start_clocks is None or self._has_begun:
            return
        is_early = self._applied < FIRST_BATCHES
        if self._worker == 0:
            if is_early:
                return
            self._start_clocks.advance(0, _FAR, at_least=0).result()
        elif is_early:
            logger.info("waiting for worker 0 to train the first batches num=%d", FIRST_BATCHES)
            try:
                self._start_clocks.advance(self._worker, _FAR, at_least=1).result()
            except WaitTimeoutError as error:
                logger.warning("training before worker 0 has trained the first batches: %s", error)
        self._has_begun = True

    def let_others_begin(self) -> None:
        if self._worker == 0 and self._start_clocks is not None and not self._has_begun:
            self._start_clocks.advance(0, _FAR, at_least=0).result()
            self._has_begun = True

    def params(self) -> AbstractContextManager[Values]:
        return self._mirror.lend()

    def push(self, step: StepPush) -> None:
        """Queues the gradients of a step; blocks only while the queue is full."""
        with self._changed:
            self._background.wait_until(lambda: self._merger.pending_batches < self._queue_size)
            self._applied = max(self._applied, step.pulled)
            merger = self._merger
            merges = merger.sparse_batches, merger.dense_batches
            if self._applied >= BATCHES_IN_STEP and merges != self._merges:
                merger.sparse_batches, merger.dense_batches = self._merges
                self._changed.notify_all()  # waits for a full group may be over
            is_first = merger.due() is None
            merger.add(
                step.gradients,
                step.examples,
                time.monotonic(),
                pulled=step.pulled,
                numbers=step.numbers,
            )
            # Otherwise the sender has its time, and a needless wake-up costs other threads their turn.
            if is_first or merger.is_full:
                self._changed.notify_all()

    def flush(self) -> None:
        """Sends the queue, and returns when all of it is applied."""
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            self._background.wait_until(
                lambda: self._merger.due() is None and not self._outstanding
            )
            self._is_flushing = False

    def rejoin(self, version: Version) -> None:
        """Reads dense parameters again: other workers, or a checkpoint, may have changed them."""
        self._applied = max(self._applied, version)
        self._has_begun = False  # a barrier sets all clocks to 0
        if self._worker and self._start_clocks is not None:  # others wait only for worker 0
            self._start_clocks.advance(self._worker, _FAR, at_least=0).result()
        if self._applied >= FIRST_BATCHES:
            self._keep_order()
        self._receive()

    def close(self) -> None:
        """Stops both threads; queued gradients are dropped, and waiting threads get an error."""
        self._in_flight.put(None)
        self._background.close()

    def _next_push(self) -> MergedPush | None:
        """Waits for gradients to send, and for room on the way; None once closed."""
        with self._changed:
            while not self._background.is_closed:
                now = time.monotonic()
                if self._outstanding < MAX_IN_FLIGHT:
                    push = self._merger.take(now, everything=self._is_flushing)
                    if push is not None:
                        self._outstanding += 1
                        self._changed.notify_all()
                        return push
                    due = self._merger.due()
                    self._changed.wait(None if due is None else max(0.0, due - now))
                else:
                    self._changed.wait()
            return None

    def _send_forever(self) -> None:
        while (push := self._next_push()) is not None:
            push_id = self.push_ids.next(
                examples=push.examples,
                batches=push.batches,
                pulled=push.pulled,
                whole=push.whole,
            )
            answer = self._store.push_grad(push.gradients(), push_id)
            with self._changed:
                self._merger.give_back(push)
            self._in_flight.put((push, answer))

    def _receive_forever(self) -> None:
        while (sent := self._in_flight.get()) is not None and not self._background.is_closed:
            push, answer = sent
            answer.result()
            self._acknowledge(push)
            if push.dense:
                self._receive()
            with self._changed:
                self._outstanding -= 1
                self._changed.notify_all()

    def _acknowledge(self, push: MergedPush) -> None:
        """Called in order for each push that every server has applied; a hook for subclasses."""

    def _receive(self) -> None:
        if not self._num_params:
            return
        number = self._mirror.spare()
        self._store.pull_dense({DENSE_BLOCK: self._mirror.buffer(number)}).result()
        self._mirror.publish(number)


class BoundedStalenessCommunicator(AsyncCommunicator):
    """Asynchronous training in which no worker runs far ahead of the slowest. Thread-safe.

    step c may begin  <=>  every worker that trains has finished at least c - max_staleness steps

    A step is a batch; it is finished when every server has acknowledged all of its gradients. So step c reads
    rows and dense parameters with all gradients of steps before c - max_staleness, and `max_staleness = 0` is
    a barrier before each step. Workers that are done, or wait in a barrier, delay no other.

    The stale synchronous parallel model of Ho et al., "More effective distributed ML via a stale synchronous
    parallel parameter server", NIPS 2013.
    """

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
