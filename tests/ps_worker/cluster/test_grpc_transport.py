"""Calls over gRPC when servers fail: retries, deadlines, and what is raised."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import grpc
import numpy as np
import pytest

from protos.chunking import PushChunk
from protos.errors import TransportError, UnknownTableError, WrongServerError
from protos.gradients import SparseGrad
from protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from protos.store import Message, Missing, Pulled, PushId
from protos.v1 import control_plane_pb2, data_plane_pb2, parameter_server_pb2_grpc
from ps_server.rpc.health import is_serving
from ps_server.store import ParameterStore
from ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport
from tests.support.cluster import cluster

# ruff: noqa: N802 - RPC methods carry their names on the wire

STAMP = PushId(worker=0, incarnation=1, sequence=0, step=0, examples=1, batches=1, pulled=0)
KEYS = np.arange(10, dtype=np.uint64)


class FailingServicer(parameter_server_pb2_grpc.ParameterServerServicer):
    """Is unavailable for the first calls of each kind, and never answers a barrier."""

    def __init__(self, num_failures: int) -> None:
        self._num_failures = num_failures
        self.calls: Counter[str] = Counter()
        self.ending = Event()

    def _answer(self, call: str, context: grpc.ServicerContext, response: object) -> object:
        self.calls[call] += 1
        if self.calls[call] <= self._num_failures:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        return response

    def PullSparse(self, request, context):
        return self._answer("PullSparse", context, data_plane_pb2.PullSparseResponse())

    def PullChanged(self, request, context):
        return self._answer("PullChanged", context, data_plane_pb2.PullChangedResponse())

    def Post(self, request, context):
        return self._answer("Post", context, data_plane_pb2.PostResponse())

    def Take(self, request, context):
        return self._answer("Take", context, data_plane_pb2.TakeResponse())

    def PushGrad(self, request, context):
        return self._answer("PushGrad", context, data_plane_pb2.PushGradResponse())

    def Leave(self, request, context):
        return self._answer("Leave", context, control_plane_pb2.LeaveResponse())

    def Barrier(self, request, context):
        self.ending.wait(20)
        return control_plane_pb2.BarrierResponse()


@contextmanager
def failing_server(num_failures: int) -> Iterator[tuple[FailingServicer, str]]:
    servicer = FailingServicer(num_failures)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        parameter_server_pb2_grpc.add_ParameterServerServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        servicer.ending.set()
        server.stop(None).wait(20)


@contextmanager
def transport_to(endpoint: str, **deadlines: float) -> Iterator[GrpcTransport]:
    transport = GrpcTransport([endpoint], Deadlines(**deadlines))
    try:
        yield transport
    finally:
        transport.close()


def test_pull_is_tried_again_when_a_server_is_unavailable():
    with failing_server(2) as (servicer, endpoint), transport_to(endpoint) as transport:
        assert transport.pull_sparse(0, {}, Missing.ZEROS, None).result() == Pulled({}, 0)

    assert servicer.calls == {"PullSparse": 3}


def test_large_pull_is_tried_again_too():
    """A request over gRPC's default buffer for retries, of 256 KiB."""
    keys = np.arange(100_000, dtype=np.uint64)
    with failing_server(1) as (servicer, endpoint), transport_to(endpoint) as transport:
        transport.pull_sparse(0, {"t": keys}, Missing.ZEROS, None).result()

    assert servicer.calls == {"PullSparse": 2}


def test_messages_which_have_numbers_are_tried_again():
    message = Message(sender=0, receiver=1, sequence=0, content=bytes(2**20))
    with failing_server(1) as (servicer, endpoint), transport_to(endpoint) as transport:
        transport.post(0, "exchange", message).result()
        assert transport.take(0, "exchange", 1, 0).result() == []

    assert servicer.calls == {"Post": 2, "Take": 2}


def test_calls_that_change_something_are_never_tried_again():
    with failing_server(1) as (servicer, endpoint), transport_to(endpoint) as transport:
        with pytest.raises(TransportError, match=rf"PushGrad to server {endpoint} failed: UNAVAIL"):
            transport.push_grad(0, PushChunk([], []), STAMP, None).result()
        with pytest.raises(TransportError, match="PullChanged to server"):
            transport.pull_changed(0, ["t"], 0, 1).result()
        with pytest.raises(TransportError, match="Leave to server"):
            transport.leave(0, 0, 0).result()

    assert servicer.calls == {"PushGrad": 1, "PullChanged": 1, "Leave": 1}


def test_call_that_is_not_answered_ends_at_its_deadline():
    with (
        failing_server(0) as (_, endpoint),
        transport_to(endpoint, rpc_s=0.05, wait_s=0.05) as transport,
        pytest.raises(TransportError, match=rf"Barrier to server {endpoint} failed: DEADLINE_EXC"),
    ):
        transport.barrier(0, "end", 0, 0).result()


def test_server_that_is_not_there_is_waited_for_as_long_as_asked():
    with (
        failing_server(0) as (_, endpoint),
        transport_to(endpoint) as transport,
        pytest.raises(TransportError, match=r"GetStatus to server .* failed: UNIMPLEMENTED"),
    ):
        transport.status(0, wait_s=5.0).result()
    with (
        transport_to(endpoint) as transport,
        pytest.raises(TransportError, match="DEADLINE_EXCEEDED"),
    ):
        transport.status(0, wait_s=0.05).result()


def test_server_raises_its_own_errors_in_the_worker():
    """The second of two servers is asked for keys of the first."""
    spec = TableSpec(
        name="t",
        dim=2,
        initializer=InitializerSpec(),
        optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.1}),
    )
    grad = SparseGrad(KEYS, np.ones((10, 2), np.float32), 1)
    with cluster(num_servers=0) as servers:
        endpoint = servers.start_server(ParameterStore(server_index=1, num_servers=2))
        with transport_to(endpoint) as transport:
            with pytest.raises(UnknownTableError, match=rf"{endpoint}: no table 't'"):
                transport.pull_sparse(0, {"t": KEYS}, Missing.ZEROS, None).result()
            transport.create_table(0, spec).result()
            with pytest.raises(WrongServerError, match="server 1 of 2 was sent"):
                transport.pull_sparse(0, {"t": KEYS}, Missing.ZEROS, None).result()
            with pytest.raises(WrongServerError, match="server 1 of 2 was sent"):
                transport.push_grad(0, PushChunk([("t", grad)], []), STAMP, None).result()
            assert transport.status(0).result().store.tables["t"].rows == 0


def test_closing_ends_calls_that_are_on_their_way():
    with failing_server(0) as (_, endpoint):
        with transport_to(endpoint) as transport:
            call = transport.barrier(0, "end", 0, 0)
        with pytest.raises(TransportError, match="CANCELLED"):
            call.result()


def test_proxy_of_the_environment_is_not_for_servers(monkeypatch):
    """Nothing listens at the proxy's port, so a call that goes there fails."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    with cluster() as servers:
        assert servers.client().status().version == 0
        assert is_serving(servers.endpoints[0], limit_s=10)
