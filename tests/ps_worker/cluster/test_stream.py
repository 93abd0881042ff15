"""Calls over the stream to a server: which go there, and what becomes of them when it is lost."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError, TransportError, UnknownTableError
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import Missing, StreamOffer
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.protos.wire.stream import HEAD, hello_of
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster import stream
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport, _Answer
from ctr_ps.ps_worker.cluster.stream import StreamCall, StreamChannel
from tests.support.certificates import CertificateAuthority
from tests.support.cluster import Cluster, one_server, open_stream
from tests.support.garbage import num_alive, without_collector
from tests.support.stores import joined
from tests.support.waiting import wait_until

KEYS = np.arange(4, dtype=np.uint64)
LIMIT_S = 10.0
TLS_HANDSHAKE = b"\x16\x03\x01"


def pull(table: str = "wide", at: int | None = None) -> requests.PullSparse:
    return requests.PullSparse(
        keys={table: KEYS}, missing=Missing.ZEROS, at=at, shard_map_epoch=FIRST_EPOCH
    )


@pytest.fixture(params=["plain", "tls"])
def credentials(request, tmp_path: Path) -> Credentials:
    if request.param == "plain":
        return Credentials()
    return CertificateAuthority(tmp_path).credentials("both", common_name="ctr-ps-trainer")


@pytest.fixture
def servers(credentials: Credentials, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(Credentials, "from_environment", lambda: credentials)  # of all that follows
    with one_server(credentials=credentials) as servers:
        yield servers


@contextmanager
def transport_to(
    servers: Cluster, **settings: Any
) -> Iterator[tuple[GrpcTransport, StreamChannel]]:
    with closing(GrpcTransport(servers.endpoints, retry_s=LIMIT_S, **settings)) as transport:
        transport.call(0, calls.PULL_SPARSE, pull()).result()
        yield transport, transport.connection.servers[0].channel


def test_calls_that_move_data_go_over_the_stream_once_it_is_open(servers):
    with transport_to(servers) as (transport, channel):
        open_stream(channel)
        transport.connection.servers[0].methods["PullSparse"]._method = None  # gRPC's

        answers = [transport.call(0, calls.PULL_SPARSE, pull()) for _ in range(20)]

        assert all(answer.result().rows["wide"].shape == (4, 1) for answer in answers)


@pytest.mark.parametrize("has_stream", [True, False])
def test_answers_are_freed_without_the_garbage_collector(servers, has_stream):
    with transport_to(servers, stream=has_stream) as (transport, channel), without_collector():
        if has_stream:
            open_stream(channel)
        for _ in range(3):
            transport.call(0, calls.PULL_SPARSE, pull()).result()

        # The last one may still be in the hands of the thread that received it.
        wait_until(lambda: num_alive(_Answer) <= 1 and num_alive(StreamCall) <= 1)


def test_error_is_that_of_the_server(servers):
    with transport_to(servers) as (transport, channel):
        open_stream(channel)
        with pytest.raises(UnknownTableError, match="'none'"):
            transport.call(0, calls.PULL_SPARSE, pull("none")).result()


def test_server_that_starts_again_elsewhere_is_found_again(servers, credentials):
    with transport_to(servers) as (transport, channel):
        before = open_stream(channel)
        waiting = transport.call(0, calls.PULL_SPARSE, pull(at=1))
        offer = servers.servers[0].stream

        servers.stop_server(0)
        servers.start_again(0, credentials=credentials)

        assert servers.servers[0].stream != offer
        open_stream(channel, before=before)
        assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].shape == (4, 1)
        wait_until(lambda: transport.retries != 0)  # it is sent again after a pause
        assert not waiting.wait(0.0)


def test_another_server_at_the_port_gets_no_call(servers, credentials, monkeypatch):
    other = joined(ParameterStore())
    servers.start_server(other, credentials=credentials)
    offers = [server.stream for server in servers.servers]
    stale = StreamOffer(port=offers[1].port, key=offers[0].key)
    monkeypatch.setattr(StreamChannel, "_ask", lambda _: stale)
    monkeypatch.setattr(stream, "PAUSE_S", 0.01)
    with closing(GrpcTransport(servers.endpoints[:1])) as transport:
        for _ in range(20):
            assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].size == 4
            assert transport.connection.servers[0].channel.stream is None


def test_port_that_cannot_be_reached_is_told_and_tried_ever_more_rarely(
    servers, monkeypatch, caplog
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    asked = []

    def ask(_: StreamChannel) -> StreamOffer:
        asked.append(time.monotonic())
        return StreamOffer(port=closed, key=7)

    monkeypatch.setattr(StreamChannel, "_ask", ask)
    monkeypatch.setattr(stream, "PAUSE_S", 0.01)
    with transport_to(servers) as (transport, _):
        wait_until(lambda: len(asked) >= 6)

        assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].size == 4

    assert asked[5] - asked[4] >= 0.16
    (warning,) = caplog.messages
    assert warning.startswith(f"cannot reach port {closed} of 127.0.0.1, calls use gRPC: ")


def test_server_without_a_stream_is_asked_once():
    with one_server(stream_port=None) as servers, transport_to(servers) as (transport, channel):
        channel._thread.join(LIMIT_S)

        assert not channel._thread.is_alive()
        assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].size == 4
    assert servers.servers[0].stream is None


def test_deadline_ends_a_call_here_and_at_the_server(servers):
    deadlines = Deadlines(rpc_s=0.4, wait_s=0.0)
    with transport_to(servers, deadlines=deadlines) as (transport, channel):
        open_stream(channel)
        start = time.monotonic()

        with pytest.raises(TransportError, match="DEADLINE_EXCEEDED"):
            transport.call(0, calls.PULL_SPARSE, pull(at=1)).result()

        assert time.monotonic() - start < 5.0
        transport.call(0, calls.PULL_SPARSE, pull()).result()
        durations = servers.servers[0]._service.counts["PullSparse"].durations
        wait_until(lambda: "CANCELLED" in durations)  # the server has a clock of its own
        assert sum(durations["CANCELLED"].counts) == 1


def test_deadline_passes_while_others_are_answered(servers):
    deadlines = Deadlines(rpc_s=0.4, wait_s=0.0)
    with transport_to(servers, deadlines=deadlines) as (transport, channel):
        open_stream(channel)
        late = transport.call(0, calls.PULL_SPARSE, pull(at=1))
        until = time.monotonic() + 5.0
        while not late.wait(0.0):
            transport.call(0, calls.PULL_SPARSE, pull()).result()
            assert time.monotonic() < until
        with pytest.raises(TransportError, match="DEADLINE_EXCEEDED"):
            late.result()


def test_calls_on_their_way_end_with_the_transport_and_so_does_its_thread(servers):
    before = threading.active_count()
    with transport_to(servers) as (transport, channel):
        open_stream(channel)
        waiting = transport.call(0, calls.PULL_SPARSE, pull(at=1))

    with pytest.raises(TransportError):
        waiting.result()
    assert "stream" not in {thread.name for thread in threading.enumerate()}
    assert threading.active_count() <= before + 1  # gRPC's own


def test_answers_of_many_threads_are_not_mixed_up(servers):
    errors = []

    def work(table: str, width: int) -> None:
        try:
            for _ in range(100):
                rows = transport.call(0, calls.PULL_SPARSE, pull(table)).result().rows
                assert {name: of.shape for name, of in rows.items()} == {table: (4, width)}
        except BaseException as error:
            errors.append(error)

    with transport_to(servers) as (transport, channel):
        open_stream(channel)
        widths = {"wide": 1, "deep": servers.stores[0].engine.parameters.table("deep").spec.dim}
        threads = [threading.Thread(target=work, args=each) for each in [*widths.items()] * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S * 6)
    assert not errors


def test_no_stream_is_opened_where_it_is_turned_off(servers):
    with transport_to(servers, stream=False) as (transport, channel):
        transport.call(0, calls.PULL_SPARSE, pull()).result()
        assert not isinstance(channel, StreamChannel)


def test_large_frames_arrive_whole_from_many_threads(servers):
    keys = np.arange(60_000, dtype=np.uint64)
    request = replace(pull(), keys={"wide": keys})
    with transport_to(servers) as (transport, channel):
        open_stream(channel)
        transport.connection.servers[0].methods["PullSparse"]._method = None  # gRPC's
        with futures.ThreadPoolExecutor(4) as pool:
            answers = pool.map(
                lambda _: transport.call(0, calls.PULL_SPARSE, request).result(), range(40)
            )
            assert all(answer.rows["wide"].shape == (60_000, 1) for answer in answers)


def test_server_whose_certificate_has_another_name_gets_no_call(tmp_path, monkeypatch, caplog):
    """As over gRPC; here gRPC takes the name, and the stream does not."""
    credentials = CertificateAuthority(tmp_path).credentials("both", common_name="ctr-ps-trainer")
    monkeypatch.setattr(stream, "PAUSE_S", 0.01)
    with (
        one_server(credentials=credentials) as servers,
        closing(GrpcTransport(servers.endpoints, credentials=credentials)) as transport,
    ):
        channel = transport.connection.servers[0].channel
        channel._credentials = replace(credentials, server_name="another")
        assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].size == 4
        wait_until(lambda: "cannot reach port" in caplog.text)
        assert channel.stream is None
    assert "certificate" in caplog.text


def test_token_is_shown(tmp_path):
    token = Credentials(token="token-of-sixteen-characters")
    with (
        one_server(credentials=token) as servers,
        transport_to(servers, credentials=token) as (transport, channel),
    ):
        open_stream(channel)
        transport.call(0, calls.PULL_SPARSE, pull()).result()
        assert channel.stream is not None


def test_request_that_the_server_refuses_to_read_is_an_error(servers):
    with transport_to(servers) as (transport, channel):
        open_stream(channel)
        request = requests.PullSparse(keys={"wide": KEYS}, missing=Missing.ZEROS, shard_map_epoch=9)
        with pytest.raises(ProtocolError):
            transport.call(0, calls.PULL_SPARSE, request).result()


def test_other_service_at_the_port_gets_no_call(servers, credentials, monkeypatch):
    """One that answers, with a head as a server does."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        offer = StreamOffer(port=other.getsockname()[1], key=7)
        monkeypatch.setattr(StreamChannel, "_ask", lambda _: offer)
        received = []

        def answer() -> None:
            accepted, _ = other.accept()
            with accepted:
                accepted.settimeout(LIMIT_S)
                received.append(accepted.recv(1000))
                accepted.sendall(HEAD.pack(0, 0, 0, 0))
                received.append(accepted.recv(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        with transport_to(servers) as (transport, _):
            thread.join(LIMIT_S)
            assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].size == 4
    hello, after = received
    assert hello.startswith(TLS_HANDSHAKE) if credentials.ca else hello == hello_of(7, ())
    assert after == b""


@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
def test_port_that_never_answers_holds_up_no_end(servers, monkeypatch, drips: bool):
    """As one behind a firewall, or one that sends a byte now and then."""
    with socket.create_server(("127.0.0.1", 0)) as other, ExitStack() as stack:
        offer = StreamOffer(port=other.getsockname()[1], key=7)
        monkeypatch.setattr(StreamChannel, "_ask", lambda _: offer)
        is_over = threading.Event()
        with transport_to(servers) as (_, channel):
            accepted = stack.enter_context(other.accept()[0])
            if drips:
                drip = threading.Thread(target=lambda: drip_into(accepted, is_over))
                drip.start()
                stack.callback(drip.join)
                stack.callback(is_over.set)
            start = time.monotonic()
        assert time.monotonic() - start < 5.0
        channel._thread.join(LIMIT_S)
        assert not channel._thread.is_alive()


def drip_into(accepted: socket.socket, is_over: threading.Event) -> None:
    with suppress(OSError):
        for byte in b"\x16\x03\x03\x40\x00" + bytes(1000):
            accepted.sendall(bytes([byte]))
            if is_over.wait(0.1):
                return


def test_files_that_were_exchanged_are_those_of_the_next_stream(tmp_path):
    """Without a call that failed in between."""
    credentials = CertificateAuthority(tmp_path).credentials("both", common_name="ctr-ps-trainer")
    with (
        one_server(credentials=credentials) as servers,
        transport_to(servers, credentials=credentials) as (_, channel),
    ):
        before = open_stream(channel)
        newer = CertificateAuthority(tmp_path)  # the same files
        newer.credentials("both", common_name="ctr-ps-trainer")
        before.close()
        wait_until(lambda: channel.stream not in (None, before))


def test_deadline_passes_while_another_call_cannot_be_sent(servers):
    """Who reads answers does not wait for who sends."""
    deadlines = Deadlines(rpc_s=0.4, wait_s=0.0)
    with transport_to(servers, deadlines=deadlines) as (transport, channel):
        with open_stream(channel)._sending:  # as while a server takes no bytes
            late = futures.Future()
            call = StreamCall(channel.stream, 99, time.monotonic())
            channel.stream._calls[99] = call
            call.add_done_callback(late.set_result)
            late.result(LIMIT_S)
        assert call.exception().code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert transport.call(0, calls.PULL_SPARSE, pull()).result().rows["wide"].size == 4
