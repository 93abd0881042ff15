"""A push that is on its way is there once, as the bytes that were sent, and is made whole from them."""

import weakref
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import BlockState, ModelState, RowStates
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_worker.cluster import state_transfer
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.routing import Routing
from ctr_ps.ps_worker.cluster.sent import gradients_of, state_of
from tests.support.cluster import cluster
from tests.support.garbage import without_collector
from tests.support.stores import DEEP, KEYS, TOWER, WIDE, declare, push_id, random_gradients


def pushed_grad(client: ClusterClient) -> tuple[Any, list[weakref.ref[Any]]]:
    gradients = random_gradients(0)
    arrays = [weakref.ref(grad.values) for grad in gradients.sparse.values()]
    arrays += [weakref.ref(grad.values) for grad in gradients.dense.values()]
    return client.push_grad(gradients, push_id(sequence=0), at=0), arrays


def pushed_with_pulls(client: ClusterClient) -> tuple[Any, list[weakref.ref[Any]]]:
    gradients = random_gradients(0)
    arrays = [weakref.ref(grad.values) for grad in gradients.sparse.values()]
    into = {"tower": np.empty(TOWER.length, np.float32)}
    keys = {"deep": KEYS}
    return client.push_pull(gradients, push_id(sequence=0), keys=keys, into=into, at=0), arrays


def pushed_state(client: ClusterClient) -> tuple[Any, list[weakref.ref[Any]]]:
    state = client.pull_state({"deep": KEYS}, ["tower"]).result()
    arrays = [weakref.ref(state.rows["deep"].weights), weakref.ref(state.blocks["tower"].weights)]
    return client.push_state(state, push_id(sequence=0)), arrays


@pytest.mark.parametrize("push", [pushed_grad, pushed_with_pulls, pushed_state])
def test_arrays_of_a_push_are_free_once_it_is_sent(push: Any) -> None:
    """The other worker's part of the step is missing, so that the answer to gradients does not come."""
    with cluster(num_servers=2, num_workers=2) as servers, without_collector():
        client = servers.client()
        declare(client)

        answer, arrays = push(client)

        assert [array for array in arrays if array() is not None] == []
        assert answer is not None


def routing(num_servers: int) -> Routing:
    tables = {spec.name: spec for spec in (DEEP, WIDE)}
    return Routing(ShardMap.of(num_servers), 300, tables=tables, blocks={TOWER.name: TOWER})


@pytest.mark.parametrize("num_servers", [1, 3, 32])
def test_gradients_are_made_whole_from_their_messages(num_servers: int) -> None:
    """Of 32 servers, some have no element of the block, and no shard of a table."""
    routes = routing(num_servers)
    numbers = np.arange(KEYS.size * 5, dtype=np.float32).reshape(-1, 5) % 251  # exact in bfloat16
    given = Gradients(
        sparse={"deep": SparseGrad(KEYS, numbers, 9), "wide": SparseGrad(KEYS, numbers[:, :1], 7)},
        dense={"tower": DenseGrad(np.arange(TOWER.length, dtype=np.float32), 4)},
    )
    parts = {}
    for server, chunks in routes.split_push(given, bfloat16=True).items():
        pushes = [
            requests.PushGrad(chunk=chunk, push_id=push_id(), shard_map_epoch=1) for chunk in chunks
        ]
        parts[server] = [
            calls.PUSH_GRAD.request.decode(calls.PUSH_GRAD.request.encode(push)) for push in pushes
        ]

    found = gradients_of(routes, parts)

    assert found.dense["tower"].examples == 4
    np.testing.assert_array_equal(found.dense["tower"].values, given.dense["tower"].values)
    for table, grad in given.sparse.items():
        again = found.sparse[table]
        assert again.examples == grad.examples
        np.testing.assert_array_equal(np.sort(again.keys), np.sort(KEYS))
        order, expected = np.argsort(again.keys), np.argsort(KEYS)
        np.testing.assert_array_equal(again.values[order], grad.values[expected])


@pytest.mark.parametrize("num_servers", [1, 3, 32])
def test_state_is_made_whole_from_its_messages(num_servers: int) -> None:
    routes = routing(num_servers)
    rows = np.arange(KEYS.size * 5, dtype=np.float32).reshape(-1, 5)
    adam = optimizer_of(TOWER.optimizer)
    elements = np.arange(adam.num_slots * TOWER.length, dtype=np.float32)
    given = ModelState(
        {"deep": RowStates(keys=KEYS, weights=rows, state=-rows, optimizer="adagrad")},
        {
            "tower": BlockState(
                weights=np.arange(TOWER.length, dtype=np.float32),
                element_state=elements.reshape(adam.num_slots, -1),
                scalars=np.array(adam.initial_scalars, np.float32),
                optimizer="adam",
            )
        },
    )
    parts = {}
    for server, chunks in state_transfer.split_push(routes, given).items():
        pushes = [
            requests.PushState(chunk=chunk, push_id=push_id(), shard_map_epoch=1)
            for chunk in chunks
        ]
        parts[server] = [
            calls.PUSH_STATE.request.decode(calls.PUSH_STATE.request.encode(push))
            for push in pushes
        ]

    found = state_of(routes, parts)

    order, expected = np.argsort(found.rows["deep"].keys), np.argsort(KEYS)
    for name in ("keys", "weights", "state"):
        again, before = (getattr(each.rows["deep"], name) for each in (found, given))
        np.testing.assert_array_equal(again[order], before[expected])
    for name in ("weights", "element_state", "scalars"):
        again, before = (getattr(each.blocks["tower"], name) for each in (found, given))
        np.testing.assert_array_equal(again, before)
