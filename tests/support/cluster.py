"""Real servers on loopback, inside the test's process: a distributed test reads like a local one.

with cluster(num_servers=2, num_workers=2) as servers:
    client = servers.client()
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.placement import NO_SERVER, ShardMap
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.coordination.mailbox import INBOX_BYTES
from ctr_ps.ps_server.precompile import KERNELS
from ctr_ps.ps_server.rpc.backlog import Backlog
from ctr_ps.ps_server.rpc.server import Server
from ctr_ps.ps_server.settings import ServerSettings
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import wait_for_servers
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport
from ctr_ps.ps_worker.cluster.stream import StreamChannel
from tests.support.stores import INCARNATION, declare, joined

T = TypeVar("T")

LIMIT_S = 30.0


class LoopThread:
    """An event loop in a thread of its own; one a process at a time, as grpc.aio needs it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def close(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


class Cluster:
    def __init__(self, loop: LoopThread, stack: ExitStack) -> None:
        self._loop = loop
        self._stack = stack
        self.servers: list[Server] = []
        self.stores: list[ParameterStore] = []
        self.endpoints: list[str] = []
        self.spares: dict[str, Server] = {}

    def start_server(
        self,
        store: ParameterStore,
        backlog: Backlog | None = None,
        credentials: Credentials | None = None,
        **settings: Any,
    ) -> str:
        server, port = self._start(store, "127.0.0.1:0", backlog, credentials, **settings)
        self.servers.append(server)
        self.stores.append(store)
        self.endpoints.append(f"127.0.0.1:{port}")
        return self.endpoints[-1]

    def start_spare(
        self,
        *,
        memory_limit: int | None = None,
        credentials: Credentials | None = None,
        **settings: Any,
    ) -> str:
        """Starts a server that waits to be added; returns its endpoint."""
        members = self.stores[0].engine.members
        store = ParameterStore(
            num_workers=members.num_workers,
            num_heter=members.num_heter,
            num_at_start=members.num_at_start,
            server_index=NO_SERVER,
            wait_limit_s=10.0,
            memory_limit=memory_limit,
        )
        server, port = self._start(store, "127.0.0.1:0", credentials=credentials, **settings)
        self.spares[endpoint := f"127.0.0.1:{port}"] = server
        store.engine.shard_map = ShardMap.of(1, [endpoint])
        return endpoint

    def stop_server(self, index: int) -> None:
        self._loop.run(self.servers[index].stop())

    def start_again(self, index: int, **settings: Any) -> None:
        """Restarts a stopped server with its store and endpoint."""
        self.servers[index], _ = self._start(self.stores[index], self.endpoints[index], **settings)

    def _start(
        self,
        store: ParameterStore,
        address: str,
        backlog: Backlog | None = None,
        credentials: Credentials | None = None,
        **settings: Any,
    ) -> tuple[Server, int]:
        async def start() -> tuple[Server, int]:
            own = ServerSettings(grace_s=0.0, **settings)
            server = Server(
                store.engine, own, address=address, backlog=backlog, credentials=credentials
            )
            return server, await server.start()

        server, port = self._loop.run(start())
        self._stack.callback(lambda: self._loop.run(server.stop()))
        return server, port

    def client(
        self,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        deadlines: Deadlines | None = None,
        joins: bool = True,
        stream: bool | None = None,
    ) -> ClusterClient:
        """Returns a new client, joined as each of the workers; it is closed with the cluster.

        `stream` says whether calls that move data take a stream from the first on; None: once it is open.
        """
        transport = GrpcTransport(
            self.endpoints,
            deadlines or Deadlines(rpc_s=10, wait_s=20),
            stream=stream is not False,
        )
        client = self._stack.enter_context(ClusterClient(transport, chunk_bytes=chunk_bytes))
        wait_for_servers(transport, LIMIT_S)
        if stream:
            for each in transport.connection.servers.values():
                open_stream(each.channel)
        for worker in range(self.stores[0].engine.members.total if joins else 0):
            client.join(worker, INCARNATION, terms={}).result()
        return client


def open_stream(channel: StreamChannel, *, before: Any = None) -> Any:
    """Waits until a stream of a channel is open that is not `before`, and returns it."""
    until = time.monotonic() + LIMIT_S
    while channel.stream in (None, before):
        channel.open_soon()
        assert time.monotonic() < until, "no stream was opened"
        time.sleep(0.005)
    return channel.stream


@contextmanager
def cluster(
    *,
    num_servers: int = 1,
    num_workers: int = 1,
    num_heter: int = 0,
    num_at_start: int | None = None,
    wait_limit_s: float = 10.0,
    inbox_bytes: int = INBOX_BYTES,
) -> Iterator[Cluster]:
    _compile_kernels()
    loop = LoopThread()
    try:
        with ExitStack() as stack:
            servers = Cluster(loop, stack)
            for server_index in range(num_servers):
                servers.start_server(
                    ParameterStore(
                        num_workers=num_workers,
                        num_heter=num_heter,
                        num_at_start=num_at_start,
                        server_index=server_index,
                        num_servers=num_servers,
                        wait_limit_s=wait_limit_s,
                        inbox_bytes=inbox_bytes,
                    )
                )
            for store in servers.stores:  # whose ports are known by now
                store.engine.shard_map = ShardMap.of(num_servers, servers.endpoints)
            yield servers
    finally:
        loop.close()


@contextmanager
def one_server(**settings: Any) -> Iterator[Cluster]:
    """A server with the usual tables, which its worker has joined."""
    with cluster(num_servers=0) as servers:
        store = joined(ParameterStore())
        declare(store)
        servers.start_server(store, **settings)
        yield servers


@cache
def _compile_kernels() -> None:
    """As a server does before it serves: compilation would exceed a call's deadline."""
    KERNELS.prepare_all()
