"""GEO training: what a worker learns on its own copy, and when the servers hear of it."""

import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import JobError, TransportError, WaitTimeoutError
from ctr_ps.protos.gradients import DenseGrad, Gradients
from ctr_ps.protos.store import Missing, SaveRequest, Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators.communicator import Communicator, DirectCommunicator, StepPush
from ctr_ps.ps_worker.communicators.geo import WARM_UP, GeoCommunicator
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import declare, dense_spec, specs_of, table_specs
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.step_loop import StepLoop
from tests.support.stores import member
from tests.support.training import job, random_batches, small_model

NUM_PARAMS = small_model().num_params
BATCHES = random_batches(30, 16, seed=4)
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.1}",
)
ALL_KEYS = {"embedding": np.unique(np.concatenate([batch.keys for batch in BATCHES]))}


def geo_job(k_steps: int, *overrides: str) -> Job:
    return job("geo", f"strategy.geo.k_steps={k_steps}", *SGD, *overrides)


def new_store(settings: Job, num_workers: int = 1) -> ParameterStore:
    store = ParameterStore(num_workers=num_workers)
    declare(store, specs_of(small_model(), settings))
    return store


def new_geo(
    store: Store,
    settings: Job,
    *,
    worker: int = 0,
    num_workers: int = 1,
    max_replica_bytes: int = 2**30,
    warm_up: int = 0,
    stall_limit_s: float = 10.0,
    batches_before: int = 0,
) -> GeoCommunicator:
    return GeoCommunicator(
        store,
        member=member(worker),
        num_workers=num_workers,
        tables=table_specs(small_model(), settings),
        dense=dense_spec(small_model(), settings),
        k_steps=settings.strategy.geo.k_steps,
        max_replica_bytes=max_replica_bytes,
        warm_up=warm_up,
        stall_limit_s=stall_limit_s,
        batches_before=batches_before,
    )


def train(communicator: Communicator, batches: Sequence[Batch] = BATCHES) -> None:
    try:
        loop_of(communicator).train(batches)
    finally:
        communicator.close()


def loop_of(communicator: Communicator, thread_num: int = 1) -> StepLoop:
    return StepLoop(
        small_model(),
        communicator,
        batch_size=16,
        thread_num=thread_num,
        progress=Progress(every_s=math.inf),
    )


def parameters(store: Store) -> tuple[np.ndarray, np.ndarray]:
    dense = np.empty(NUM_PARAMS, np.float32)
    store.pull_dense({"dense": dense}).result()
    rows = store.pull_sparse(ALL_KEYS, missing=Missing.INITIAL).result().rows
    return dense, rows["embedding"]


@pytest.mark.parametrize("k_steps", [1, 7, 100])
def test_one_worker_with_sgd_learns_what_local_sgd_learns(k_steps: int) -> None:
    settings = geo_job(k_steps)
    servers, local = new_store(settings), new_store(job("async", *SGD))

    train(new_geo(servers, settings))
    train(DirectCommunicator(local, member=member(), num_params=NUM_PARAMS))

    for exchanged, trained in zip(parameters(servers), parameters(local), strict=True):
        np.testing.assert_allclose(exchanged, trained, rtol=1e-4, atol=1e-6)
    assert servers.status().examples == local.status().examples
    assert servers.status().tables["embedding"].rows == local.status().tables["embedding"].rows


def test_exchange_comes_after_every_k_steps_and_at_the_end() -> None:
    settings = geo_job(8)
    store = new_store(settings)
    push_ids = []

    def push_grad(gradients, push_id, *, at=None, push=store.push_grad):
        push_ids.append(push_id)
        return push(gradients, push_id, at=at)

    store.push_grad = push_grad
    train(new_geo(store, settings))

    assert sum(push_id.batches for push_id in push_ids) == len(BATCHES)
    assert sum(push_id.examples for push_id in push_ids) == 16 * len(BATCHES)
    assert all(8 <= push_id.batches <= 16 for push_id in push_ids[:-1])
    assert [push_id.sequence for push_id in push_ids] == list(range(len(push_ids)))


def test_first_exchanges_are_no_later_than_an_eighth_of_the_batches_before() -> None:
    settings = geo_job(4)
    store = new_store(settings)
    sizes = []

    def push_grad(gradients, push_id, *, at=None, push=store.push_grad):
        sizes.append(push_id.batches)
        return push(gradients, push_id, at=at)

    store.push_grad = push_grad
    train(new_geo(store, settings, warm_up=WARM_UP), random_batches(80, 16, seed=5))

    assert sum(sizes) == 80
    for number, size in enumerate(sizes):
        interval = min(4, max(1, sum(sizes[:number]) // 8))
        assert size <= 2 * interval  # training goes on during an exchange
    before = np.cumsum(sizes)
    assert all(sizes[i + 1] >= 4 for i in range(len(sizes) - 2) if before[i] >= 32)


def test_schedule_counts_each_batch_once_over_exchanges() -> None:
    """The rate is halved with each batch, of which 3 are applied before."""
    halved = "optimizer.schedule={kind='step', step_size=1, gamma=0.5}"
    settings = geo_job(100, "optimizer.dense={name='sgd', learning_rate=1.0}", halved)
    store = new_store(settings)
    before, _ = parameters(store)
    geo = new_geo(store, settings, batches_before=3)
    ones = Gradients(dense={"dense": DenseGrad(np.ones(NUM_PARAMS, np.float32), 1)})

    for number in range(6):
        geo.push(StepPush(ones, 1, pulled=0))
        if number % 2:
            geo.flush()
    geo.close()

    after, _ = parameters(store)
    np.testing.assert_allclose(before - after, 2.0**-2 - 2.0**-8, rtol=1e-5)


def test_servers_have_the_mean_of_what_two_workers_learnt() -> None:
    settings = geo_job(1000)
    store = new_store(settings, num_workers=2)
    before = parameters(store)
    first = new_geo(store, settings, worker=0, num_workers=2)
    second = new_geo(store, settings, worker=1, num_workers=2)
    train(first, BATCHES[:10])
    train(second, BATCHES[10:20])

    alone = []
    for batches in (BATCHES[:10], BATCHES[10:20]):
        local = new_store(job("async", *SGD))
        train(DirectCommunicator(local, member=member(), num_params=NUM_PARAMS), batches)
        alone.append(parameters(local))

    for i, exchanged in enumerate(parameters(store)):
        mean = before[i] + ((alone[0][i] - before[i]) + (alone[1][i] - before[i])) / 2
        np.testing.assert_allclose(exchanged, mean, rtol=1e-4, atol=1e-5)


def test_worker_trains_on_what_others_sent_before() -> None:
    settings = geo_job(1)
    store = new_store(settings, num_workers=2)
    train(new_geo(store, settings, worker=1, num_workers=2))

    late = new_geo(store, settings, worker=0, num_workers=2)

    rows = late.pull(ALL_KEYS).result().rows["embedding"]
    with late.params() as params:
        np.testing.assert_allclose(params, parameters(store)[0], rtol=1e-6)
    np.testing.assert_allclose(rows, parameters(store)[1], rtol=1e-5, atol=1e-7)
    late.close()


def test_rows_of_a_checkpoint_reach_the_replica(tmp_path) -> None:
    settings = geo_job(5)
    store = new_store(settings)
    train(new_geo(store, settings))
    store.save(SaveRequest(url=str(tmp_path / "model")))
    loaded = new_store(settings)
    loaded.load(str(tmp_path / "model"))

    communicator = new_geo(loaded, settings)

    rows = communicator.pull(ALL_KEYS).result().rows["embedding"]
    communicator.close()
    np.testing.assert_allclose(rows, parameters(store)[1], rtol=1e-5, atol=1e-7)


def test_training_goes_on_during_an_exchange_for_another_k_steps() -> None:
    settings = geo_job(5)
    store = new_store(settings)
    may_answer = threading.Event()
    taken = []

    def push_grad(gradients, push_id, *, at=None, push=store.push_grad):
        assert may_answer.wait(10)
        return push(gradients, push_id, at=at)

    store.push_grad = push_grad

    def batches():
        for batch in BATCHES:
            taken.append(batch)
            if len(taken) == 11:  # the first 5 are being exchanged, the next 5 wait
                may_answer.set()
            yield batch

    communicator = new_geo(store, settings, stall_limit_s=10)
    loop_of(communicator).train(batches())
    communicator.close()

    assert len(taken) == len(BATCHES)


def test_training_stops_when_an_exchange_is_a_whole_round_late() -> None:
    settings = geo_job(5)
    store = new_store(settings)
    may_answer, taken = threading.Event(), []

    def push_grad(gradients, push_id, *, at=None, push=store.push_grad):
        may_answer.wait(10)
        return push(gradients, push_id, at=at)

    store.push_grad = push_grad
    communicator = new_geo(store, settings, stall_limit_s=0.2)

    with pytest.raises(WaitTimeoutError, match=r"0\.2 s"):
        loop_of(communicator).train(taken.append(batch) or batch for batch in BATCHES)

    assert 10 <= len(taken) <= 20
    may_answer.set()
    communicator.close()


def test_error_of_an_exchange_ends_training() -> None:
    settings = geo_job(2)
    store = new_store(settings)
    communicator = new_geo(store, settings)

    def push_grad(*_: object, **__: object):
        raise TransportError("server 1 is gone")

    store.push_grad = push_grad
    with pytest.raises(TransportError, match="server 1 is gone"):
        train(communicator)


def test_replica_beyond_its_limit_ends_training_with_what_to_do() -> None:
    settings = geo_job(1)

    with pytest.raises(JobError, match=r"max_replica_mb .*mode = \"async\""):
        train(new_geo(new_store(settings), settings, max_replica_bytes=2**10))


def test_gradients_are_stale_by_what_others_sent_since_the_last_exchange() -> None:
    settings = geo_job(10)
    store = new_store(settings, num_workers=2)
    first = new_geo(store, settings, worker=0, num_workers=2)
    train(new_geo(store, settings, worker=1, num_workers=2), BATCHES[:10])

    train(first, BATCHES[:10])

    assert store.status().staleness.largest == 10


def test_threads_share_one_replica() -> None:
    settings = geo_job(4)
    store = new_store(settings)
    communicator = new_geo(store, settings)

    loop_of(communicator, thread_num=2).train(BATCHES)
    communicator.close()

    assert store.status().examples == {0: 16 * len(BATCHES)}


def test_worker_has_what_others_sent_after_a_barrier() -> None:
    settings = geo_job(1000)
    store = new_store(settings, num_workers=2)
    early = new_geo(store, settings, worker=0, num_workers=2)
    loop_of(early).train(BATCHES[:5])
    train(new_geo(store, settings, worker=1, num_workers=2), BATCHES[5:15])

    early.rejoin(0)

    rows = early.pull(ALL_KEYS).result().rows["embedding"]
    with early.params() as params:
        np.testing.assert_allclose(params, parameters(store)[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(rows, parameters(store)[1], rtol=1e-5, atol=1e-7)
    early.close()


def test_nothing_learnt_is_no_exchange() -> None:
    settings = geo_job(10)
    store = new_store(settings)
    communicator = new_geo(store, settings)
    loop_of(communicator).train(BATCHES[:10])
    version = store.status().version

    communicator.flush()
    communicator.close()

    assert store.status().version == version == 10
