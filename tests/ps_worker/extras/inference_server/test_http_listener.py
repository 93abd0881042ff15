"""Connections over HTTP: silent ones give way, and what the process cannot take it says once."""

import asyncio
import errno
import gc
import socket
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from ctr_ps.protos.wire.security.credentials import server_context
from ctr_ps.ps_worker.extras.inference_server import http_listener
from ctr_ps.ps_worker.extras.inference_server.http_listener import HttpListener
from tests.support.certificates import CertificateAuthority

MOST = 4
LIMIT_S = 20.0


class Held:
    """Requests for /held, which are answered when they may."""

    def __init__(self) -> None:
        self.has_come = asyncio.Semaphore(0)
        self.may_go = asyncio.Event()

    async def answer(self, _: web.Request) -> web.Response:
        self.has_come.release()
        await self.may_go.wait()
        return web.Response(text="done")


async def live(_: web.Request) -> web.Response:
    return web.Response(text="live")


@asynccontextmanager
async def listening(
    held: Held | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serves /live and /held; yields the port."""
    application = web.Application()
    application.router.add_get("/live", live)
    if held:
        application.router.add_get("/held", held.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    listener = HttpListener(runner.server, "127.0.0.1", 0, max_connections=MOST, tls=tls)
    try:
        yield listener.address[1]
    finally:
        await listener.close()
        await runner.cleanup()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def get(port: int, path: str, tls: ssl.SSLContext | bool = False) -> str:
    async with (
        ClientSession() as session,
        session.get(f"http{'s' if tls else ''}://127.0.0.1:{port}{path}", ssl=tls) as response,
    ):
        return await response.text()


async def test_silent_connections_keep_nobody_out() -> None:
    async with listening() as port, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(port)) for _ in range(2 * MOST)]

        assert await get(port, "/live") == "live"

        assert await silent[0][0].read(1) == b"", "the oldest has given way"
        silent[-1][1].write(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
        assert await silent[-1][0].readline() == b"HTTP/1.1 200 OK\r\n"


async def test_connection_gives_way_to_none_while_its_request_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Held()
    async with listening(held) as port:
        answers = [asyncio.create_task(get(port, "/held")) for _ in range(MOST)]
        for _ in answers:
            await held.has_come.acquire()
        for _ in range(2):
            async with connected(port) as (reader, _):
                assert await reader.read(1) == b""
        held.may_go.set()
        assert await asyncio.gather(*answers) == ["done"] * MOST
        assert await get(port, "/live") == "live"
    assert caplog.messages == [
        f"{MOST} connections are open, all with requests: further ones are closed"
    ]


async def test_first_request_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(http_listener, "FIRST_REQUEST_S", 0.3)
    authority = CertificateAuthority(tmp_path)
    trusting = ssl.create_default_context(cafile=str(authority.ca))

    for tls in (None, server_context(authority.credentials("server", mutual=False))):
        async with listening(tls=tls) as port:
            async with connected(port) as (reader, writer):
                writer.write(b"\x16" if tls else b"GET /live HTTP/1.1\r\nHost: ")
                assert await reader.read() == b""
            assert await get(port, "/live", trusting if tls else False) == "live"


async def test_process_without_descriptors_says_so_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_listener, "_RETRY_S", 0.0)

    accept, failures = socket.socket.accept, 20

    def failing(listening: socket.socket) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", failing)
    async with listening() as port:
        assert await get(port, "/live") == "live"
    assert failures == 0
    assert caplog.messages == ["cannot accept connections: Too many open files"]


async def test_silent_connection_gives_way_to_others_of_its_own_address_first() -> None:
    """Who opens many takes no place from who has one."""

    async with listening() as port, AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, local_addr=("127.0.0.2", 0)
        )
        stack.callback(writer.close)
        many = [await stack.enter_async_context(connected(port)) for _ in range(2 * MOST)]
        assert await get(port, "/live") == "live"

        assert await many[0][0].read(1) == b""
        writer.write(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("turns", range(6))
async def test_connection_that_comes_as_it_closes_is_closed(turns: int, tmp_path: Path) -> None:
    """At whatever turn of the loop: while it is accepted, and before or within its handshake."""
    authority = CertificateAuthority(tmp_path)
    tls = server_context(authority.credentials("server", mutual=False))

    with warnings.catch_warnings(record=True) as warned, ExitStack() as stack:
        warnings.simplefilter("always")
        async with listening(tls=tls) as port:
            await asyncio.sleep(0.0)
            for _ in range(MOST):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
            for _ in range(turns):
                await asyncio.sleep(0.0)
        gc.collect()
    assert [str(each.message) for each in warned] == []
