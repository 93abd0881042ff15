"""Training in lockstep, worker side, on a store in the same process: in common steps, or each on its own."""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import GradientError, ProtocolError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values
from ctr_ps.protos.store import Future, Missing, PushId, Store, Version
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators.communicator import Communicator, DirectCommunicator, StepPush
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator, SyncCommunicator
from ctr_ps.ps_worker.data.blocks import joined as joined_batches
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, declare, specs_of
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.step_loop import StepLoop
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.stores import INCARNATION, joined, member
from tests.support.training import job, random_batches, small_model, together

NUM_PARAMS = small_model().num_params
S = TypeVar("S", bound=Store)
KEYS = {"embedding": np.arange(3, dtype=np.uint64)}
EXAMPLES = 10
BATCHES = random_batches(30, 16, seed=4)


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

    first.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))
    waiting = first.pull(KEYS)
    assert not waiting.done()
    second.push(StepPush(gradient(3.0), EXAMPLES, pulled=0))

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

    communicator.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))
    read(communicator)

    assert store.num_dense_reads == 2


def test_worker_that_waited_in_a_barrier_goes_on_at_its_version() -> None:
    store = declared(ParameterStore(num_workers=2))
    first, second = on(store, worker=0), on(store, worker=1)
    came_first = store.barrier("pass", 1, step=second.version)
    for _ in range(2):
        first.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))
    store.barrier("pass", 0, step=first.version).result()

    second.rejoin(came_first.result())
    assert second.version == 2
    for communicator in (first, second):
        communicator.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))

    assert store.status().version == 3
    assert read(second).tobytes() == read(first).tobytes()


def test_step_that_is_not_the_next_is_refused_and_not_counted() -> None:
    (communicator,) = workers(1)
    communicator.rejoin(5)

    with pytest.raises(ProtocolError, match="pushed step 5, expected 0"):
        communicator.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))

    assert communicator.version == 5


def test_non_finite_gradient_takes_no_step() -> None:
    store = declared(ParameterStore())
    communicator = on(store, worker=0)

    with pytest.raises(GradientError, match="not finite"):
        communicator.push(StepPush(gradient(np.inf), EXAMPLES, pulled=0))

    assert communicator.version == store.status().version == 0
    communicator.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))
    assert communicator.version == store.status().version == 1


def test_next_rows_come_with_the_push_and_the_parameters_with_them() -> None:
    first, second = workers(2)
    plain, other = workers(2)
    for worker in (first, second, plain, other):
        worker.pull(KEYS).result()
        read(worker)

    first.push(StepPush(gradient(1.0), EXAMPLES, pulled=0, next_keys=KEYS))
    rows = first.pull(KEYS)
    second.push(StepPush(gradient(3.0), EXAMPLES, pulled=0))
    plain.push(StepPush(gradient(1.0), EXAMPLES, pulled=0))
    other.push(StepPush(gradient(3.0), EXAMPLES, pulled=0))

    expected = plain.pull(KEYS).result()
    assert rows.result().version == expected.version == 1
    np.testing.assert_array_equal(rows.result().rows["embedding"], expected.rows["embedding"])
    np.testing.assert_array_equal(read(first), read(plain))
    assert first.pulled == 1


@pytest.mark.parametrize("between", ["barrier", "other keys"])
def test_rows_that_came_with_a_push_are_not_used_after(between: str) -> None:
    """After a barrier the parameters may be others, as by a load; and nobody else's keys are answered."""
    store = declared(ParameterStore())
    communicator = on(store, worker=0)
    keys = {"embedding": np.arange(3, dtype=np.uint64)}
    communicator.push(StepPush(gradient(1.0), EXAMPLES, pulled=0, next_keys=KEYS))
    communicator.flush()
    if between == "barrier":
        change = PushId(
            worker=0, incarnation=INCARNATION, sequence=1, step=2, examples=1, batches=1, pulled=1
        )
        communicator.rejoin(store.barrier("load", 0, step=1).result())
        store.push_grad(gradient(5.0), change, at=1).result()
        communicator.version, keys = 2, KEYS

    rows, params = communicator.pull(keys).result(), read(communicator)

    np.testing.assert_array_equal(
        rows.rows["embedding"],
        store.pull_sparse(keys, missing=Missing.INITIAL).result().rows["embedding"],
    )
    np.testing.assert_array_equal(params, dense_of(store))


def test_flush_waits_until_a_push_that_pulls_is_acknowledged() -> None:
    communicator, _ = on_two_servers()
    communicator.rejoin(5)
    communicator.push(StepPush(gradient(1.0), EXAMPLES, pulled=0, next_keys=KEYS))

    with pytest.raises(ProtocolError, match="pushed step 5, expected 0"):
        communicator.flush()


def test_step_of_a_cluster_is_one_call_to_each_server() -> None:
    communicator, transport = on_two_servers()
    alone = declared(joined(ParameterStore()))

    train(communicator, BATCHES[:5])
    train(on(alone, worker=0), BATCHES[:5])

    names = [name for server, name, _ in transport.calls if server == 0]
    assert sorted(names[:2]) == ["PullDense", "PullSparse"]
    assert names[2:] == ["PushPull"] * 4 + ["PushGrad"]
    np.testing.assert_array_equal(read(communicator), read(on(alone, worker=0)))


def test_one_worker_with_one_thread_learns_what_in_process_training_learns() -> None:
    cluster, in_process = adaptive_store(), adaptive_store()

    train(half_async(cluster), BATCHES)
    train(DirectCommunicator(in_process, member=member(), num_params=NUM_PARAMS), BATCHES)

    assert cluster.digest() == in_process.digest()
    assert cluster.status().staleness == in_process.status().staleness
    assert cluster.status().staleness.largest == 0


def test_two_threads_learn_what_one_learns_with_a_double_batch() -> None:
    threads, double = adaptive_store(), adaptive_store()

    train(half_async(threads), BATCHES, thread_num=2)
    batches = [joined_batches(BATCHES[i : i + 2]) for i in range(0, len(BATCHES), 2)]
    train(
        half_async(double),
        batches,
        batch_size=32,
    )

    np.testing.assert_allclose(dense_of(threads), dense_of(double), rtol=2e-3, atol=2e-5)
    assert threads.status().examples == double.status().examples


def test_gradients_of_workers_are_stale_by_each_others_steps() -> None:
    store = adaptive_store(num_workers=2)
    slow = half_async(store)
    pull = slow.pull

    def overtaken(keys):
        answer = pull(keys)
        train(half_async(store, worker=1), BATCHES[:5])
        return answer

    slow.pull = overtaken
    train(slow, BATCHES[:1])

    assert store.status().staleness.largest == 5


def test_step_reads_what_other_workers_did_since_the_last_step() -> None:
    store = adaptive_store(num_workers=2)
    communicator = half_async(store)
    train(communicator, BATCHES[:1])
    train(half_async(store, worker=1), BATCHES[1:2])

    np.testing.assert_array_equal(read(communicator), dense_of(store))


def test_threads_read_one_state_of_the_dense_parameters() -> None:
    store = adaptive_store()
    communicator = half_async(store)
    seen: list[bytes] = []

    def read() -> None:
        with communicator.params() as params:
            seen.append(params.tobytes())

    together(read, read)

    assert len(set(seen)) == 1


def half_async(store: Store, *, worker: int = 0) -> HalfAsyncCommunicator:
    return HalfAsyncCommunicator(store, member=member(worker), num_params=NUM_PARAMS)


def adaptive_store(num_workers: int = 1) -> ParameterStore:
    store = ParameterStore(num_workers=num_workers)
    settings = job("async", "optimizer.sparse=adagrad", "optimizer.dense=adam")
    declare(store, specs_of(small_model(), settings))
    return store


def dense_of(store: Store) -> Values:
    params = np.empty(NUM_PARAMS, np.float32)
    store.pull_dense({DENSE_BLOCK: params}).result()
    return params


def train(
    communicator: Communicator, batches: list[Batch], thread_num: int = 1, batch_size: int = 16
) -> None:
    StepLoop(
        small_model(),
        communicator,
        batch_size=batch_size,
        thread_num=thread_num,
        progress=Progress(every_s=math.inf),
    ).train(batches)


def on_two_servers() -> tuple[SyncCommunicator, LocalTransport]:
    """Returns a communicator over two servers, which say at the answer what is wrong with a call."""
    transport = LocalTransport(
        [ParameterStore(server_index=index, num_servers=2) for index in range(2)]
    )
    communicator = on(declared(joined_client(transport)), worker=0)
    transport.calls.clear()
    return communicator, transport


def workers(number: int) -> list[SyncCommunicator]:
    store = declared(ParameterStore(num_workers=number))
    return [on(store, worker=worker) for worker in range(number)]


def declared(store: S) -> S:
    declare(
        store,
        specs_of(
            small_model(),
            job(
                "sync",
                "optimizer.sparse={name='sgd', learning_rate=0.1}",
                "optimizer.dense={name='sgd', learning_rate=0.1}",
            ),
        ),
    )
    return store


def on(store: Store, *, worker: int) -> SyncCommunicator:
    return SyncCommunicator(store, member=member(worker), num_params=NUM_PARAMS)


def read(communicator: HalfAsyncCommunicator) -> Values:
    with communicator.params() as params:
        return params.copy()


def gradient(value: float) -> Gradients:
    rows = np.full((3, 4), value, np.float32)
    return Gradients(
        sparse={"embedding": SparseGrad(KEYS["embedding"], rows, EXAMPLES)},
        dense={DENSE_BLOCK: DenseGrad(np.full(NUM_PARAMS, value, np.float32), EXAMPLES)},
    )
