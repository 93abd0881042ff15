"""The step loop: takes the batches of one process through the model, with the parameters of a store.

one thread:                 one step after the other, in the caller's thread
threads, lockstep modes:    T batches -> T threads -> one sum, in thread order -> one push -> next T batches
threads, other modes:       each thread takes the next batch as soon as it is done with its last

a step: unique keys -> pull -> forward, backward -> non_finite.py -> clipping.py -> push
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Self, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.checks import errors_with_shapes, require_result
from ctr_ps.ctr_model.models.model import Model, StepResult, number_batch
from ctr_ps.protos.errors import DataError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values, sum_gradients
from ctr_ps.protos.store import Future, Pulled, Version
from ctr_ps.ps_worker.communicators.communicator import Communicator, StepPush
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.data.blocks import Batches
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.training.clipping import clip
from ctr_ps.ps_worker.training.lookups import BatchKeys, keys_of_batch
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Numbered = tuple[Batch, int]

_LEAVE_LIMIT_S = 5.0  # for a thread that still reads a batch when training fails


@dataclass(frozen=True, slots=True)
class _Read:
    """A batch, its number, and its lookup keys."""

    batch: Batch
    number: int
    keys: BatchKeys


@dataclass(frozen=True, slots=True)
class _Step(_Read):
    rows: Future[Pulled]


@dataclass(frozen=True, slots=True)
class _Computed:
    """Gradients and predictions of a batch, and the version of the rows that it read.

    A skipped batch has empty gradients and no examples. `weight` is the sum of weights; None: 1 each.
    """

    gradients: Gradients
    examples: int
    weight: float | None
    result: StepResult
    pulled: Version
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Result of one training step; the batch was predicted before it was trained on."""

    step: int  # number of the step in this call, from 1
    examples: int  # B
    # weighted mean over the examples, 0 if all weights are 0; possibly infinite or nan for a
    # skipped batch
    loss: float
    probabilities: Values  # float32[B], of a click; a view, valid until the next step


class _Thread:
    """Memory of one training thread: the model's workspace and the dense gradient."""

    def __init__(self, model: Model, batch_size: int, counting_tables: Collection[str]) -> None:
        self._model = model
        self._counting_tables = counting_tables
        self._workspace = model.workspace(batch_size)
        self._dense_grad = np.empty(model.num_params, np.float32)

    def compute(self, step: _Step, pulled: Pulled, communicator: Communicator) -> _Computed:
        """Returns the gradients of a batch, summed over its examples, and the model's other results.

        The next call overwrites the dense gradient and the probabilities.
        """
        if step.batch.labels is None:
            raise DataError(
                "training data has rows without labels: only evaluation and inference allow that"
            )
        if not step.batch.size:  # of a stream that has no row now, while others take a step
            nothing = StepResult(loss=0.0, probabilities=np.empty(0, np.float32))
            return _Computed(Gradients(), 0, None, nothing, pulled.version)
        grads = {name: np.empty_like(values) for name, values in pulled.rows.items()}
        lookups = step.keys.lookups(pulled.rows)
        if step.batch.size > self._workspace.max_batch_size:
            self._workspace = self._model.workspace(step.batch.size)
        number_batch(self._workspace, step.number)
        # non_finite.py reports numbers that are not finite, with batch and table, instead of numpy.
        with (
            communicator.params() as params,
            np.errstate(all="ignore"),
            errors_with_shapes(self._model, "gradient", step.batch, lookups),
        ):
            result = self._model.gradient(
                params, step.batch, lookups, self._workspace, self._dense_grad, grads
            )
        require_result(result, step.batch)
        weight = step.batch.weight
        if not weight:  # without weight there is nothing to learn, or to divide by
            return _Computed(Gradients(), step.batch.size, 0.0, result, pulled.version)
        counts = step.keys.counts(step.batch.labels, self._counting_tables)
        gradients = Gradients(
            sparse={
                name: SparseGrad(step.keys.unique[name], grad, weight, counts.get(name))
                for name, grad in grads.items()
            },
            dense={DENSE_BLOCK: DenseGrad(self._dense_grad, weight)}
            if self._dense_grad.size
            else {},
        )
        has_weights = step.batch.weights is not None
        return _Computed(
            gradients,
            step.batch.size,
            weight if has_weights else None,
            result,
            pulled.version,
        )


class StepLoop:
    """Trains one model on the batches of one process, with `thread_num` threads."""

    def __init__(
        self,
        model: Model,
        communicator: Communicator,  # sends gradients and receives parameters
        *,
        # size of most batches; a larger one costs a thread more memory from then on
        batch_size: int,
        thread_num: int = 1,
        progress: Progress,  # counts steps and examples
        counting_tables: Collection[str] = (),  # tables whose shows and clicks are counted by key
        # decides about batches that are not finite; None: they are errors
        non_finite: NonFiniteBatches | None = None,
        clip_norm: float = 0.0,  # largest norm of a batch's mean gradient; 0: any
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._progress = progress
        self._times = progress.times
        self._non_finite = non_finite or NonFiniteBatches()
        self._clip_norm = clip_norm
        self._after_step: Callable[[], None] = lambda: None
        self._threads = [_Thread(model, batch_size, counting_tables) for _ in range(thread_num)]

    def train(
        self,
        batches: Batches,  # in training order
        after_step: Callable[[], None] | None = None,  # called by a thread between two of its steps
        # whether to stop reading; a batch already read is still trained
        is_told_to_end: Callable[[], bool] | None = None,
    ) -> None:
        """Trains on each batch once, and returns when the store has all gradients.

        Positions travel with the gradients, so that a checkpoint records the position in the data.

        Raises:
            CtrPsError: The first error of any thread; the others stop.
        """
        self._after_step = after_step or (lambda: None)
        is_told_to_end = is_told_to_end or (lambda: False)
        self._communicator.begin(len(self._threads))
        # By default BLAS takes one thread per core. They wait for each other by spinning, which takes most of
        # their time where other processes use these cores, or a container has few of them.
        with threadpool_limits(limits=1, user_api="blas"):  # for each training thread
            if len(self._threads) == 1:
                source = self._source(batches, is_told_to_end)
                for _ in self._run(self._threads[0], source, reads_ahead=self._reads_ahead):
                    pass
            elif self._communicator.is_lockstep:
                # Not by the source: a step must have as many batches as in an undisturbed run.
                self._train_lockstep(self._source(batches), is_told_to_end)
            else:
                self._train_free(self._source(batches, is_told_to_end))
            self._communicator.flush()

    def steps(self, batches: Batches) -> Iterator[TrainedStep]:
        """Trains on each batch once in the caller's thread, and yields after each.

        After the last batch the store has all gradients; a caller that stops earlier calls
        `Communicator.flush`. Unlike `train` it requests nothing ahead: between two steps, no call is in
        flight. Raises CtrPsError for this step, or for an earlier one in the background.
        """
        self._after_step = lambda: None
        self._communicator.begin(thread_num=1)
        with threadpool_limits(limits=1, user_api="blas"):  # for each training thread
            trained = self._run(self._threads[0], self._source(batches), reads_ahead=False)
            for number, (step, result) in enumerate(trained, start=1):
                loss = result.loss / step.batch.weight if step.batch.weight else 0.0
                yield TrainedStep(number, step.batch.size, loss, result.probabilities)
            self._communicator.flush()

    @property
    def _reads_ahead(self) -> bool:
        """Whether the next batch is read before this one is pushed, so that its rows can be requested."""
        return self._communicator.is_overlapped or self._communicator.is_lockstep

    def _source(
        self, batches: Batches, is_told_to_end: Callable[[], bool] | None = None
    ) -> "_NumberedBatches":
        return _NumberedBatches(
            batches, self._communicator.push_ids, is_told_to_end or (lambda: False)
        )

    def _with_keys(self, batch: Batch, number: int) -> _Read:
        start = time.perf_counter()
        read = _Read(batch, number, keys_of_batch(batch, self._model.tables))
        self._times.add("pull", time.perf_counter() - start)
        return read

    def _asked(self, read: _Read) -> _Step:
        start = time.perf_counter()
        rows = self._communicator.pull(read.keys.unique)
        self._times.add("pull", time.perf_counter() - start)
        return _Step(read.batch, read.number, read.keys, rows)

    def _compute(self, thread: _Thread, step: _Step) -> _Computed:
        """Returns the results of a batch, with empty gradients if it is skipped.

        So a worker takes part in each step, and its batches stay numbered without gaps.
        """
        start = time.perf_counter()
        pulled = step.rows.result()
        has_rows = time.perf_counter()
        self._times.add("pull", has_rows - start)
        computed = thread.compute(step, pulled, self._communicator)
        self._times.add("compute", time.perf_counter() - has_rows)
        if self._non_finite.is_skipped(computed.gradients, computed.result.loss, step.number):
            weight = None if computed.weight is None else 0.0
            return replace(
                computed, gradients=Gradients(), examples=0, weight=weight, is_skipped=True
            )
        if self._clip_norm:
            clip(computed.gradients, self._clip_norm)
        return computed

    def _train_lockstep(
        self, source: "_NumberedBatches", is_told_to_end: Callable[[], bool]
    ) -> None:
        def compute(thread: _Thread, numbered: _Numbered) -> _Computed:
            return self._compute(thread, self._asked(self._with_keys(*numbered)))

        with _pool(len(self._threads)) as pool:
            while not is_told_to_end():
                start = time.perf_counter()
                group = list(itertools.islice(source, len(self._threads)))
                self._times.add("read", time.perf_counter() - start)
                if not group:
                    break
                threads = self._threads[: len(group)]
                computed = _results(
                    [pool.submit(compute, *each) for each in zip(threads, group, strict=True)]
                )
                start = time.perf_counter()
                push = StepPush(
                    sum_gradients([part.gradients for part in computed]),
                    sum(part.examples for part in computed),
                    min(part.pulled for part in computed),
                    [number for _, number in group],
                    _weight_of(computed),
                )
                self._communicator.push(push)
                self._times.add("push", time.perf_counter() - start)
                for (batch, _), part in zip(group, computed, strict=True):
                    self._count(batch, part)
                self._after_step()

    def _train_free(self, source: "_NumberedBatches") -> None:
        def run(thread: _Thread) -> None:
            try:
                for _ in self._run(thread, source, reads_ahead=self._reads_ahead):
                    pass
            except BaseException:
                source.stop()
                raise

        with _pool(len(self._threads)) as pool:
            try:
                _results([pool.submit(run, thread) for thread in self._threads])
            except BaseException:  # a signal's, too: it reaches this thread alone
                source.stop()
                source.wait_until_left(_LEAVE_LIMIT_S)
                raise

    def _run(
        self, thread: _Thread, source: "_NumberedBatches", *, reads_ahead: bool
    ) -> Iterator[tuple[_Step, StepResult]]:
        """Trains on batches until there are no more, in the caller's thread.

        With `reads_ahead` the next batch is read before this one is computed, so that its rows are requested
        before this push if the communicator can, otherwise with it.
        """
        is_overlapped = reads_ahead and self._communicator.is_overlapped
        read = self._next(source)
        step = None if read is None else self._asked(read)
        while step is not None:
            ahead, failure = None, None
            if reads_ahead:
                try:
                    ahead = self._next(source)
                except Exception as error:  # once this batch is trained: its number is taken
                    failure = error
            if is_overlapped and ahead is not None:
                ahead = self._asked(ahead)
            computed = self._compute(thread, step)
            start = time.perf_counter()
            push = StepPush(
                computed.gradients,
                computed.examples,
                computed.pulled,
                [step.number],
                computed.weight,
                None if ahead is None else ahead.keys.unique,
            )
            self._communicator.push(push)
            self._times.add("push", time.perf_counter() - start)
            self._count(step.batch, computed)
            self._after_step()
            yield step, computed.result
            if failure is not None:
                raise failure
            if not reads_ahead:
                ahead = self._next(source)
            step = ahead if ahead is None or isinstance(ahead, _Step) else self._asked(ahead)

    def _next(self, source: "_NumberedBatches") -> _Read | None:
        start = time.perf_counter()
        numbered = next(source, None)
        self._times.add("read", time.perf_counter() - start)
        return None if numbered is None else self._with_keys(*numbered)

    def _count(self, batch: Batch, computed: _Computed) -> None:
        if computed.is_skipped:
            self._progress.skip()
        elif batch.labels is not None and batch.size:
            result = computed.result
            self._progress.add(batch.labels, result.probabilities, result.loss, batch.weights)
            self._progress.on_batch(batch, result.probabilities)


def _weight_of(computed: Sequence[_Computed]) -> float | None:
    """Returns the sum of the weights of several batches; None if all are unweighted."""
    if all(each.weight is None for each in computed):
        return None
    return sum(each.examples if each.weight is None else each.weight for each in computed)


@contextmanager
def _pool(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Lends threads, and waits for them unless training ends with an error.

    A thread may then be waiting for other workers in a call, which ends when the store is closed.
    """
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _results(runs: Sequence[futures.Future[T]]) -> list[T]:
    """Returns the results, or raises the first error without waiting for the other runs."""
    # Not `as_completed`, which goes by addresses: a simulated run has to be the same again.
    ended: SimpleQueue[futures.Future[T]] = SimpleQueue()
    for run in runs:
        run.add_done_callback(ended.put)
    for _ in runs:
        ended.get().result()
    return [run.result() for run in runs]


class _NumberedBatches:
    """Batches shared by several threads, numbered in order; any thread can stop them."""

    def __init__(
        self, batches: Batches, push_ids: PushIds, is_told_to_end: Callable[[], bool]
    ) -> None:
        self._batches = iter(batches)
        self._push_ids = push_ids
        self._is_told_to_end = is_told_to_end
        self._lock = threading.Lock()
        self._is_stopped = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Numbered:
        with self._lock:
            if self._is_stopped or self._is_told_to_end():
                raise StopIteration
            batch = next(self._batches)
            if isinstance(batch, Batch):
                return batch, self._push_ids.take(None)
            batch, position = batch
            return batch, self._push_ids.take(position)

    def stop(self) -> None:
        # Without the lock, which busy threads may keep from this one for long.
        self._is_stopped = True

    def wait_until_left(self, limit_s: float) -> None:
        """After `stop`, waits until no thread is in the iterator: only then can it be closed."""
        if self._lock.acquire(timeout=limit_s):
            self._lock.release()
        else:
            logger.warning("a thread still waits for its next batch: limit_s=%g", limit_s)
