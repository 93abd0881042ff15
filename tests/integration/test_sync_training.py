"""Synchronous training is exact: bytes do not depend on servers, threads of the test, or timing."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ctr_model.batch import Batch
from protos.store import Missing, Staleness, Store
from ps_server.store import ParameterStore
from ps_worker.job import Job
from ps_worker.job.model import DENSE_BLOCK
from tests.support.cluster import cluster
from tests.support.training import (
    job,
    joined,
    random_batches,
    small_model,
    together,
    train_worker,
)

OPTIMIZERS = ("optimizer.sparse=adagrad", "optimizer.dense=adam")
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.1}",
)


def train_cluster(num_servers: int, data: Sequence[Sequence[Batch]], settings: Job) -> str:
    """Trains a worker for each element of `data` on a cluster and returns the model's digest."""
    with cluster(num_servers=num_servers, num_workers=len(data)) as servers:
        clients = [servers.client(joins=False) for _ in data]
        together(*works(clients, data, settings, is_in_process=False))
        return clients[0].digest()


def train_in_process(data: Sequence[Sequence[Batch]], settings: Job) -> ParameterStore:
    """Trains a worker for each element of `data` on one store in this process."""
    store = ParameterStore(num_workers=len(data), wait_limit_s=30)
    together(*works([store] * len(data), data, settings, is_in_process=True))
    return store


def works(
    stores: Sequence[Store],
    data: Sequence[Sequence[Batch]],
    settings: Job,
    *,
    is_in_process: bool,
) -> list[Callable[[], object]]:
    return [
        functools.partial(
            train_worker,
            store,
            batches,
            settings,
            worker=worker,
            num_workers=len(data),
            is_in_process=is_in_process,
        )
        for worker, (store, batches) in enumerate(zip(stores, data, strict=True))
    ]


def parameters(store: Store) -> tuple[np.ndarray, np.ndarray]:
    dense = np.empty(small_model().num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    keys = np.unique(joined(random_batches(40, 8, seed=1)).keys)
    rows = (
        store.pull_sparse({"embedding": keys}, missing=Missing.INITIAL).result().rows["embedding"]
    )
    return dense, rows


@pytest.mark.parametrize("thread_num", [1, 2])
def test_digest_is_the_same_on_any_number_of_servers_and_in_process(thread_num: int) -> None:
    data = [random_batches(12, 16, seed=1), random_batches(12, 16, seed=2)]
    settings = job("sync", f"train.thread_num={thread_num}", *OPTIMIZERS)

    digests = {train_cluster(num_servers, data, settings) for num_servers in (1, 2, 3)}
    digests.add(train_in_process(data, settings).digest())

    assert len(digests) == 1


def test_digest_tells_models_apart() -> None:
    settings = job("sync", *OPTIMIZERS)
    first = train_in_process([random_batches(3, 16, seed=1)], settings)
    second = train_in_process([random_batches(3, 16, seed=2)], settings)

    assert first.digest() != second.digest()


def test_two_workers_learn_what_one_learns_with_a_double_batch() -> None:
    data = [random_batches(20, 8, seed=1), random_batches(20, 8, seed=2)]
    double = [joined(pair) for pair in zip(*data, strict=True)]
    settings = job("sync", *SGD)

    two = parameters(train_in_process(data, settings))
    one = parameters(train_in_process([double], settings))

    for mine, theirs in zip(two, one, strict=True):
        scale = np.abs(theirs).max()
        assert np.abs(mine - theirs).max() <= 1e-5 * scale


def test_two_threads_learn_what_two_workers_learn() -> None:
    data = [random_batches(10, 8, seed=1), random_batches(10, 8, seed=2)]
    dealt = [batch for pair in zip(*data, strict=True) for batch in pair]

    workers = train_in_process(data, job("sync", *OPTIMIZERS))
    threads = train_in_process([dealt], job("sync", "train.thread_num=2", *OPTIMIZERS))

    assert workers.digest() == threads.digest()


@pytest.mark.parametrize("lengths", [(9, 4), (0, 5), (5, 0), (3, 3)])
def test_workers_with_unequal_data_finish_with_one_digest(lengths: tuple[int, int]) -> None:
    data = [random_batches(n, 8, seed=seed) for seed, n in enumerate(lengths, start=1)]
    settings = job("sync", *OPTIMIZERS)

    digests = {train_cluster(num_servers, data, settings) for num_servers in (1, 2)}
    digests.add(train_in_process(data, settings).digest())

    assert len(digests) == 1


def test_every_example_is_counted() -> None:
    data = [random_batches(5, 8, seed=1), random_batches(3, 8, seed=2)]

    store = train_in_process(data, job("sync", *OPTIMIZERS))

    status = store.status()
    assert status.examples == {0: 40, 1: 24}
    assert status.version == 5
    assert status.staleness == Staleness().add(0, 5 + 3)
