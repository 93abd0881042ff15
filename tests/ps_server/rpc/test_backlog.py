"""A server with more work than it can do: what it refuses, for how long, and what it answers all the same."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import OverloadedError, ProtocolError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.protos.wire import calls
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.protos.wire.grpc_status import METADATA_KEY
from ctr_ps.protos.wire.requests import Leave, PullSparse, PushGrad
from ctr_ps.ps_server.rpc.backlog import RETRY_AFTER_S, Backlog
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from tests.support.cluster import cluster
from tests.support.stores import member, push_id

TABLE = TableSpec(
    name="t",
    dim=1,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    num_shards=1,
)
LARGE = np.arange(200_000, dtype=np.uint64)  # for a thread
LARGE_BYTES = 12 * LARGE.size


def push(sequence: int, keys: np.ndarray = LARGE) -> PushGrad:
    grad = SparseGrad(keys, np.ones((keys.size, 1), np.float32), 1)
    chunk = PushChunk([("t", grad)], [])
    return PushGrad(chunk=chunk, push_id=push_id(0, sequence), shard_map_epoch=FIRST_EPOCH)


PULL = PullSparse(keys={"t": LARGE[:1]}, missing=Missing.ZEROS, shard_map_epoch=FIRST_EPOCH)


class Table(threading.Event):
    """Says when pushes to a table have begun, each of which waits for a lock."""

    def __init__(self, store: ParameterStore) -> None:
        super().__init__()
        self.num_begun = 0
        self._lock = store.engine.parameters.table("t")._locks[0]
        self._store = store
        self._apply = store.engine.parameters.apply
        self._waited_for = 0
        store.engine.parameters.apply = self._begin

    def _begin(self, *arguments: object, **moment: int) -> None:
        self.num_begun += 1
        if self.num_begun == self._waited_for:
            self.set()
        self._apply(*arguments, **moment)

    @contextmanager
    def locked(self, num_pushes: int) -> Iterator[None]:
        self._waited_for = self.num_begun + num_pushes
        with self._lock:
            yield


@pytest.fixture
def start() -> Iterator[object]:
    with ExitStack() as stack:

        def start_server(backlog: Backlog) -> tuple[GrpcTransport, Table]:
            servers = stack.enter_context(cluster(num_servers=0))
            store = ParameterStore()
            servers.start_server(store, backlog)
            servers.client().create_table(TABLE)
            transport = GrpcTransport(servers.endpoints, retry_s=0.0)
            stack.callback(transport.close)
            return transport, Table(store)

        yield start_server


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (
            {"max_calls": 2},
            "2 calls with 4800[0-9]{3} bytes wait; its limits are 2 calls and 536870912 bytes",
        ),
        (
            {"max_bytes": 2 * LARGE_BYTES},
            "limits are 512 calls and 4800000 bytes. Try PushGrad again in 1 s",
        ),
    ],
    ids=["calls", "bytes"],
)
def test_calls_over_the_backlog_are_refused_until_it_is_worked_off(start, limits, text) -> None:
    transport, table = start(Backlog(**limits))

    with table.locked(num_pushes=2):
        under_way = [transport.call(0, calls.PUSH_GRAD, push(number)) for number in range(2)]
        assert table.wait(20)
        with pytest.raises(OverloadedError, match=text) as refused:
            transport.call(0, calls.PUSH_GRAD, push(2)).result()
        with pytest.raises(OverloadedError, match="Try PullSparse again in 1 s"):
            transport.call(0, calls.PULL_SPARSE, PULL).result()
        assert transport.call(0, calls.GET_STATUS, None).result().store.version == 0
    versions = [push.result() for push in under_way]
    transport.call(0, calls.PUSH_GRAD, push(2)).result()

    assert refused.value.retry_after_s == RETRY_AFTER_S
    assert refused.value.__cause__.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert sorted(versions) == [1, 2]
    rows = transport.call(0, calls.PULL_SPARSE, PULL).result().rows["t"]
    np.testing.assert_array_equal(rows, -3.0)
    transport.call(0, calls.LEAVE, Leave(member=member(), step=0)).result()


def test_refused_call_is_not_decoded(start) -> None:
    """What is no message would be an error of another kind."""
    transport, _ = start(Backlog(max_calls=0))
    with grpc.insecure_channel(transport.shard_map.endpoints[0]) as channel:
        garbage = b"\xff" * 1000

        def error_of(name: str) -> tuple[grpc.StatusCode, str]:
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary(f"/{calls.SERVICE}/{name}")(garbage, timeout=10)
            return failed.value.code(), dict(failed.value.trailing_metadata())[METADATA_KEY]

        assert error_of("PushGrad") == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OverloadedError")
        assert error_of("Leave") == (grpc.StatusCode.FAILED_PRECONDITION, "ProtocolError")


def test_bytes_that_are_no_message_are_refused(start) -> None:
    transport, _ = start(Backlog())
    method = grpc.insecure_channel(transport.shard_map.endpoints[0])
    with method as channel, pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(f"/{calls.SERVICE}/PushGrad")(b"\xff" * 9, timeout=10)

    assert failed.value.details() == "9 bytes cannot be decoded as PushGradRequest"


def test_calls_that_move_data_are_refused_and_those_that_tell_of_a_job_never() -> None:
    backlog = Backlog(max_calls=0)
    refused = set()

    for call in CALLS.values():
        try:
            backlog.require_room(call)
        except OverloadedError:
            refused.add(call.name)

    pulls = {"PullSparse", "PullDense", "PullChanged", "PullState"}
    assert refused == pulls | {"PushGrad", "PushState", "PushPull", "Post"}


def test_call_that_failed_is_in_no_backlog() -> None:
    backlog = Backlog(max_calls=1, max_bytes=100)

    def fail() -> None:
        with backlog.holding(1000):
            with pytest.raises(OverloadedError):
                backlog.require_room(calls.PUSH_GRAD)
            raise ProtocolError("no such worker")

    with pytest.raises(ProtocolError):
        fail()

    backlog.require_room(calls.PUSH_GRAD)


def test_overload_is_logged_once_while_it_lasts(caplog) -> None:
    backlog = Backlog(max_calls=1)

    def refuse() -> None:
        with backlog.holding(7), pytest.raises(OverloadedError):
            backlog.require_room(calls.PUSH_GRAD)

    with caplog.at_level(logging.WARNING):
        refuse()
        refuse()
        backlog.require_room(calls.PUSH_GRAD)
        refuse()

    assert caplog.messages == ["overloaded, calls are refused calls=1 bytes=7"] * 2
