"""Asynchronous training: no worker waits for another, but for worker 0 at the start of a fresh model.

    training threads --push--> merger --sender thread--> servers
    training threads <--lend-- mirror <--receiver thread-- servers       dense parameters
    training threads <--pull-------------------------- servers           embeddings, a batch ahead

Else nothing blocks training but a full queue. No gradient waits longer than `max_delay_ms` for others to
merge with; dense parameters are fetched after each dense push.

Worker 0 trains the first batches of a fresh model while the others wait. The next ones are trained in step:
each leaves by itself, and a worker reads rows when its own gradients are in them
(docs/decisions/0033-the-first-steps-of-async.md).
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from protos.errors import WaitTimeoutError
from protos.futures import Shared
from protos.gradients import Gradients, Values
from protos.keys import Keys
from protos.store import Coordination, Future, Member, Missing, Parameters, Pulled, Version
from ps_worker.communicators.background import Background
from ps_worker.communicators.dense_mirror import DenseMirror
from ps_worker.communicators.merging import GradientMerger, MergedPush
from ps_worker.communicators.push_ids import UNNUMBERED, PushIds
from ps_worker.job.model import DENSE_BLOCK

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 4
"""Pushes on the way before the sender waits for the oldest to be acknowledged."""

BATCHES_IN_STEP = 1000
"""Batches of all workers, applied since the model was fresh, before a worker merges, and reads rows without
its own last gradients: while Adagrad's sums are small, what was learnt from old rows is too much at once, and
dense parameters whose gradients are merged take too few steps."""

FIRST_BATCHES = 32
"""Batches, applied since the model was fresh, before workers other than worker 0 begin: of large batches, two
at once are too much for a model that knows nothing."""

_FAR = 2**40
"""The clock of a worker for whom nobody waits: it has so many steps behind it."""


class AsyncCommunicator:
    """The worker's side of asynchronous training. Thread-safe."""

    is_lockstep = False
    is_overlapped = True
    version = 0

    def __init__(
        self,
        store: Parameters,
        *,
        member: Member,
        num_params: int,
        max_merge_var_num: int,
        max_merge_dense_num: int,
        send_queue_size: int,
        max_delay_ms: float,
        stall_limit_s: float = 600.0,
        clocks: Coordination | None = None,
    ) -> None:
        """Starts sender and receiver, and reads the dense parameters once.

        Args:
            store: Where gradients go.
            member: This process, in its worker's place.
            num_params: Length of the dense block.
            max_merge_var_num: Batches to merge before a sparse push.
            max_merge_dense_num: Batches to merge before a dense push.
            send_queue_size: Batches waiting to be sent before `push` waits.
            max_delay_ms: Longest that a gradient waits for others to merge with.
            stall_limit_s: Longest that `push` and `flush` wait for the sender.
            clocks: By which others than worker 0 wait for the first batches; None: they do not.
        """
        self._store = store
        self._worker = member.worker
        self._start_clocks = clocks
        self._has_begun = False
        self.push_ids = PushIds(member)
        self._num_params = num_params
        self._mirror = DenseMirror(num_params)
        self._merges = (max_merge_var_num, max_merge_dense_num)
        self._merger = GradientMerger(
            sparse_batches=1, dense_batches=1, max_delay_s=max_delay_ms / 1000
        )
        self._queue_size = max(send_queue_size, max_merge_var_num)
        self._is_flushing = False
        self._applied: Version = 0  # as of the newest rows that gradients were computed from
        self._in_flight: SimpleQueue[tuple[MergedPush, Future[Version]] | None] = SimpleQueue()
        self._outstanding = 0
        self._background = Background(
            stall_limit_s=stall_limit_s, stalled="servers did not take the gradients that wait"
        )
        self._changed = self._background.changed
        self._receive()
        self._background.start("sender", self._send_forever)
        self._background.start("receiver", self._receive_forever)

    def begin(self, thread_num: int) -> None:
        """No-op: any number of threads may train."""

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        """Asks for embeddings as they are now; in step, as they are when the result is asked for."""
        if self._applied < BATCHES_IN_STEP:
            return Shared(lambda: self._pull_in_step(keys))
        return self._store.pull_sparse(keys, missing=Missing.INITIAL)

    def _pull_in_step(self, keys: Mapping[str, Keys]) -> Pulled:
        """Pulls once no push is on its way, and none is ready to be."""
        with self._changed:
            self._background.wait_until(lambda: not self._outstanding and not self._merger.is_full)
        self._keep_order()
        return self._store.pull_sparse(keys, missing=Missing.INITIAL).result()

    def _keep_order(self) -> None:
        """Worker 0 lets the others begin when the first batches are trained, and they wait for that."""
        if self._start_clocks is None or self._has_begun:
            return
        is_early = self._applied < FIRST_BATCHES
        if self._worker == 0:
            if is_early:
                return
            self._start_clocks.advance(0, _FAR, at_least=0).result()
        elif is_early:
            logger.info("waits until worker 0 has trained the first batches num=%d", FIRST_BATCHES)
            try:
                self._start_clocks.advance(self._worker, _FAR, at_least=1).result()
            except WaitTimeoutError as error:
                logger.warning(
                    "trains without waiting for the first batches of worker 0: %s", error
                )
        self._has_begun = True

    @contextmanager
    def params(self) -> Iterator[Values]:
        """Lends the newest parameters received."""
        with self._mirror.lend() as values:
            yield values

    def push(
        self,
        gradients: Gradients,
        examples: int,
        *,
        pulled: Version,
        numbers: Sequence[int] = (UNNUMBERED,),
        weight: float | None = None,
        next_keys: Mapping[str, Keys] | None = None,
    ) -> None:
        """Queues the gradients of a step; waits only while the queue is full."""
        with self._changed:
            self._background.wait_until(lambda: self._merger.pending_batches < self._queue_size)
            self._applied = max(self._applied, pulled)
            if self._applied >= BATCHES_IN_STEP:
                self._merge()
            is_first = self._merger.due() is None
            self._merger.add(gradients, examples, time.monotonic(), pulled=pulled, numbers=numbers)
            # Otherwise the sender knows when it is to send, and a thread that wakes for nothing costs others
            # their turn.
            if is_first or self._merger.is_full:
                self._changed.notify_all()

    def _merge(self) -> None:
        merger = self._merger
        if (merger.sparse_batches, merger.dense_batches) != self._merges:
            merger.sparse_batches, merger.dense_batches = self._merges
            self._changed.notify_all()  # those that wait for what is full may wait no longer

    def flush(self) -> None:
        """Sends what is queued, and returns when all of it has been applied."""
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
        if self._worker and self._start_clocks is not None:  # worker 0 alone is waited for
            self._start_clocks.advance(self._worker, _FAR, at_least=0).result()
        if self._applied >= FIRST_BATCHES:
            self._keep_order()
        self._receive()

    def close(self) -> None:
        """Ends both threads; what is queued is not sent, and waiting threads get an error."""
        self._in_flight.put(None)
        self._background.close()

    def _next_push(self) -> MergedPush | None:
        """Waits for something to send, and for room on the way; None once closed."""
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
        """Called in order for each push that every server has applied; for a mode that counts them."""

    def _receive(self) -> None:
        if not self._num_params:
            return
        number = self._mirror.spare()
        self._store.pull_dense({DENSE_BLOCK: self._mirror.buffer(number)}).result()
        self._mirror.publish(number)
