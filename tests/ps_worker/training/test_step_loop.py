"""How training ends when something goes wrong: whatever the threads are doing, at once."""

import contextlib
import itertools
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError, GradientError, ProtocolError, TransportError
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Future, Pulled
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators.asynchronous import AsyncCommunicator
from ctr_ps.ps_worker.communicators.communicator import DirectCommunicator
from ctr_ps.ps_worker.communicators.lockstep import SyncCommunicator
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.step_loop import StepLoop
from tests.support.stores import member
from tests.support.training import job, random_batches, small_model

WAIT_S = 10.0
MOST_BATCHES = 10_000
BATCH = random_batches(1, 4, seed=1)[0]
LOCKSTEP_OR_NOT = pytest.mark.parametrize("communicator", [SyncCommunicator, DirectCommunicator])


class Interrupted(BaseException):
    """What a signal's handler raises."""


OF_MEMBER = {"member": member(), "num_params": small_model().num_params}


def declared() -> ParameterStore:
    store = ParameterStore()
    settings = job("sync", "optimizer.dense={name='sgd', learning_rate=0.1}")
    declare(store, specs_of(small_model(), settings))
    return store


@pytest.fixture
def store() -> ParameterStore:
    return declared()


def sending_each(number: int, store: ParameterStore, max_delay_ms: float) -> AsyncCommunicator:
    """Returns a communicator that sends when so many batches are merged."""
    merges = dict.fromkeys(["max_merge_var_num", "max_merge_dense_num", "send_queue_size"], number)
    return AsyncCommunicator(store, **OF_MEMBER, **merges, max_delay_ms=max_delay_ms)


def loop_of(communicator, thread_num: int = 2) -> StepLoop:
    return StepLoop(
        small_model(),
        communicator,
        batch_size=BATCH.size,
        thread_num=thread_num,
        progress=Progress(every_s=math.inf),
    )


class Interrupting:
    """Batches far beyond what a test has time for; a signal comes with the tenth."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.taken += 1
        if self.taken == 10:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        if self.taken > MOST_BATCHES:
            raise StopIteration
        return BATCH


@pytest.fixture
def interruptible() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, previous)


@LOCKSTEP_OR_NOT
@pytest.mark.parametrize("thread_num", [1, 2])
def test_signal_ends_training_before_the_data_do(store, communicator, thread_num, interruptible):
    worker = communicator(store, **OF_MEMBER)
    batches = Interrupting()

    with pytest.raises(Interrupted):
        loop_of(worker, thread_num).train(batches)

    assert batches.taken < MOST_BATCHES


@LOCKSTEP_OR_NOT
def test_error_of_one_thread_does_not_wait_for_a_call_of_another(store, communicator):
    failing = FailingSecondPull(store)
    worker = communicator(failing, **OF_MEMBER)
    try:
        with pytest.raises(TransportError, match="gone"):
            loop_of(worker).train([BATCH] * 4)

        assert not failing.was_answered.is_set()
    finally:
        failing.may_answer.set()


def test_batches_can_be_closed_after_an_error_while_another_thread_takes_one(store):
    """Else closing them fails, and hides the error."""

    def batches() -> Iterator[Batch]:
        yield replace(BATCH, labels=None)
        threading.Event().wait(0.2)  # the file is slow
        yield BATCH

    worker = DirectCommunicator(store, **OF_MEMBER)

    with (
        pytest.raises(DataError, match="rows without labels"),
        contextlib.closing(batches()) as taken,
    ):
        loop_of(worker).train(taken)


def test_push_says_how_many_batches_the_threads_took(store):
    """Three batches on two threads: a step of two, and a step of one."""
    push_ids = []

    def push_grad(gradients, push_id, *, at=None, push=store.push_grad):
        push_ids.append(push_id)
        return push(gradients, push_id, at=at)

    store.push_grad = push_grad  # type: ignore[method-assign]
    worker = SyncCommunicator(store, **OF_MEMBER)

    loop_of(worker).train([BATCH] * 3)

    assert [(push_id.batches, push_id.pulled) for push_id in push_ids] == [(2, 0), (1, 1)]


@LOCKSTEP_OR_NOT
@pytest.mark.parametrize("thread_num", [1, 2])
def test_worker_that_is_told_to_end_ends_after_a_whole_step(store, communicator, thread_num):
    """Another process goes on with the next batch, and its steps are those of an undisturbed run."""
    worker = communicator(store, **OF_MEMBER)
    taken = 0

    def batches() -> Iterator[Batch]:
        nonlocal taken
        while taken < MOST_BATCHES:
            taken += 1
            yield BATCH

    loop_of(worker, thread_num).train(batches(), is_told_to_end=lambda: taken >= 3)

    is_group = communicator is SyncCommunicator and thread_num == 2
    assert taken == (4 if is_group else 3)
    assert store.status().examples == {0: taken * BATCH.size}


@LOCKSTEP_OR_NOT
def test_batch_is_trained_though_the_one_after_it_cannot_be_read(store, communicator):
    """Its number is taken: without it, the worker's progress would never go on.

    One thread: of several, who fails does not wait for the others' batches.
    """
    worker = communicator(store, **OF_MEMBER)

    def batches() -> Iterator[Batch]:
        yield from [BATCH] * 2
        raise DataError("a bad row")

    with pytest.raises(DataError, match="a bad row"):
        loop_of(worker, thread_num=1).train(batches())
    assert store.status().progress[0].step == 2

    loop_of(worker, thread_num=1).train([BATCH] * 3)

    assert store.status().progress[0].step == 5


def test_gradient_that_is_not_finite_is_not_counted_as_trained(store):
    store.pull_dense = spoiled(store.pull_dense)  # type: ignore[method-assign]
    worker = DirectCommunicator(store, **OF_MEMBER)
    progress = Progress(every_s=math.inf)
    loop = StepLoop(small_model(), worker, batch_size=BATCH.size, progress=progress)

    with pytest.raises(GradientError, match=r"batch 1: .* lower the"), np.errstate(all="ignore"):
        loop.train([BATCH])

    assert progress.examples == 0


def test_push_to_a_closed_communicator_does_not_wait_for_its_sender(store):
    communicator = sending_each(1, store, max_delay_ms=1)
    communicator.close()

    with pytest.raises(ProtocolError, match="closed"):
        loop_of(communicator, thread_num=1).train([BATCH])


def spoiled(pull_dense):
    """Returns `pull_dense`, but what it reads is not a number."""

    def pull(into, *, at=None):
        answer = pull_dense(into, at=at)
        for vector in into.values():
            vector[:] = np.nan
        return answer

    return pull


class FailingSecondPull:
    """A store of which the first pull is not answered before the second has failed."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._pulls = itertools.count()
        self.may_answer, self.was_answered = threading.Event(), threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def pull_sparse(self, keys: Mapping[str, Keys], **named) -> Future[Pulled]:
        pull = next(self._pulls)
        if pull == 1:
            raise TransportError("the server is gone")
        if pull == 0:
            self.may_answer.wait(WAIT_S)
            self.was_answered.set()
        return self._store.pull_sparse(keys, **named)


def test_steps_train_one_batch_at_a_time(store: ParameterStore) -> None:
    loop = loop_of(DirectCommunicator(store, **OF_MEMBER))

    steps = loop.steps(iter([BATCH, BATCH]))

    first = next(steps)
    assert (first.step, first.examples) == (1, BATCH.size)
    assert first.probabilities.shape == (BATCH.size,)
    clipped = np.where(BATCH.labels == 1, first.probabilities, 1 - first.probabilities)
    assert first.loss == pytest.approx(-np.log(clipped).mean(), rel=1e-4)
    assert store.status().examples == {0: BATCH.size}

    assert [step.step for step in steps] == [2]
    assert store.status().examples == {0: 2 * BATCH.size}


def test_steps_and_train_learn_the_same() -> None:
    digests = []
    for run in ("steps", "train"):
        store = declared()
        communicator = SyncCommunicator(store, **OF_MEMBER)
        batches = random_batches(5, 4, seed=2)
        if run == "steps":
            list(loop_of(communicator).steps(batches))
        else:
            loop_of(communicator, thread_num=1).train(batches)
        digests.append(store.digest())

    assert digests[0] == digests[1]


@pytest.mark.usefixtures("past_the_first_steps")
def test_steps_that_are_left_early_lose_nothing(store: ParameterStore) -> None:
    communicator = sending_each(10, store, max_delay_ms=1e6)
    for step in loop_of(communicator).steps(itertools.repeat(BATCH)):
        if step.step == 3:
            break

    communicator.flush()
    communicator.close()

    assert store.status().examples == {0: 3 * BATCH.size}
