"""Synchronous training is exact: bytes do not depend on servers, threads of the test, or timing."""

from collections.abc import Sequence

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.store import Missing, Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, small_model, train_workers

OPTIMIZERS = ("optimizer.sparse=adagrad", "optimizer.dense=adam")
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.1}",
)


def train_cluster(num_servers: int, data: Sequence[Sequence[Batch]], settings: Job) -> str:
    """Trains a worker for each element of `data` on a cluster and returns the model's digest."""
    with cluster(num_servers=num_servers, num_workers=len(data)) as servers:
        clients = [servers.client(joins=False) for _ in data]
        train_workers(clients, data, settings)
        return clients[0].digest()


def train_in_process(data: Sequence[Sequence[Batch]], settings: Job) -> ParameterStore:
    """Trains a worker for each element of `data` on one store in this process."""
    store = ParameterStore(num_workers=len(data), wait_limit_s=30)
    train_workers([store] * len(data), data, settings, is_in_process=True)
    return store


def parameters(store: Store) -> tuple[np.ndarray, np.ndarray]:
    dense = np.empty(small_model().num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    keys = np.unique(joined(random_batches(40, 8, seed=1)).keys)
    rows = (
        store.pull_sparse({"embedding": keys}, missing=Missing.INITIAL).result().rows["embedding"]
    )
    return dense, rows


def test_two_workers_learn_what_one_learns_with_a_double_batch() -> None:
    data = [random_batches(20, 8, seed=1), random_batches(20, 8, seed=2)]
    double = [joined(pair) for pair in zip(*data, strict=True)]
    settings = job("sync", *SGD)

    two = parameters(train_in_process(data, settings))
    one = parameters(train_in_process([double], settings))

    for mine, theirs in zip(two, one, strict=True):
        scale = np.abs(theirs).max()
        assert np.abs(mine - theirs).max() <= 1e-5 * scale


@pytest.mark.parametrize("lengths", [(9, 4), (0, 5), (5, 0), (3, 3)])
def test_workers_with_unequal_data_finish_with_one_digest(lengths: tuple[int, int]) -> None:
    data = [random_batches(n, 8, seed=seed) for seed, n in enumerate(lengths, start=1)]
    settings = job("sync", *OPTIMIZERS)

    digests = {train_cluster(num_servers, data, settings) for num_servers in (1, 2)}
    digests.add(train_in_process(data, settings).digest())

    assert len(digests) == 1


def test_rows_of_bfloat16_are_rounded_alike_on_any_number_of_servers() -> None:
    data = [random_batches(9, 8, seed=1), random_batches(4, 8, seed=2)]
    settings = job("sync", *OPTIMIZERS, "train.row_dtype=bfloat16")

    digests = {train_cluster(num_servers, data, settings) for num_servers in (1, 2, 3)}
    store = train_in_process(data, settings)
    digests.add(store.digest())

    assert len(digests) == 1
    _, rows = parameters(store)
    assert not (rows.view(np.uint32) & np.uint32(0xFFFF)).any()
    assert rows.any()
