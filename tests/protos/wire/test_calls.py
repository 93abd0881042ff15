"""The table of calls and the .proto files agree, and every call has a handler."""

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from ctr_ps.protos.store import Missing
from ctr_ps.protos.v1 import parameter_server_pb2
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import CALLS, Call, Deadline
from ctr_ps.ps_server.coordination.rendezvous import Rendezvous
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.rpc.handlers import Handlers, method_name
from ctr_ps.ps_server.rpc.moves import Moves
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines
from tests.support.stores import member

SERVICE = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"]


def test_every_rpc_of_the_service_has_a_row_with_its_messages() -> None:
    declared = {method.name: (method.input_type, method.output_type) for method in SERVICE.methods}

    assert {
        name: (call.request.message.DESCRIPTOR, call.answer.message.DESCRIPTOR)
        for name, call in CALLS.items()
    } == declared


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_without_a_handler_is_a_method_of_the_engine_or_rendezvous(
    call: Call[Any, Any],
) -> None:
    """Its parameters are the fields of the argument; the map and what is acknowledged are checked apart."""
    method = method_name(call.name)
    if hasattr(Handlers, f"_{method}") or call is calls.PUSH_PULL:  # which is several of them
        return
    if hasattr(Moves, method):  # which takes the argument as it is
        return

    names = [field.name for field in fields(vars(requests)[call.name])]
    names = [name for name in names if name not in ("acknowledged", "shard_map_epoch")]
    names = ["worker" if name == "member" else name for name in names]
    owner = Rendezvous if hasattr(Rendezvous, method) else Engine
    signature(getattr(owner, method)).bind(None, **dict.fromkeys(names))


def test_every_call_that_may_wait_has_the_time_for_it() -> None:
    exchange = {"Post", "Take", "TakeFile"}
    waiting = {
        Deadline.VERSION: {"PullSparse", "PullDense", "PushPull"},
        Deadline.WORKERS: {"Join", "WaitVersion", "Barrier", "AllReduce", "Advance", "Snapshot"}
        | {"HoldMove"}
        | exchange,
        Deadline.CHECKPOINT: {"Save", "Load", "Shrink", "GetDigest"},
    }

    for deadline, names in waiting.items():
        assert {call.name for call in CALLS.values() if call.deadline is deadline} == names


@pytest.mark.parametrize(
    ("call", "argument", "expected"),
    [
        (calls.GET_STATUS, None, 1.0),
        (calls.BARRIER, requests.Barrier(name="b", member=member(0), step=0, number=1), 11.0),
        (calls.GET_DIGEST, None, 101.0),
        (
            calls.PULL_SPARSE,
            requests.PullSparse(keys={}, missing=Missing.ZEROS, shard_map_epoch=1),
            1.0,
        ),
        (
            calls.PULL_SPARSE,
            requests.PullSparse(keys={}, missing=Missing.ZEROS, at=0, shard_map_epoch=1),
            11.0,
        ),
    ],
    ids=["plain", "workers", "checkpoint", "pull", "pull-of-a-version"],
)
def test_call_takes_as_long_as_what_it_waits_for(
    call: Call[Any, Any], argument: Any, expected: float
) -> None:
    assert Deadlines(rpc_s=1, wait_s=10, checkpoint_s=100).of(call, argument) == expected
