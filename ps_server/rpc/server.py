"""The life of a server: bind, serve, and end when all workers have left.

start --bound--> wait --all workers left | idle | job failed | told to end--> stop
"""

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.errors import AbortedError, BindError, IdleError
from protos.wire.channel import SERVER_OPTIONS
from ps_server.rpc.activity import Activity
from ps_server.rpc.backlog import Backlog
from ps_server.rpc.handlers import Handlers
from ps_server.rpc.health import SERVICE
from ps_server.rpc.service import Service
from ps_server.settings import ServerSettings
from ps_server.store import ParameterStore

logger = logging.getLogger(__name__)

ALL_LEFT = "all workers have left"


class Server:
    """One gRPC server over a store. All methods belong to the event loop that started it."""

    def __init__(
        self,
        store: ParameterStore,
        settings: ServerSettings,
        *,
        address: str,
        backlog: Backlog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares to serve; nothing is bound yet.

        Args:
            store: What to serve.
            settings: When to end, and how.
            address: host:port to bind; port 0 takes a free one.
            backlog: See `Service`.
            clock: In seconds.
        """
        self._store = store
        self._address = address
        self._settings = settings
        self._activity = Activity(clock)
        self._health = health.aio.HealthServicer()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._handlers = Handlers(store, self._on_all_left)
        self._service = Service(self._handlers, self._activity, backlog=backlog)
        self._loop = asyncio.get_running_loop()
        store.call_on_failure(self._hear_of_failure)
        self._service.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self) -> int:
        """Binds and serves; returns the port.

        Raises:
            BindError: If the address cannot be bound.
        """
        address = self._address
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError as exc:
            raise BindError(
                f"cannot bind {address}: the port is in use by another process, or the address is not "
                f"of this machine"
            ) from exc
        await self._server.start()
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return port

    async def wait(self) -> str:
        """Waits for the end, and returns its reason.

        Raises:
            IdleError: If no call came for longer than the idle limit.
            AbortedError: If the job has ended by an error, and the server does not stay.
        """
        limit_s = self._settings.ends_idle_after_s
        if limit_s is None:
            return await self._ended
        watch = asyncio.create_task(self._end_when_idle(limit_s))
        try:
            return await self._ended
        finally:
            watch.cancel()

    def end(self, reason: str) -> None:
        """Makes `wait` return `reason`."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def stop(self) -> None:
        """Refuses new calls, lets those in flight end within the grace, and frees the port."""
        await self._health.enter_graceful_shutdown()
        self._store.call_on_failure(lambda _: None)
        await self._server.stop(self._settings.grace_s)
        self._service.close()

    def _on_all_left(self) -> None:
        if not self._settings.stay:
            self.end(ALL_LEFT)
            return
        logger.info("%s, staying for the next job", ALL_LEFT)
        self._store.begin_job()

    def _hear_of_failure(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._end_after_failure, reason)

    def _end_after_failure(self, reason: str) -> None:
        """Ends the server of a job that cannot go on, when all workers have had the time to hear why."""
        if self._settings.stay:
            logger.error("the job has ended: %s; restart this server before the next", reason)
            return

        def end() -> None:
            if not self._ended.done():
                self._ended.set_exception(AbortedError(reason))

        self._loop.call_later(self._settings.linger_s, end)

    async def _end_when_idle(self, limit_s: float) -> None:
        while (left_s := limit_s - self._activity.idle_s) > 0:
            await asyncio.sleep(left_s)
        if not self._ended.done():
            self._ended.set_exception(
                IdleError(f"no worker called for {limit_s:g} s: did they fail to start, or crash?")
            )


async def serve(
    store: ParameterStore,
    settings: ServerSettings,
    on_start: Callable[[Server, int], None],
    *,
    address: str,
) -> str:
    """Serves until the end, and returns its reason.

    Args:
        store: What to serve.
        settings: When to end, and how.
        on_start: Called with the server and its port once it accepts calls.
        address: host:port to bind; port 0 takes a free one.

    Raises:
        BindError: If the address cannot be bound.
        IdleError: If no call came for longer than the idle limit.
        AbortedError: If the job has ended by an error, and the server does not stay.
    """
    server = Server(store, settings, address=address)
    port = await server.start()
    try:
        on_start(server, port)
        return await server.wait()
    finally:
        await server.stop()
