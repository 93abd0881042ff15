"""Half-asynchronous training: threads in step, workers each at their own pace."""

import math

import numpy as np

from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators.communicator import Communicator
from ctr_ps.ps_worker.communicators.direct import DirectCommunicator
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.step_loop import StepLoop
from tests.support.stores import member
from tests.support.training import job, random_batches, small_model, together

NUM_PARAMS = small_model().num_params
JOB = job("async", "optimizer.sparse=adagrad", "optimizer.dense=adam")
BATCHES = random_batches(30, 16, seed=4)


def new_store(num_workers: int = 1) -> ParameterStore:
    store = ParameterStore(num_workers=num_workers)
    declare(store, specs_of(small_model(), JOB))
    return store


def train(
    communicator: Communicator, batches=BATCHES, thread_num: int = 1, batch_size: int = 16
) -> None:
    StepLoop(
        small_model(),
        communicator,
        batch_size=batch_size,
        thread_num=thread_num,
        progress=Progress(every_s=math.inf),
    ).train(batches)


def test_one_worker_with_one_thread_learns_what_in_process_training_learns() -> None:
    cluster, in_process = new_store(), new_store()

    train(HalfAsyncCommunicator(cluster, member=member(), num_params=NUM_PARAMS))
    train(DirectCommunicator(in_process, member=member(), num_params=NUM_PARAMS))

    assert cluster.digest() == in_process.digest()
    assert cluster.status().staleness == in_process.status().staleness
    assert cluster.status().staleness.largest == 0


def test_two_threads_learn_what_one_learns_with_a_double_batch() -> None:
    threads, double = new_store(), new_store()

    train(HalfAsyncCommunicator(threads, member=member(), num_params=NUM_PARAMS), thread_num=2)
    batches = [joined(BATCHES[i : i + 2]) for i in range(0, len(BATCHES), 2)]
    train(
        HalfAsyncCommunicator(double, member=member(), num_params=NUM_PARAMS),
        batches,
        batch_size=32,
    )

    np.testing.assert_allclose(dense_of(threads), dense_of(double), rtol=2e-3, atol=2e-5)
    assert threads.status().examples == double.status().examples


def test_gradients_of_workers_are_stale_by_each_others_steps() -> None:
    store = new_store(num_workers=2)
    slow = HalfAsyncCommunicator(store, member=member(), num_params=NUM_PARAMS)
    pull = slow.pull

    def overtaken(keys):
        answer = pull(keys)
        train(HalfAsyncCommunicator(store, member=member(1), num_params=NUM_PARAMS), BATCHES[:5])
        return answer

    slow.pull = overtaken
    train(slow, BATCHES[:1])

    assert store.status().staleness.largest == 5


def test_step_reads_what_other_workers_did_since_the_last_step() -> None:
    store = new_store(num_workers=2)
    communicator = HalfAsyncCommunicator(store, member=member(), num_params=NUM_PARAMS)
    train(communicator, BATCHES[:1])
    train(HalfAsyncCommunicator(store, member=member(1), num_params=NUM_PARAMS), BATCHES[1:2])

    with communicator.params() as params:
        np.testing.assert_array_equal(params, dense_of(store))


def test_threads_read_one_state_of_the_dense_parameters() -> None:
    store = new_store()
    communicator = HalfAsyncCommunicator(store, member=member(), num_params=NUM_PARAMS)
    seen: list[bytes] = []

    def read() -> None:
        with communicator.params() as params:
            seen.append(params.tobytes())

    together(read, read)

    assert len(set(seen)) == 1


def dense_of(store: ParameterStore) -> np.ndarray:
    params = np.empty(NUM_PARAMS, np.float32)
    store.pull_dense({"dense": params}).result()
    return params
