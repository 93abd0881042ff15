"""Requests that no client sends: each is answered or refused, and one that is refused leaves no trace.

Messages are built field by field, from valid values and extremes, so that most of them pass the decoding.
What a store accepts is sent to another one, too: in the end both hold the same.
"""

import gc
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.wire.calls import CALLS, Call, Deadline
from ctr_ps.protos.wire.requests import PushGrad, PushState
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.store import ParameterStore
from tests.support.local_transport import through
from tests.support.needs import IN_CI
from tests.support.process_figures import resident_bytes
from tests.support.requests import DIM, fill
from tests.support.stores import joined, push_id

REQUESTS = 10_000 if IN_CI else 1_000
ROUNDS = REQUESTS // 200
CHANCE = 1.0 if IN_CI else 0.8  # fewer requests differ more from the shares of many
INITIALIZER = InitializerSpec(kind="uniform", scale=0.1)
SGD = OptimizerSpec(name="sgd", params={"learning_rate": 0.1})
ACCEPTED = {
    **dict.fromkeys(("PullSparse", "PullDense", "PullState", "PushGrad", "PushState"), 1 / 20),
    # All of its parts are looked at first, its pulls wait for a version, none is rounded.
    "PushPull": 3 / 500,
}
"""A larger share of requests than these is in order; of one in parts, of the parts."""

PUSHES = frozenset({"PushGrad", "PushPull", "PushState"})


def columns_of(argument: Any) -> list[Keys]:
    """Returns the columns of keys of a push."""
    if isinstance(argument, PushGrad):
        return [grad.keys for _, grad in argument.chunk.sparse]
    if isinstance(argument, PushState):
        return [rows.keys for _, rows in argument.chunk.rows]
    return []


def new_store(root: str) -> ParameterStore:
    store = joined(ParameterStore(num_workers=2, wait_limit_s=0.0, checkpoint_roots=(root,)))
    store.create_table(TableSpec(name="t", dim=DIM, initializer=INITIALIZER, optimizer=SGD))
    segment = DenseSegment(length=DIM, initializer=INITIALIZER)
    store.create_dense(DenseSpec(name="d", segments=(segment,), optimizer=SGD))
    return store


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_refused_requests_leave_no_trace(call: Call[Any, Any], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(call.name)
    is_slow = call.name in {"Save", "Load", "CheckFolder", "Shrink", "CreateTable"}
    are_alike = not call.request.message.DESCRIPTOR.fields
    num_accepted = 0
    resident = 0

    for number in range(ROUNDS):
        if number == 1:  # the first round compiles, and fills the buffers
            gc.collect()
            resident = resident_bytes()
        stores = new_store(str(tmp_path)), new_store(str(tmp_path))
        handlers, others = (Handlers(store.engine) for store in stores)
        for sequence in range((REQUESTS // 10 if is_slow or are_alike else REQUESTS) // ROUNDS):
            message = fill(call.request.message(), rng)
            if call.name in PUSHES and rng.random() < 0.9:
                pushed = message.push if call.name == "PushPull" else message
                pushed.push_id.sequence = (
                    sequence  # else nearly all would be pushes that come again
                )
            try:
                request = call.request.decode(message.SerializeToString())
                for part, argument in handlers.parts_of(call, request):
                    handlers.start(part, argument).result()
                    assert all(np.unique(keys).size == keys.size for keys in columns_of(argument))
                    if call.deadline is not Deadline.WORKERS:  # these change no parameters
                        others.start(part, argument).result()
                    num_accepted += 1
            except CtrPsError:
                continue

        assert stores[0].digest() == stores[1].digest()
        found, expected = (store.status() for store in stores)
        assert replace(found, tables={}) == replace(expected, tables={})
        assert found.version < 2**60
        # What the store has seen goes over the wire, and unless the job is over, it takes what is right.
        through(CALLS["GetStatus"].answer, handlers.start(CALLS["GetStatus"], None).result())
        if call.name not in {"Abort", "Leave", *PUSHES}:
            stores[0].push_grad(Gradients(), push_id(1, sequence=0)).result()

    gc.collect()  # the stores of earlier rounds
    assert resident_bytes() < 1.1 * resident
    assert num_accepted > CHANCE * REQUESTS * ACCEPTED.get(call.name, -1)
