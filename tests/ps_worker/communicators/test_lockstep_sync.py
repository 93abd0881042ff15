"""Synchronous steps, worker side, on a store in the same process."""

from collections.abc import Mapping

import numpy as np
import pytest

from protos.errors import GradientError, ProtocolError
from protos.gradients import DenseGrad, Gradients, SparseGrad, Values
from protos.store import Future, Version
from ps_server.store import ParameterStore
from ps_worker.communicators.lockstep import SyncCommunicator
from ps_worker.job.model import DENSE_BLOCK
from ps_worker.job.specs import declare
from tests.support.stores import member
from tests.support.training import job, small_model

NUM_PARAMS = small_model().num_params
KEYS = {"embedding": np.arange(3, dtype=np.uint64)}
EXAMPLES = 10


class CountingStore(ParameterStore):
    """A store that counts the reads of dense blocks."""

    num_dense_reads = 0

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        self.num_dense_reads += 1
        return super().pull_dense(into, at=at)


def test_step_is_applied_when_every_worker_has_pushed() -> None:
    first, second = workers(2)
    before, rows = read(first), first.pull(KEYS).result().rows["embedding"]

    first.push(gradient(1.0), EXAMPLES, pulled=0)
    waiting = first.pull(KEYS)
    assert not waiting.done()
    second.push(gradient(3.0), EXAMPLES, pulled=0)

    expected = 0.1 * (1.0 + 3.0) / (2 * EXAMPLES)  # one step of SGD over both workers' examples
    np.testing.assert_allclose(waiting.result().rows["embedding"], rows - expected, rtol=1e-5)
    np.testing.assert_allclose(read(first), before - expected, rtol=1e-5, atol=1e-7)
    assert read(second).tobytes() == read(first).tobytes()
    assert first.version == second.version == 1


def test_parameters_are_read_once_in_each_step() -> None:
    store = declared(CountingStore())
    communicator = on(store, worker=0)
    for _ in range(3):
        read(communicator)
    assert store.num_dense_reads == 1

    communicator.push(gradient(1.0), EXAMPLES, pulled=0)
    read(communicator)

    assert store.num_dense_reads == 2


def test_worker_that_waited_in_a_barrier_goes_on_at_its_version() -> None:
    store = declared(ParameterStore(num_workers=2))
    first, second = on(store, worker=0), on(store, worker=1)
    came_first = store.barrier("pass", 1, step=second.version)
    for _ in range(2):
        first.push(gradient(1.0), EXAMPLES, pulled=0)
    store.barrier("pass", 0, step=first.version).result()

    second.rejoin(came_first.result())
    assert second.version == 2
    for communicator in (first, second):
        communicator.push(gradient(1.0), EXAMPLES, pulled=0)

    assert store.status().version == 3
    assert read(second).tobytes() == read(first).tobytes()


def test_step_that_is_not_the_next_is_refused_and_not_counted() -> None:
    (communicator,) = workers(1)
    communicator.rejoin(5)

    with pytest.raises(ProtocolError, match="pushed step 5, expected 0"):
        communicator.push(gradient(1.0), EXAMPLES, pulled=0)

    assert communicator.version == 5


def test_non_finite_gradient_takes_no_step() -> None:
    store = declared(ParameterStore())
    communicator = on(store, worker=0)

    with pytest.raises(GradientError, match="not finite"):
        communicator.push(gradient(np.inf), EXAMPLES, pulled=0)

    assert communicator.version == store.status().version == 0
    communicator.push(gradient(1.0), EXAMPLES, pulled=0)
    assert communicator.version == store.status().version == 1


def workers(number: int) -> list[SyncCommunicator]:
    store = declared(ParameterStore(num_workers=number))
    return [on(store, worker=worker) for worker in range(number)]


def declared(store: ParameterStore) -> ParameterStore:
    declare(
        store,
        small_model(),
        job(
            "sync",
            "optimizer.sparse={name='sgd', learning_rate=0.1}",
            "optimizer.dense={name='sgd', learning_rate=0.1}",
        ),
    )
    return store


def on(store: ParameterStore, *, worker: int) -> SyncCommunicator:
    return SyncCommunicator(store, member=member(worker), num_params=NUM_PARAMS)


def read(communicator: SyncCommunicator) -> Values:
    with communicator.params() as params:
        return params.copy()


def gradient(value: float) -> Gradients:
    rows = np.full((3, 4), value, np.float32)
    return Gradients(
        sparse={"embedding": SparseGrad(KEYS["embedding"], rows, EXAMPLES)},
        dense={DENSE_BLOCK: DenseGrad(np.full(NUM_PARAMS, value, np.float32), EXAMPLES)},
    )
