"""The port of the stream, from outside: what strangers, refused callers and slow clients get and cost."""

import asyncio
import gc
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec
from ctr_ps.protos.store import Missing, StreamOffer
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.security.access import metadata_of_token
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.protos.wire.stream import CANCEL, HEAD, KINDS, Failure, failure_of, hello_of
from ctr_ps.ps_server.rpc import stream
from ctr_ps.ps_server.rpc.backlog import Backlog
from tests.support.certificates import CertificateAuthority
from tests.support.cluster import Cluster, one_server
from tests.support.process_figures import resident_bytes
from tests.support.stores import push_id
from tests.support.waiting import wait_until

KEYS = np.arange(4, dtype=np.uint64)
LIMIT_S = 10.0
READER, TRAINER = "token-of-a-reader", "token-of-a-trainer"


class Client:
    """A client made of a socket."""

    def __init__(self, offer: StreamOffer, credentials: Credentials | None = None) -> None:
        self._offer = offer
        self.socket = socket.create_connection(("127.0.0.1", offer.port), timeout=LIMIT_S)
        if credentials is not None:
            context = ssl.create_default_context(cafile=credentials.ca)
            if credentials.certificate:
                context.load_cert_chain(credentials.certificate, credentials.key)
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Closes it so that the server can send nothing more."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def drip(self, data: bytes, seconds: float) -> None:
        """Sends a byte now and then."""
        for i in range(len(data)):
            self.socket.sendall(data[i : i + 1])
            time.sleep(seconds / len(data))

    def hello(self, token: str = "", key: int | None = None) -> "Client":
        metadata = metadata_of_token(token) if token else ()
        self.socket.sendall(hello_of(self._offer.key if key is None else key, metadata))
        assert self.answer() == (self._offer.key, 0, b"")
        return self

    def send(self, call: Call, argument: Any, number: int = 1) -> None:
        body = call.request.encode(argument)
        self.socket.sendall(HEAD.pack(len(body), KINDS[call.path], 0, number) + body)

    def answer(self) -> tuple[int, int, bytes]:
        length, code, _, number = HEAD.unpack(self._receive(HEAD.size))
        return number, code, self._receive(length)

    def failure(self) -> tuple[int, Failure]:
        number, code, body = self.answer()
        return number, failure_of(code, body)

    def is_closed(self) -> bool:
        """Waits for the end of the connection; an answer before it is an error."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:  # it had sent more than was read
            return True

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            received = self.socket.recv(size - len(data))
            assert received, "the server has closed the connection"
            data += received
        return data


@contextmanager
def serving(**settings: Any) -> Iterator[tuple[Cluster, StreamOffer]]:
    with one_server(**settings) as servers:
        offer = servers.servers[0].stream
        assert offer is not None
        yield servers, offer


@pytest.fixture
def server() -> Iterator[Cluster]:
    with serving() as (servers, _):
        yield servers


@pytest.fixture
def connect(server) -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(Client(server.servers[0].stream)))


def pull(at: int | None = None, keys: np.ndarray = KEYS) -> requests.PullSparse:
    return requests.PullSparse(
        keys={"wide": keys}, missing=Missing.ZEROS, at=at, shard_map_epoch=FIRST_EPOCH
    )


def push(rows: int = 4) -> requests.PushGrad:
    keys = np.arange(rows, dtype=np.uint64)
    chunk = PushChunk([("wide", SparseGrad(keys, np.ones((rows, 1), np.float32), 1))], [])
    return requests.PushGrad(chunk=chunk, push_id=push_id(0), shard_map_epoch=FIRST_EPOCH)


def tls(folder: Path) -> tuple[Credentials, Credentials]:
    """Returns those of a server with TLS, and of a caller that trusts it."""
    own = CertificateAuthority(folder).credentials("server", mutual=False)
    return own, Credentials(ca=own.ca)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One frame of `half_of_the_room` leaves none for another."""
    monkeypatch.setattr(stream, "MAX_INCOMPLETE_BYTES", 1000)


def half_of_the_room(number: int = 1) -> bytes:
    body = calls.PULL_SPARSE.request.encode(pull(keys=np.arange(80, dtype=np.uint64)))
    assert 500 < len(body) < 1000
    return HEAD.pack(len(body), KINDS[calls.PULL_SPARSE.path], 0, number) + body


def num_ended(servers: Cluster, call: str, status: str) -> int:
    durations = servers.servers[0]._service.counts[call].durations
    return sum(durations[status].counts) if status in durations else 0


def test_answers_are_those_of_grpc(connect, server):
    client = connect().hello()

    client.send(calls.PUSH_GRAD, push(), number=7)
    assert client.answer()[:2] == (7, 0)
    client.send(calls.PULL_SPARSE, pull(), number=2**64 - 1)
    number, code, body = client.answer()

    assert (number, code) == (2**64 - 1, 0)
    with grpc.insecure_channel(server.endpoints[0]) as channel:
        over_grpc = channel.unary_unary(calls.PULL_SPARSE.path)(
            calls.PULL_SPARSE.request.encode(pull())
        )
    assert body == over_grpc
    assert calls.PULL_SPARSE.answer.decode(body).rows["wide"].any()


def test_error_comes_with_its_class(connect):
    client = connect().hello()

    client.send(
        calls.PULL_SPARSE,
        requests.PullSparse(keys={"none": KEYS}, missing=Missing.ZEROS, shard_map_epoch=1),
    )

    number, failure = client.failure()
    assert (number, failure.code) == (1, grpc.StatusCode.NOT_FOUND)
    assert failure.metadata == (("ctr-ps-error", "UnknownTableError"),)


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
def test_requests_that_come_at_once_are_all_answered(tmp_path, is_secure):
    own, caller = tls(tmp_path) if is_secure else (None, None)
    body = calls.PULL_SPARSE.request.encode(pull())
    kind = KINDS[calls.PULL_SPARSE.path]
    frames = [HEAD.pack(len(body), kind, 0, number) + body for number in range(20)]
    with serving(credentials=own) as (_, offer), closing(Client(offer, caller)) as client:
        client.socket.sendall(hello_of(offer.key, ()) + b"".join(frames))
        assert client.answer() == (offer.key, 0, b"")
        assert [client.answer()[:2] for _ in range(20)] == [(number, 0) for number in range(20)]


def test_client_with_too_many_calls_is_not_read_until_one_is_answered(monkeypatch, connect):
    monkeypatch.setattr(stream, "MAX_CALLS", 2)
    client, other = connect().hello(), connect().hello()
    for number in (1, 2):
        client.send(calls.PULL_SPARSE, pull(at=1), number)
    client.send(calls.PULL_SPARSE, pull(), number=3)
    client.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.answer()
    client.socket.settimeout(LIMIT_S)

    other.send(calls.PUSH_GRAD, replace(push(), at=0))

    assert other.answer()[:2] == (1, 0)
    assert {client.answer()[0] for _ in range(3)} == {1, 2, 3}


def test_call_that_waits_lets_others_pass_and_can_be_cancelled(connect, server):
    client = connect().hello()

    client.send(calls.PULL_SPARSE, pull(at=1), number=1)
    client.send(calls.PULL_SPARSE, pull(), number=2)
    assert client.answer()[0] == 2
    client.socket.sendall(HEAD.pack(0, CANCEL, 0, 1))
    wait_until(lambda: num_ended(server, "PullSparse", "CANCELLED") == 1)
    client.send(calls.PULL_SPARSE, pull(at=1), number=1)  # its number is free again
    client.send(calls.PULL_SPARSE, pull(), number=3)

    assert client.answer()[0] == 3
    assert num_ended(server, "PullSparse", "CANCELLED") == 1


def test_cancelled_call_leaves_no_exception_behind(connect, server, caplog):
    client = connect().hello()
    client.send(calls.PULL_SPARSE, pull(at=1))
    client.socket.sendall(HEAD.pack(0, CANCEL, 0, 1))
    wait_until(lambda: num_ended(server, "PullSparse", "CANCELLED") == 1)
    client.send(calls.PULL_SPARSE, pull(), number=2)
    assert client.answer()[:2] == (2, 0)

    gc.collect()  # then asyncio tells of what nobody asked for

    assert not caplog.records


@pytest.mark.parametrize(
    "beginning",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEAD.pack(9, 5, 0, 1),
        HEAD.pack(2**32 - 1, 0, 0, 0),
        HEAD.pack(12, 0, 0, 0) + bytes(12),
    ],
    ids=["HTTP/1", "HTTP/2", "no hello", "endless hello", "other key"],
)
def test_who_does_not_begin_with_a_hello_is_cut_off(connect, beginning):
    client = connect()
    client.socket.sendall(beginning)
    assert client.is_closed()


def test_who_says_nothing_is_cut_off(monkeypatch, connect, caplog):
    monkeypatch.setattr(stream, "HELLO_S", 0.2)
    client = connect()
    assert client.is_closed()
    assert "no hello came" in caplog.text


def test_who_has_said_hello_may_be_silent(monkeypatch, connect):
    monkeypatch.setattr(stream, "HELLO_S", 0.4)
    client = connect().hello()
    client.socket.settimeout(1.2)
    with pytest.raises(TimeoutError):
        client.is_closed()

    client.send(calls.PULL_SPARSE, pull())
    assert client.answer()[:2] == (1, 0)


@pytest.mark.parametrize(
    "head",
    [
        HEAD.pack(0, 0, 0, 1),
        HEAD.pack(0, KINDS[calls.PUSH_GRAD.path] + 100, 0, 1),
        HEAD.pack(0, 1, 0, 1),
        HEAD.pack(MAX_MESSAGE_BYTES + 1, KINDS[calls.PUSH_GRAD.path], 0, 1),
        HEAD.pack(1, CANCEL, 0, 1),
    ],
    ids=["hello again", "unknown call", "call of gRPC alone", "too long", "cancel with a body"],
)
def test_head_that_breaks_the_rules_ends_the_connection_alone(connect, head):
    client, other = connect().hello(), connect().hello()

    client.socket.sendall(head)

    assert client.is_closed()
    other.send(calls.PULL_SPARSE, pull())
    assert other.answer()[:2] == (1, 0)


def test_cancelled_call_makes_room_for_the_next(monkeypatch, connect):
    monkeypatch.setattr(stream, "MAX_CALLS", 2)
    client = connect().hello()
    waiting = calls.PULL_SPARSE.request.encode(pull(at=1))
    kind = KINDS[calls.PULL_SPARSE.path]
    frames = [HEAD.pack(len(waiting), kind, 0, number) + waiting for number in (1, 2)]

    client.socket.sendall(frames[0] + HEAD.pack(0, CANCEL, 0, 1) + frames[1])
    client.send(calls.PULL_SPARSE, pull(), number=3)

    assert client.answer()[:2] == (3, 0)


@pytest.mark.parametrize("max_calls", [4, 4096])
def test_answers_that_wait_for_their_reader_are_whole(monkeypatch, max_calls):
    """Nothing is cancelled any more, their numbers are free, and others follow."""
    monkeypatch.setattr(stream, "MAX_CALLS", max_calls)
    segment = DenseSegment(length=250_000, initializer=InitializerSpec(kind="uniform", scale=1.0))
    block = DenseSpec(name="big", segments=(segment,), optimizer=OptimizerSpec(name="adagrad"))
    request = requests.PullDense(blocks=["big"], shard_map_epoch=FIRST_EPOCH)
    with serving() as (servers, offer), closing(Client(offer)) as client:
        servers.stores[0].create_dense(block)
        expected = {"big": np.empty(segment.length, np.float32)}
        servers.stores[0].pull_dense(expected).result()
        client.hello()
        for started in (0, 20):
            for number in range(20):
                client.send(calls.PULL_DENSE, request, number)
            wait_until(lambda least=started + 4: num_ended(servers, "PullDense", "OK") >= least)
            for number in range(20):
                client.socket.sendall(HEAD.pack(0, CANCEL, 0, number))
            for number in range(20):
                answered, code, body = client.answer()
                assert (answered, code) == (number, 0)
                pieces = calls.PULL_DENSE.answer.decode(body).pieces
                np.testing.assert_array_equal(pieces["big"], expected["big"])


def test_number_that_is_in_use_ends_the_connection(connect):
    client = connect().hello()
    client.send(calls.PULL_SPARSE, pull(at=1))
    client.send(calls.PULL_SPARSE, pull(at=1))
    assert client.is_closed()


@pytest.mark.parametrize(
    ("max_calls", "begun"), [(8, 5), (0, 5), (0, 70_000)], ids=["taken", "refused", "mostly read"]
)
def test_request_that_does_not_go_on_ends_the_connection(monkeypatch, max_calls, begun):
    monkeypatch.setattr(stream, "HELLO_S", 0.3)
    backlog = Backlog(max_calls=max_calls)
    with serving(backlog=backlog) as (_, offer), closing(Client(offer)) as client:
        client.hello()
        head = HEAD.pack(100_000, KINDS[calls.PUSH_GRAD.path], 0, 1)
        client.socket.sendall(head + bytes(begun))
        assert client.is_closed()


def test_slow_request_that_goes_on_is_answered(monkeypatch):
    monkeypatch.setattr(stream, "HELLO_S", 0.3)
    with serving() as (_, offer), closing(Client(offer)) as client:
        client.hello().drip(half_of_the_room(), 1.2)
        assert client.answer()[:2] == (1, 0)


def test_requests_that_are_not_complete_have_a_bound_together(little_room):
    with (
        serving() as (_, offer),
        closing(Client(offer)) as first,
        closing(Client(offer)) as second,
    ):
        frame = half_of_the_room()
        first.hello().socket.sendall(frame[:-1])
        second.hello().socket.sendall(frame)
        second.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            second.answer()
        second.socket.settimeout(LIMIT_S)

        first.socket.sendall(frame[-1:])

        assert first.answer()[:2] == (1, 0)
        assert second.answer()[:2] == (1, 0)


def test_request_that_waits_for_room_is_read_whole_whatever_is_answered_meanwhile(little_room):
    with (
        serving() as (servers, offer),
        closing(Client(offer)) as first,
        closing(Client(offer)) as second,
        closing(Client(offer)) as third,
    ):
        frame = half_of_the_room(2)
        second.hello().send(calls.PULL_SPARSE, pull(at=1))
        third.hello().send(calls.PULL_SPARSE, pull())  # so that the call before has begun
        assert third.answer()[:2] == (1, 0)
        first.hello().socket.sendall(frame[:-1])
        third.send(calls.PULL_SPARSE, pull())
        assert third.answer()[:2] == (1, 0)
        second.socket.sendall(frame)
        wait_until(lambda: servers.servers[0]._stream.when_room)

        third.send(calls.PUSH_GRAD, replace(push(), at=0))
        assert third.answer()[:2] == (1, 0)
        assert second.answer()[:2] == (1, 0)
        wait_until(lambda: not servers.servers[0]._stream.tasks)
        third.send(calls.PULL_SPARSE, pull())  # so that the second had its turn to be read
        assert third.answer()[:2] == (1, 0)
        first.socket.sendall(frame[-1:])

        assert first.answer()[:2] == second.answer()[:2] == (2, 0)


def test_request_that_waits_for_room_has_not_stalled(monkeypatch, little_room):
    monkeypatch.setattr(stream, "HELLO_S", 0.4)
    with (
        serving() as (servers, offer),
        closing(Client(offer)) as first,
        closing(Client(offer)) as second,
    ):
        frame = half_of_the_room()
        first.hello().socket.sendall(frame[:-20])
        wait_until(lambda: servers.servers[0]._stream._incomplete_bytes)
        second.hello().socket.sendall(frame)
        first.drip(frame[-20:], 1.5)
        assert first.answer()[:2] == second.answer()[:2] == (1, 0)


def test_room_of_a_request_that_is_broken_off_is_free_again(little_room, connect, server):
    first, second = connect().hello(), connect().hello()
    first.socket.sendall(half_of_the_room()[:-1])
    wait_until(lambda: server.servers[0]._stream._incomplete_bytes)

    first.close()

    second.socket.sendall(half_of_the_room())
    assert second.answer()[:2] == (1, 0)


def test_request_that_waited_for_room_in_vain_holds_up_no_other(little_room, connect, server):
    port = server.servers[0]._stream
    first, gone, other = (connect().hello() for _ in range(3))
    first.socket.sendall(half_of_the_room()[:-1])
    wait_until(lambda: port._incomplete_bytes)
    gone.send(calls.PULL_SPARSE, pull(at=1), number=2)
    for number, client in enumerate((gone, other), start=1):
        client.socket.sendall(half_of_the_room())
        wait_until(lambda least=number: len(port.when_room) == least)

    gone.reset()  # which the server sees when it answers
    with grpc.insecure_channel(server.endpoints[0]) as channel:
        push_grad = channel.unary_unary(calls.PUSH_GRAD.path)
        push_grad(calls.PUSH_GRAD.request.encode(replace(push(), at=0)))
    wait_until(lambda: len(port._connections) == 2)
    first.socket.sendall(half_of_the_room()[-1:])

    assert first.answer()[:2] == other.answer()[:2] == (1, 0)


def test_caller_without_access_is_refused_before_its_request_takes_memory(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"reader {READER}\ntrainer {TRAINER}\n")
    with (
        serving(credentials=Credentials(token_file=str(tokens))) as (_, offer),
        ExitStack() as stack,
    ):
        reader, trainer, nobody = (stack.enter_context(closing(Client(offer))) for _ in range(3))
        reader.hello(READER).send(calls.PULL_SPARSE, pull())
        assert reader.answer()[:2] == (1, 0)
        trainer.hello(TRAINER).send(calls.PUSH_GRAD, push())
        assert trainer.answer()[:2] == (1, 0)
        nobody.hello().send(calls.PULL_SPARSE, pull())
        assert nobody.failure()[1].code is grpc.StatusCode.UNAUTHENTICATED

        tracemalloc.start()
        try:
            length = MAX_MESSAGE_BYTES
            piece = bytes(2**16)
            reader.socket.sendall(HEAD.pack(length, KINDS[calls.PUSH_GRAD.path], 0, 2))
            for _ in range(length // len(piece)):
                reader.socket.sendall(piece)
            assert reader.failure()[1].code is grpc.StatusCode.PERMISSION_DENIED
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        reader.send(calls.PULL_SPARSE, pull(), number=3)
        assert reader.answer()[:2] == (3, 0)


def test_full_backlog_refuses_before_the_request_is_read():
    with (
        serving(backlog=Backlog(max_calls=0)) as (servers, offer),
        closing(Client(offer)) as client,
    ):
        client.hello().send(calls.PUSH_GRAD, push())

        failure = client.failure()[1]

        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(failure.metadata)["ctr-ps-retry-after"] == "1000"
        assert num_ended(servers, "PushGrad", "RESOURCE_EXHAUSTED") == 1


def test_client_that_reads_no_answers_is_not_read_any_more(monkeypatch):
    monkeypatch.setattr(stream, "MAX_UNSENT_BYTES", 2**20)
    with serving() as (servers, offer), closing(Client(offer)) as client:
        client.hello()
        keys = np.arange(20_000, dtype=np.uint64)
        request = calls.PULL_SPARSE.request.encode(pull(keys=keys))
        sent = 0
        client.socket.settimeout(1.0)
        with suppress(TimeoutError):
            while sent < 1000:
                sent += 1
                head = HEAD.pack(len(request), KINDS[calls.PULL_SPARSE.path], 0, sent)
                client.socket.sendall(head + request)
        assert num_ended(servers, "PullSparse", "OK") < sent < 1000

        client.socket.settimeout(LIMIT_S)
        answered = {client.answer()[0] for _ in range(sent - 1)}
        assert answered == set(range(1, sent))


def test_refused_client_that_reads_no_answers_is_not_read_any_more(monkeypatch):
    monkeypatch.setattr(stream, "MAX_CALLS", 16)
    with (
        serving(backlog=Backlog(max_calls=0)) as (servers, offer),
        closing(Client(offer)) as client,
    ):
        client.hello().socket.settimeout(1.0)
        heads = HEAD.pack(0, KINDS[calls.PUSH_GRAD.path], 0, 1) * 100
        with suppress(TimeoutError):
            for _ in range(2_000):
                client.socket.sendall(heads)
        assert 0 < len(servers.servers[0]._stream.tasks) <= 16


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_request_that_is_broken_off_keeps_no_memory(is_reset):
    with serving() as (servers, offer):
        port = servers.servers[0]._stream
        gc.disable()
        try:
            before = resident_bytes()
            for _ in range(20):
                with closing(Client(offer)) as client:
                    head = HEAD.pack(MAX_MESSAGE_BYTES, KINDS[calls.PUSH_GRAD.path], 0, 1)
                    client.hello().socket.sendall(head + bytes(2**16))
                    if is_reset:
                        client.reset()
                wait_until(lambda: not port._connections)
            assert resident_bytes() - before < 6 * MAX_MESSAGE_BYTES
        finally:
            gc.enable()


def test_connections_beyond_the_limit_are_closed(monkeypatch):
    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.connection_limit", lambda: 4)
    with serving() as (_, offer), ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(Client(offer))) for _ in range(3))
        first.hello()
        second.hello()
        assert third.is_closed()


def test_server_that_ends_answers_what_it_has_begun(server, connect):
    client = connect().hello()
    client.send(calls.PULL_SPARSE, pull())
    assert client.answer()[:2] == (1, 0)

    server.stop_server(0)

    assert client.is_closed()


def test_server_that_ends_answers_a_call_that_waits_within_its_grace(server, connect):
    port = server.servers[0]._stream
    client, other = connect().hello(), connect().hello()
    client.send(calls.PULL_SPARSE, pull(at=1))
    wait_until(lambda: port.tasks)

    stopping = asyncio.run_coroutine_threadsafe(port.stop(LIMIT_S), server._loop._loop)
    wait_until(lambda: port._listener is None)
    other.send(calls.PUSH_GRAD, replace(push(), at=0))

    assert client.answer()[:2] == (1, 0)
    stopping.result(LIMIT_S)


def test_certificate_decides_over_tls(tmp_path):
    authority = CertificateAuthority(tmp_path)
    reader, trainer, nobody = (
        authority.credentials(name, common_name=name)
        for name in ("ctr-ps-reader.host-1", "ctr-ps-trainer", "guest")
    )
    with serving(credentials=trainer) as (_, offer), ExitStack() as stack:

        def answer(credentials: Credentials, call: Call, argument: Any) -> Any:
            client = stack.enter_context(closing(Client(offer, credentials))).hello()
            client.send(call, argument)
            _, code, body = client.answer()
            return code or body

        body = answer(reader, calls.PULL_SPARSE, pull())
        assert calls.PULL_SPARSE.answer.decode(body).rows["wide"].shape == (4, 1)
        assert isinstance(answer(trainer, calls.PUSH_GRAD, push(rows=50_000)), bytes)
        refused = grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert answer(reader, calls.PUSH_GRAD, push()) == refused
        assert (
            answer(nobody, calls.PULL_SPARSE, pull()) == (grpc.StatusCode.UNAUTHENTICATED.value[0])
        )


def test_end_of_tls_ends_the_connection(tmp_path):
    own, caller = tls(tmp_path)
    with serving(credentials=own) as (servers, offer), closing(Client(offer, caller)) as client:
        client.hello()
        with suppress(OSError):  # the server only closes
            client.socket.unwrap()
        wait_until(lambda: not servers.servers[0]._stream._connections)


def test_who_shows_no_trusted_certificate_is_cut_off(tmp_path):
    authority, stranger = CertificateAuthority(tmp_path), CertificateAuthority(tmp_path, "stranger")
    own = authority.credentials("server", common_name="ctr-ps-trainer")
    theirs = stranger.credentials("stranger", common_name="ctr-ps-admin")
    with serving(credentials=own) as (_, offer):
        for shown in (Credentials(ca=own.ca), replace(theirs, ca=own.ca)):
            # Of TLS 1.3 a client has shaken hands before its certificate is refused.
            with pytest.raises(ssl.SSLError), closing(Client(offer, shown)) as client:
                client.hello()
        with closing(Client(offer)) as client:
            client.socket.sendall(hello_of(offer.key, ()))
            assert client.is_closed()


def test_token_is_asked_for_over_tls_too(tmp_path):
    own, caller = tls(tmp_path)
    with serving(credentials=replace(own, token=TRAINER)) as (_, offer), ExitStack() as stack:
        knows, guesses = (stack.enter_context(closing(Client(offer, caller))) for _ in range(2))
        knows.hello(TRAINER).send(calls.PULL_SPARSE, pull())
        assert knows.answer()[:2] == (1, 0)
        guesses.hello("another").send(calls.PULL_SPARSE, pull())
        assert guesses.failure()[1].code is grpc.StatusCode.UNAUTHENTICATED


def test_handshake_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "HELLO_S", 3600.0)
    own, _ = tls(tmp_path)
    with serving(credentials=own) as (_, offer), closing(Client(offer)) as client:
        record = b"\x16\x03\x01\x40\x00" + bytes(2**14)  # of a client's hello of 130,000 bytes
        with suppress(OSError):
            client.socket.sendall(record[:5] + b"\x01\x01\xfb\xd0" + record[9:] + 7 * record)
        assert client.is_closed()


def test_answers_over_tls_leave_small_buffers(tmp_path):
    own, caller = tls(tmp_path)
    request = pull(keys=np.arange(500_000, dtype=np.uint64))
    with serving(credentials=own) as (_, offer), ExitStack() as stack:
        clients = [stack.enter_context(closing(Client(offer, caller))).hello() for _ in range(20)]
        clients[0].send(calls.PULL_SPARSE, request)
        assert clients[0].answer()[:2] == (1, 0)
        before = resident_bytes()
        for client in clients[1:]:
            client.send(calls.PULL_SPARSE, request)
            assert client.answer()[:2] == (1, 0)
        assert resident_bytes() - before < 2**20 * len(clients)  # of answers of 2 MiB


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
def test_frames_that_only_cancel_leave_others_their_turn(tmp_path, is_secure):
    own, caller = tls(tmp_path) if is_secure else (None, None)
    endless = HEAD.pack(0, CANCEL, 0, 9) * 20_000
    is_over = threading.Event()

    def send() -> None:
        with suppress(OSError):
            while not is_over.is_set():
                client.socket.sendall(endless)

    with serving(credentials=own) as (_, offer), ExitStack() as stack:
        client = stack.enter_context(closing(Client(offer, caller))).hello()
        sender = threading.Thread(target=send)
        sender.start()
        stack.callback(sender.join)
        stack.callback(is_over.set)
        other = stack.enter_context(closing(Client(offer, caller))).hello()
        start = time.monotonic()
        for number in range(20):
            other.send(calls.PULL_SPARSE, pull(), number=number)
            assert other.answer()[:2] == (number, 0)
        assert time.monotonic() - start < 5.0


def test_all_interfaces_are_those_of_grpc(server):
    """IPv6 among them, where there is any."""
    service = server.servers[0]._service

    async def reach() -> None:
        port = stream.StreamPort(service, Credentials(), max_connections=4)
        offer = port.start("0.0.0.0", 0)
        hosts = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
        for host in hosts:
            reader, writer = await asyncio.open_connection(host, offer.port)
            writer.write(hello_of(offer.key, ()))
            assert HEAD.unpack(await reader.readexactly(HEAD.size))[3] == offer.key
            writer.close()
        await port.stop(0.0)

    asyncio.run(reach())


def test_who_does_not_shake_hands_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "HELLO_S", 0.2)
    own, _ = tls(tmp_path)
    with serving(credentials=own) as (_, offer), closing(Client(offer)) as client:
        client.socket.sendall(b"\x16\x03\x01")
        assert client.is_closed()
