"""A server whose machine is gone: it answers nothing at all, not even that it is not there."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ctr_ps.protos.errors import TransportError
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from ctr_ps.protos.wire.security import credentials
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport
from tests.support.cluster import cluster
from tests.support.stores import joined, member

LIMIT_S = 10.0
SHORT_MS = {
    "grpc.keepalive_time_ms": 50,
    "grpc.http2.ping_timeout_ms": 50,
    "grpc.http2.min_ping_interval_without_data_ms": 10,
}
PING = b"\0\0\x08\x06\0\0\0\0\0"
"""The header of an HTTP/2 PING frame that is no answer: 8 bytes, type 6, no flags, stream 0."""
NUM_PINGS = 3
"""More than the two that gRPC sends without data unless an option says otherwise."""


class Proxy:
    """Passes bytes on to a server, until the client has pinged it some times; then no more."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.split(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self.is_silent = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, target)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        pings = 0
        try:
            while content := source.recv(2**16):
                pings += content.count(PING)
                if source.getpeername() != self._server and pings >= NUM_PINGS:
                    self.is_silent.set()
                if not self.is_silent.is_set():
                    target.sendall(content)
        except OSError:
            return

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(LIMIT_S)


@contextmanager
def proxy_to(endpoint: str) -> Iterator[Proxy]:
    proxy = Proxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()


def in_short(options: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the same options with shorter times."""
    return [(name, SHORT_MS.get(name, value)) for name, value in options]


def test_call_that_waits_ends_when_the_server_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "CHANNEL_OPTIONS", in_short(CHANNEL_OPTIONS))
    monkeypatch.setattr("ctr_ps.protos.wire.channel.SERVER_OPTIONS", in_short(SERVER_OPTIONS))
    with cluster(num_servers=0) as servers:
        endpoint = servers.start_server(joined(ParameterStore(num_workers=2)))
        with proxy_to(endpoint) as proxy:
            transport = GrpcTransport(
                [proxy.endpoint], Deadlines(rpc_s=LIMIT_S, wait_s=0.0), retry_s=0.0
            )
            try:
                barrier = requests.Barrier(name="end", member=member(), step=0, number=1)
                waiting = transport.call(0, calls.BARRIER, barrier)

                with pytest.raises(TransportError, match=r"Barrier to server .*: UNAVAILABLE"):
                    waiting.result()
                assert proxy.is_silent.is_set()
            finally:
                transport.close()
