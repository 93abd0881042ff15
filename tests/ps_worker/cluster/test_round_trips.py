"""No call of the client takes longer with more servers: what it asks of all, it asks of all at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.store import (
    Lease,
    Message,
    Missing,
    ModelState,
    ReduceOp,
    SaveRequest,
    ServerStatus,
    Store,
    WorkerLoss,
)
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import wait_for_servers
from tests.support.local_transport import Answer, LocalTransport
from tests.support.stores import DEEP, INCARNATION, KEYS, TOWER, declare, push_id, random_gradients

LEASE = Lease(seconds=30.0, on_worker_loss=WorkerLoss.FAIL)


class DistantTransport(LocalTransport):
    """Servers of this process, as if the answer to a call came a round trip after it was sent.

    Attributes:
        now: The time, in round trips: it passes while an answer is waited for.
    """

    now: int = 0

    def call(
        self, server: int, call: Call[Any, Any], argument: Any, *, ready_s: float | None = None
    ) -> Answer[Any]:
        arrives = self.now + 1
        answer = super().call(server, call, argument, ready_s=ready_s)

        def result() -> Any:
            self.now = max(self.now, arrives)
            return answer.result()

        return Answer(result)


def dense() -> dict[str, Any]:
    return {"tower": np.empty(TOWER.length, np.float32)}


def push_pull(store: Store, _: Path) -> None:
    keys = {"deep": KEYS, "wide": KEYS}
    for answer in store.push_pull(random_gradients(1), push_id(), keys=keys, into=dense()):
        answer.result()


def push_state(store: Store, _: Path) -> None:
    state = store.pull_state({"deep": KEYS}, ["tower"]).result()
    store.push_state(ModelState(state.rows, state.blocks), push_id()).result()


def save(store: Store, folder: Path) -> None:
    store.save(SaveRequest(url=f"{folder}/saved"))


def load(store: Store, folder: Path) -> None:
    save(store, folder)
    store.load(f"{folder}/saved")


def shuffle(store: Store, _: Path) -> None:
    message = Message(sender=0, receiver=0, sequence=0, content=None)
    store.post("rows", message).result()
    store.take("rows", 0, received=0).result()


CALLS: dict[str, Callable[[Store, Path], object]] = {
    "join": lambda store, _: store.join(0, INCARNATION, terms={}, lease=LEASE).result(),
    "renew": lambda store, _: store.renew(0),
    "create_table": lambda store, _: store.create_table(DEEP),
    "create_dense": lambda store, _: store.create_dense(TOWER),
    "pull_sparse": lambda store, _: store.pull_sparse(
        {"deep": KEYS}, missing=Missing.INITIAL
    ).result(),
    "pull_dense": lambda store, _: store.pull_dense(dense()).result(),
    "push_grad": lambda store, _: store.push_grad(random_gradients(0), push_id()).result(),
    "push_pull": push_pull,
    "pull_changed": lambda store, _: store.pull_changed([], 0, max_rows=9).result(),
    "push_state": push_state,
    "wait_version": lambda store, _: store.wait_version(0).result(),
    "barrier": lambda store, _: store.barrier("b", 0, step=0).result(),
    "all_reduce": lambda store, _: store.all_reduce(
        "r", 0, np.ones(3), ReduceOp.SUM, step=0
    ).result(),
    "advance": lambda store, _: store.advance(0, 1, at_least=0).result(),
    "shuffle": shuffle,
    "status": lambda store, _: store.status(),
    "digest": lambda store, _: store.digest(),
    "shrink": lambda store, _: store.shrink(),
    "save": save,
    "load": load,
    "require_writable": lambda store, folder: store.require_writable(str(folder)),
    "resume": lambda store, _: store.resume(0, {}),
    "leave": lambda store, _: store.leave(0, step=0),
    "abort": lambda store, _: store.abort(0, "for a reason"),
}


def round_trips(name: str, num_servers: int, folder: Path) -> int:
    stores = [
        ParameterStore(server_index=index, num_servers=num_servers) for index in range(num_servers)
    ]
    transport = DistantTransport(stores)
    client = ClusterClient(transport)
    client.join(0, INCARNATION, terms={}, lease=LEASE).result()
    declare(client)
    before = transport.now
    CALLS[name](client, folder)
    return transport.now - before


@pytest.mark.parametrize("name", CALLS)
def test_call_to_sixteen_servers_takes_as_many_round_trips_as_to_two(
    name: str, tmp_path: Path
) -> None:
    few = round_trips(name, 2, tmp_path / "few")

    many = round_trips(name, 16, tmp_path / "many")

    assert many == few >= 1


def test_all_servers_are_waited_for_at_once() -> None:
    stores = [ParameterStore(server_index=index, num_servers=16) for index in range(16)]
    transport = DistantTransport(stores)
    transport.answers["GetStatus"] = lambda server: ServerStatus(
        store=stores[server].status(), server_index=server, num_servers=16
    )

    wait_for_servers(transport, 1.0)

    assert transport.now == 1
