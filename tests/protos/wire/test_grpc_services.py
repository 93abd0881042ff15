"""Health checks: an answer for anybody, which costs a server nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ctr_ps.protos.wire import grpc_services
from ctr_ps.protos.wire.channel import server_options
from ctr_ps.protos.wire.grpc_services import HealthService
from ctr_ps.protos.wire.security.access import metadata_of_token
from ctr_ps.protos.wire.security.credentials import Credentials, bind
from tests.support.http2 import CHECK, WATCH, Connection, bomb, message
from tests.support.process_figures import resident_bytes

T = TypeVar("T")

TOKEN = "trainer-0123456789"
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def serving(credentials: Credentials | None = None) -> AsyncIterator[int]:
    """Serves nothing but health checks; yields the port."""
    credentials = credentials or Credentials(token=TOKEN)
    server = grpc.aio.server(options=server_options())
    HealthService().add_to(server, credentials)
    port = bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def by_hand(use: Callable[[Connection], T], port: int) -> T:
    """Uses a connection in a thread."""

    def use_it() -> T:
        with Connection(port) as connection:
            return use(connection)

    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, use_it)


async def test_messages_that_swell_take_no_memory() -> None:
    def send(connection: Connection) -> None:
        calls = [connection.call(CHECK, {"grpc-encoding": "gzip"}) for _ in range(40)]
        connection.send(dict.fromkeys(calls, bomb(16 * 2**20 - 64)), end=True)
        connection.wait_for_end(*calls)

    async with serving() as port:
        before = resident_bytes(peak=True)
        await by_hand(send, port)
        assert resident_bytes(peak=True) - before < 20 * 2**20


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_messages_without_an_end_take_no_memory(path: str) -> None:
    def send(connection: Connection) -> int:
        calls = [connection.call(path) for _ in range(20)]
        return connection.send(dict.fromkeys(calls, message(bytes(2**22))[:-1]), end=False)

    async with serving() as port:
        assert await by_hand(send, port) <= 20 * 2**19


async def test_address_has_as_many_watches_as_the_limit_and_known_callers_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_services, "MAX_CALLS", 2)

    async with (
        serving() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="whatever it names")
        metadata = metadata_of_token(TOKEN)
        first, second = (stub.Watch(request, timeout=30) for _ in range(2))
        known = [stub.Watch(request, metadata=metadata, timeout=30) for _ in range(4)]
        for watch in (first, second, *known):
            assert (await watch.read()).status == SERVING
        for strange in ((), metadata_of_token(f"{TOKEN}x")):
            refused = stub.Watch(request, metadata=strange, timeout=30)
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request, timeout=30)).status == SERVING

        first.cancel()
        while (await (again := stub.Watch(request, timeout=30)).read()) is grpc.aio.EOF:
            await again.code()  # the place is given back a little after
        assert not again.done()
