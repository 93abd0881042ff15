"""Calls over gRPC when servers fail: retries, deadlines, and what is raised."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from queue import Queue
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import AbortedError, TransportError, UnknownTableError, WrongServerError
from ctr_ps.protos.futures import results, results_of_all_ended
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Message, Missing, Pulled
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.security.access import token_in
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.rpc.backlog import RETRY_AFTER_S, Backlog
from ctr_ps.ps_server.rpc.health import why_not_serving
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.grpc_transport import SENDS_AGAIN, Deadlines, GrpcTransport
from ctr_ps.ps_worker.cluster.joined_worker import abort_on_each
from ctr_ps.ps_worker.cluster.slow_calls import BUDGET_S, BUDGET_WITH_LOG_S, LONGEST_PAUSE_S
from tests.support.cluster import Cluster, cluster
from tests.support.stores import joined, member, push_id

PUSH_ID = push_id(sequence=0)
KEYS = np.arange(10, dtype=np.uint64)
END = requests.Barrier(name="end", member=member(0), step=0, number=1)
LARGE = Message(sender=0, receiver=1, sequence=0, content=bytes(2**20))


def pull_of(**keys: Keys) -> requests.PullSparse:
    return requests.PullSparse(keys=keys, missing=Missing.ZEROS, shard_map_epoch=FIRST_EPOCH)


def push_of(chunk: PushChunk) -> requests.PushGrad:
    return requests.PushGrad(chunk=chunk, push_id=PUSH_ID, shard_map_epoch=FIRST_EPOCH)


class FailingService:
    """Is unavailable for the first calls of each kind, and never answers a barrier."""

    def __init__(self, num_failures: int) -> None:
        self._num_failures = num_failures
        self.calls: Counter[str] = Counter()
        self.ending = Event()
        self.handler = grpc.method_handlers_generic_handler(
            calls.SERVICE,
            {
                call.name: grpc.unary_unary_rpc_method_handler(partial(self._answer, call))
                for call in calls.CALLS.values()
                if call is not calls.GET_STATUS
            },
        )

    def _answer(self, call: Call, _: bytes, context: grpc.ServicerContext) -> bytes:
        if call is calls.BARRIER:
            self.ending.wait(20)
            return b""
        self.calls[call.name] += 1
        if self.calls[call.name] <= self._num_failures:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        return b""


@contextmanager
def failing_server(
    num_failures: int, kind: type[FailingService] = FailingService
) -> Iterator[tuple[FailingService, str]]:
    service = kind(num_failures)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((service.handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield service, f"127.0.0.1:{port}"
        service.ending.set()
        server.stop(None).wait(20)


@contextmanager
def transport_to(
    endpoint: str, *, retry_s: float = BUDGET_S, **deadlines: float
) -> Iterator[GrpcTransport]:
    transport = GrpcTransport([endpoint], Deadlines(**deadlines), retry_s=retry_s)
    try:
        yield transport
    finally:
        transport.close()


def test_abort_waits_no_longer_for_a_server_that_has_taken_the_place_and_hangs():
    class Hanging(FailingService):
        def _answer(self, call: Call, request: bytes, context: grpc.ServicerContext) -> bytes:
            if call is calls.ABORT:
                self.ending.wait(20)
            return super()._answer(call, request, context)

    with failing_server(0, Hanging) as (service, endpoint), transport_to(endpoint) as transport:
        begun = time.monotonic()
        join = requests.Join(member=member(0), terms={})
        abort_on_each(transport, join, AbortedError("no files"), ready_s=0.5)
        assert time.monotonic() - begun < 10
        assert service.calls["Join"] == 1


def test_pull_is_tried_again_when_a_server_is_unavailable():
    with failing_server(2) as (service, endpoint), transport_to(endpoint) as transport:
        assert transport.call(0, calls.PULL_SPARSE, pull_of()).result() == Pulled({}, 0)

    assert service.calls == {"PullSparse": 3}


def test_call_is_sent_again_whose_deadline_passed_while_this_process_was_stopped():
    class Late(FailingService):
        def _answer(self, call: Call, _: bytes, context: grpc.ServicerContext) -> bytes:
            self.calls[call.name] += 1
            if self.calls[call.name] == 1:
                self.ending.wait(20)
            return b""

    with failing_server(0, Late) as (service, endpoint):

        def clock() -> float:
            """A minute and more passes with the first call."""
            return 100.0 * sum(service.calls.values())

        transport = GrpcTransport([endpoint], Deadlines(rpc_s=2.0), stream=False, clock=clock)
        with closing(transport):
            assert transport.call(0, calls.PULL_SPARSE, pull_of()).result() == Pulled({}, 0)
    assert service.calls == {"PullSparse": 2}


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        # Over gRPC's default buffer for retries, of 256 KiB.
        (calls.PULL_SPARSE, pull_of(t=np.arange(100_000, dtype=np.uint64))),
        (calls.POST, requests.Post(exchange="e", message=LARGE, member=member())),
        (calls.TAKE, requests.Take(exchange="e", member=member(1), received=0)),
        (calls.PUSH_GRAD, push_of(PushChunk([], []))),
        (calls.LEAVE, requests.Leave(member=member(), step=0)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_calls_are_tried_again_however_large_and_though_they_change_something(
    call: Call, argument: object
) -> None:
    """Servers know them again."""
    with failing_server(1) as (service, endpoint), transport_to(endpoint) as transport:
        transport.call(0, call, argument).result()
        assert transport.retries == 1

    assert service.calls == {call.name: 2}


def test_call_that_is_not_answered_ends_at_its_deadline():
    with (
        failing_server(0) as (_, endpoint),
        transport_to(endpoint, rpc_s=0.05, wait_s=0.05) as transport,
        pytest.raises(TransportError, match=rf"Barrier to server {endpoint} failed: DEADLINE_EXC"),
    ):
        transport.call(0, calls.BARRIER, END).result()


@pytest.mark.parametrize(("at", "expected"), [(None, 1.0), (3, 11.0)])
def test_push_with_pulls_has_the_deadline_of_its_pulls(at: int | None, expected: float) -> None:
    """As a part of a step it waits for other workers."""
    pulls = requests.PushPull(
        push=push_of(PushChunk([], [])),
        sparse=requests.PullSparse(keys={}, missing=Missing.INITIAL, at=at, shard_map_epoch=1),
        dense=requests.PullDense(blocks=[], at=at, shard_map_epoch=FIRST_EPOCH),
    )

    assert Deadlines(rpc_s=1.0, wait_s=10.0).of(calls.PUSH_PULL, pulls) == expected


def test_declaring_has_the_time_that_kernels_take() -> None:
    for call in (calls.CREATE_TABLE, calls.CREATE_DENSE):
        assert Deadlines(rpc_s=1.0, wait_s=10.0).of(call, None) == 11.0


def test_server_that_is_not_there_is_waited_for_as_long_as_asked():
    with (
        failing_server(0) as (_, endpoint),
        transport_to(endpoint) as transport,
        pytest.raises(TransportError, match=r"GetStatus to server .* failed: UNIMPLEMENTED"),
    ):
        transport.call(0, calls.GET_STATUS, None, ready_s=5.0).result()
    with (
        transport_to(endpoint) as transport,
        pytest.raises(TransportError, match="DEADLINE_EXCEEDED"),
    ):
        transport.call(0, calls.GET_STATUS, None, ready_s=0.05).result()


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
        endpoint = servers.start_server(joined(ParameterStore(server_index=1, num_servers=2)))
        with transport_to(endpoint) as transport:
            with pytest.raises(UnknownTableError, match=rf"{endpoint}: no table 't'"):
                transport.call(0, calls.PULL_SPARSE, pull_of(t=KEYS)).result()
            transport.call(0, calls.CREATE_TABLE, requests.CreateTable(spec=spec)).result()
            with pytest.raises(WrongServerError, match="server 1 of 2 received"):
                transport.call(0, calls.PULL_SPARSE, pull_of(t=KEYS)).result()
            with pytest.raises(WrongServerError, match="server 1 of 2 received"):
                transport.call(0, calls.PUSH_GRAD, push_of(PushChunk([("t", grad)], []))).result()
            assert transport.call(0, calls.GET_STATUS, None).result().store.tables["t"].rows == 0


def test_closing_ends_calls_that_are_on_their_way():
    with failing_server(0) as (_, endpoint):
        with transport_to(endpoint) as transport:
            call = transport.call(0, calls.BARRIER, END)
        with pytest.raises(TransportError, match="CANCELLED"):
            call.result()


def test_proxy_of_the_environment_is_not_for_servers(monkeypatch):
    """Nothing listens at the proxy's port, so a call that goes there fails."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    with cluster() as servers:
        assert servers.client().status().version == 0
        assert why_not_serving(servers.endpoints[0], limit_s=10) == ""


class LostReply(grpc.RpcError):
    """A call that was carried out, but whose reply is lost."""

    def __init__(self, call: grpc.Future, code: grpc.StatusCode) -> None:
        self._call = call
        self._code = code

    def add_done_callback(self, done: Callable[["LostReply"], None]) -> None:
        self._call.add_done_callback(lambda _: done(self))

    def exception(self) -> "LostReply":
        return self

    def result(self, timeout: float | None = None) -> NoReturn:
        self._call.result(timeout)
        raise self

    def done(self) -> bool:
        return bool(self._call.done())

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "the connection was lost"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


def test_server_that_is_started_again_answers_the_call():
    with cluster() as servers, transport_to_first(servers) as transport:
        servers.stop_server(0)
        call = transport.call(0, calls.PULL_SPARSE, pull_of())
        starting = Timer(0.5, servers.start_again, [0])
        starting.start()

        assert call.result() == Pulled({}, 0)

        starting.join()
        assert transport.retries > 0


def test_one_thread_takes_the_answers_of_calls_that_follow_one_another():
    with cluster() as servers:
        others = set(threading.enumerate())
        with transport_to(servers.endpoints[0]) as transport:

            def threads_after_a_call() -> set[threading.Thread]:
                transport.call(0, calls.GET_STATUS, None).result()
                return set(threading.enumerate()) - others

            for _ in range(2):
                first = threads_after_a_call()
                assert len(first) == 1
                assert all(threads_after_a_call() == first for _ in range(5))
                servers.stop_server(0)
                servers.start_again(0)


@contextmanager
def server_without_methods() -> Iterator[tuple[Queue[grpc.HandlerCallDetails], str]]:
    """Yields what it is asked for, and its endpoint."""
    asked: Queue[grpc.HandlerCallDetails] = Queue()

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> None:
            asked.put(details)

    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((Handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield asked, f"127.0.0.1:{port}"
        server.stop(None).wait(20)


WATCH = "/grpc.health.v1.Health/Watch"


def test_server_without_health_is_asked_to_watch_it_once():
    with server_without_methods() as (asked, endpoint), transport_to(endpoint) as transport:
        for _ in range(3):
            with pytest.raises(TransportError, match="UNIMPLEMENTED"):
                transport.call(0, calls.GET_STATUS, None).result()

    assert [each.method for each in asked.queue].count(WATCH) == 1


def test_open_call_shows_the_token_so_that_an_address_has_any_number_of_workers():
    credentials = Credentials(token="trainer-0123456789")
    with (
        server_without_methods() as (asked, endpoint),
        closing(GrpcTransport([endpoint], credentials=credentials)) as transport,
    ):
        with pytest.raises(TransportError, match="UNIMPLEMENTED"):
            transport.call(0, calls.GET_STATUS, None).result()
        watch = next(
            each for each in iter(lambda: asked.get(timeout=20), None) if each.method == WATCH
        )
        assert token_in(watch.invocation_metadata) == credentials.token


def test_server_that_stays_away_is_named_with_the_tries_within_the_budget():
    with cluster() as servers, transport_to_first(servers, retry_s=0.5) as transport:
        servers.stop_server(0)
        begun = time.monotonic()

        with pytest.raises(
            TransportError,
            match=rf"Leave to server {servers.endpoints[0]} failed: UNAVAILABLE.*"
            r"tried \d+ times in 0.5 s",
        ):
            transport.call(0, calls.LEAVE, requests.Leave(member=member(), step=0)).result()

        assert time.monotonic() - begun < 0.5 + LONGEST_PAUSE_S + 1.0
        assert transport.retries > 1


def test_closing_ends_the_pause_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what the last try did."""
    monkeypatch.setattr("ctr_ps.ps_worker.cluster.slow_calls.FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("ctr_ps.ps_worker.cluster.slow_calls.LONGEST_PAUSE_S", 60.0)
    with failing_server(1) as (service, endpoint), transport_to(endpoint, retry_s=60) as transport:
        call = transport.call(0, calls.PULL_SPARSE, pull_of())
        while SENDS_AGAIN not in {thread.name for thread in threading.enumerate()}:
            assert not call.wait(0.01)

        transport.close()

        with pytest.raises(TransportError, match=r"PullSparse to server .*UNAVAILABLE: going down"):
            call.result()
        with pytest.raises(TransportError, match=r"PullSparse to server .*: this client is closed"):
            transport.call(0, calls.PULL_SPARSE, pull_of()).result()
        assert SENDS_AGAIN not in {each.name for each in threading.enumerate()}
    assert service.calls == {"PullSparse": 1}


def test_call_is_sent_again_though_nobody_looks_at_its_answer() -> None:
    """No thread and no reference of it stays behind."""
    with failing_server(2) as (service, endpoint):
        transport = GrpcTransport([endpoint], retry_s=BUDGET_S)
        call = transport.call(0, calls.LEAVE, requests.Leave(member=member(), step=0))

        assert call.wait(10.0)

        assert service.calls == {"Leave": 3}
        assert transport.retries == 2
        transport.close()
        assert SENDS_AGAIN not in {each.name for each in threading.enumerate()}
        freed = weakref.ref(transport)
        del transport, call
        assert freed() is None


def test_call_that_waits_at_one_server_keeps_no_other_from_being_sent_again() -> None:
    """As a barrier whose last worker comes to a server that is being started again."""
    with (
        failing_server(0) as (waiting, endpoint),
        failing_server(1) as (away, other),
        closing(GrpcTransport([endpoint, other], retry_s=BUDGET_S)) as transport,
        ThreadPoolExecutor(1) as pool,
    ):
        barrier = transport.call(0, calls.BARRIER, END)
        leave = transport.call(1, calls.LEAVE, requests.Leave(member=member(), step=0))
        both = pool.submit(results_of_all_ended, [barrier, leave])

        assert leave.wait(10.0)
        assert not both.done()

        waiting.ending.set()
        assert both.result(10.0) == [0, None]
    assert away.calls == {"Leave": 2}


def test_error_of_one_server_does_not_wait_for_another() -> None:
    with (
        failing_server(0) as (_, waiting),
        cluster() as servers,
        closing(GrpcTransport([waiting, servers.endpoints[0]])) as transport,
    ):
        servers.stores[0].abort(0, "the disk is gone")
        answers = [
            transport.call(0, calls.BARRIER, END),
            transport.call(1, calls.WAIT_VERSION, requests.WaitVersion(at=1)),
        ]

        with pytest.raises(AbortedError, match="the disk is gone"):
            results(answers)
        with pytest.raises(AbortedError, match="the disk is gone"):
            answers[0].result()  # it waits no more


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_push_whose_reply_was_lost_is_not_applied_twice(code, monkeypatch):
    with cluster() as servers:
        store = servers.stores[0]
        servers.client()  # joins
        with transport_to_first(servers) as transport:
            send = transport.connection.servers[0].methods["PushGrad"].future
            replies = iter([code])

            def send_once(*args: Any, **options: Any) -> Any:
                sent = send(*args, **options)
                return next((LostReply(sent, lost) for lost in replies), sent)

            monkeypatch.setitem(
                transport.connection.servers[0].methods,
                "PushGrad",
                SimpleNamespace(future=send_once),
            )
            call = transport.call(0, calls.PUSH_GRAD, push_of(PushChunk([], [])))

            assert call.result() == 1

        status = store.status()
        assert (status.version, status.examples) == (1, {0: PUSH_ID.examples})
        assert transport.retries == 1


@contextmanager
def transport_to_first(servers: Cluster, **settings: float) -> Iterator[GrpcTransport]:
    """To a first server that runs, and has answered."""
    with transport_to(servers.endpoints[0], **settings) as transport:
        transport.call(0, calls.GET_STATUS, None, ready_s=10.0).result()
        yield transport


@pytest.mark.parametrize(
    ("retry_s", "servers_recover", "expected"),
    [(None, False, BUDGET_S), (None, True, BUDGET_WITH_LOG_S), (3.0, True, 3.0)],
)
def test_servers_that_come_back_are_waited_for_longer(retry_s, servers_recover, expected):
    transport = GrpcTransport(["127.0.0.1:1"], retry_s=retry_s)
    transport.servers_recover = servers_recover

    assert transport.call(0, calls.GET_STATUS, None)._retry.budget_s == expected
    transport.close()


def test_call_with_a_time_of_its_own_is_not_sent_again() -> None:
    """Whoever looks for a server, or renews a lease, does so again by itself."""
    with (
        failing_server(1) as (service, endpoint),
        transport_to(endpoint) as transport,
        pytest.raises(TransportError, match="going down"),
    ):
        transport.call(0, calls.PULL_SPARSE, pull_of(), ready_s=5.0).result()

    assert service.calls == {"PullSparse": 1}


def test_call_to_an_overloaded_server_is_sent_again_when_it_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    with cluster(num_servers=0) as servers:
        backlog = Backlog(max_calls=0)
        endpoint = servers.start_server(joined(ParameterStore()), backlog)
        with transport_to(endpoint) as transport:

            def after(seconds: float, send: Callable[[], None]) -> None:
                pauses.append(seconds)
                backlog._max_calls = 1
                send()

            monkeypatch.setattr(transport.later, "after", after)
            assert transport.call(0, calls.PULL_SPARSE, pull_of()).result() == Pulled({}, 0)

    assert pauses == [RETRY_AFTER_S]
