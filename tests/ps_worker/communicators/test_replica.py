"""A worker's copy of the parameters, against an oracle of dictionaries."""

from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_worker.communicators.geo import Replica
from tests.support.training import together

RATE = 0.5
DIM = 2
LENGTH = 3
SGD = OptimizerSpec(name="sgd", params={"learning_rate": RATE})
TABLE = TableSpec(
    name="t", dim=DIM, initializer=InitializerSpec(scale=0.1), optimizer=SGD, num_shards=2
)
DENSE = DenseSpec(
    name="dense",
    segments=(DenseSegment(length=LENGTH, initializer=InitializerSpec(scale=0.1)),),
    optimizer=SGD,
)

Weights = dict[int, np.ndarray]


def new_replica(num_workers: int = 1, table: TableSpec = TABLE) -> Replica:
    return Replica([table], DENSE, num_workers=num_workers)


def keys_of(*keys: int) -> np.ndarray:
    return np.array(keys, np.uint64)


def initial(*keys: int) -> np.ndarray:
    return SparseTable(TABLE).pull(keys_of(*keys), Missing.INITIAL)


def push(replica: Replica, gradients: Mapping[int, float], dense: float = 0.0) -> None:
    values = np.array([[value] * DIM for value in gradients.values()], np.float32)
    replica.push(
        Gradients(
            {"t": SparseGrad(keys_of(*gradients), values.reshape(-1, DIM), 1)},
            {"dense": DenseGrad(np.full(LENGTH, dense, np.float32), 1)},
        ),
        step=0,
    )


def read(replica: Replica, *keys: int) -> np.ndarray:
    return replica.pull({"t": keys_of(*keys)})["t"]


def rows_of(delta: Gradients) -> Weights:
    grad = delta.sparse["t"]
    return dict(zip(grad.keys.tolist(), grad.values, strict=True))


def test_delta_is_this_workers_share_of_what_it_changed() -> None:
    replica = new_replica(num_workers=4)
    push(replica, {5: 1.0, 7: -2.0}, dense=3.0)

    delta = replica.take_delta()

    assert rows_of(delta).keys() == {5, 7}
    np.testing.assert_allclose(rows_of(delta)[5], [-RATE / 4] * DIM, rtol=1e-5)
    np.testing.assert_allclose(rows_of(delta)[7], [2 * RATE / 4] * DIM, rtol=1e-5)
    np.testing.assert_allclose(delta.dense["dense"].values, [-3 * RATE / 4] * LENGTH, rtol=1e-5)
    assert delta.sparse["t"].examples == delta.dense["dense"].examples == 1


def test_what_was_trained_since_the_delta_stays_and_is_sent_next() -> None:
    replica = new_replica()
    push(replica, {5: 1.0}, dense=1.0)
    replica.take_delta()
    push(replica, {5: 10.0}, dense=10.0)

    replica.merge_rows({"t": (keys_of(5), np.full((1, DIM), 100.0, np.float32))})
    replica.merge_dense(np.full(LENGTH, 100.0, np.float32))

    np.testing.assert_allclose(read(replica, 5), [[100 - 10 * RATE] * DIM], rtol=1e-5)
    delta = replica.take_delta()
    np.testing.assert_allclose(rows_of(delta)[5], [-10 * RATE] * DIM, rtol=1e-4)
    np.testing.assert_allclose(delta.dense["dense"].values, [-10 * RATE] * LENGTH, rtol=1e-4)


def test_optimizer_state_is_local_and_survives_a_merge() -> None:
    adagrad = OptimizerSpec(name="adagrad", params={"learning_rate": RATE})
    table = TableSpec(
        name="t", dim=DIM, initializer=InitializerSpec(), optimizer=adagrad, num_shards=2
    )
    replica = new_replica(table=table)
    push(replica, {5: 3.0})
    replica.merge_rows({"t": (keys_of(5), np.zeros((1, DIM), np.float32))})
    before = read(replica, 5)

    push(replica, {5: 4.0})

    np.testing.assert_allclose(read(replica, 5) - before, [[-RATE * 4 / 5] * DIM], rtol=1e-5)


def test_taken_delta_leaves_the_copy_as_the_servers_will_have_it() -> None:
    replica = new_replica(num_workers=4)
    push(replica, {5: 4.0}, dense=4.0)
    dense = np.empty(LENGTH, np.float32)
    replica.dense.pull(dense)
    start = dense + 4 * RATE

    delta = replica.take_delta()

    replica.dense.pull(dense)
    np.testing.assert_allclose(dense, start - RATE, rtol=1e-5)
    np.testing.assert_allclose(read(replica, 5), initial(5) - RATE, rtol=1e-5)
    np.testing.assert_array_equal(read(replica, 5), initial(5) + rows_of(delta)[5])


def test_size_tells_of_rows_each_with_its_base() -> None:
    replica = new_replica()
    empty = replica.size_bytes

    push(replica, dict.fromkeys(range(100), 1.0))

    assert replica.rows == 100
    assert replica.size_bytes - empty >= 100 * (8 + 2 * 4 * DIM)


def test_nothing_is_lost_while_another_thread_takes_and_merges() -> None:
    replica, rounds = new_replica(), 300
    server = dict(enumerate(initial(*range(8)).astype(np.float64)))

    def train() -> None:
        for _ in range(rounds):
            push(replica, dict.fromkeys(range(8), 1.0))

    def exchange() -> None:
        for key, delta in rows_of(replica.take_delta()).items():
            server[key] += delta
        values = np.array(list(server.values()), np.float32)
        replica.merge_rows({"t": (keys_of(*server), values)})

    together(train, lambda: [exchange() for _ in range(50)])
    exchange()

    expected = initial(*range(8)) - RATE * rounds
    np.testing.assert_allclose(np.array(list(server.values())), expected, rtol=1e-4)
    np.testing.assert_allclose(read(replica, *range(8)), expected, rtol=1e-4)


operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("push"),
            st.integers(0, 1),
            st.dictionaries(st.integers(0, 5), st.integers(-4, 4)),
        ),
        st.tuples(st.just("exchange"), st.integers(0, 1), st.just({})),
    ),
    max_size=20,
)


@pytest.mark.parametrize("num_workers", [2])
@given(operations)
def test_replicas_and_servers_agree_with_an_oracle(num_workers: int, operations: list) -> None:
    """The oracle: each worker's sum of its own steps; the servers have the mean of what was exchanged."""
    replicas = [new_replica(num_workers) for _ in range(num_workers)]
    keys = range(6)
    start = initial(*keys).astype(np.float64)
    server = start.copy()
    since = [np.zeros_like(start) for _ in replicas]  # each worker's steps since its last exchange

    def exchange(worker: int) -> None:
        nonlocal server
        taken = rows_of(replicas[worker].take_delta())
        np.testing.assert_array_equal(
            [key in taken for key in keys if since[worker][key].any()],
            [True] * sum(bool(since[worker][key].any()) for key in keys),
        )
        for key, delta in taken.items():
            server[key] += delta
        replicas[worker].merge_rows({"t": (keys_of(*keys), server.astype(np.float32))})
        since[worker][:] = 0

    exact = start.copy()
    for name, worker, gradients in operations:
        if name == "push":
            push(replicas[worker], gradients)
            for key, value in gradients.items():
                since[worker][key] -= RATE * value
        else:
            exact += since[worker] / num_workers
            exchange(worker)
            np.testing.assert_allclose(server, exact, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(read(replicas[worker], *keys), server, rtol=1e-4, atol=1e-4)
    for worker in range(num_workers):
        exact += since[worker] / num_workers
        exchange(worker)
    np.testing.assert_allclose(server, exact, rtol=1e-4, atol=1e-4)


def test_lent_dense_parameters_do_not_change_before_they_are_back() -> None:
    replica = new_replica()
    server = np.full(LENGTH, 7.0, np.float32)
    with ThreadPoolExecutor(1) as pool:
        with replica.dense.lend() as params:
            before = params.copy()
            merge = pool.submit(replica.merge_dense, server)
            _, unfinished = futures.wait([merge], timeout=0.02)
            assert merge in unfinished
            np.testing.assert_array_equal(params, before)
        merge.result(timeout=10)

    with replica.dense.lend() as params:
        np.testing.assert_array_equal(params, server)
