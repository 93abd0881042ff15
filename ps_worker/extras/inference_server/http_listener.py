"""The listening socket of HTTP: how many connections there are, and for how long one may be silent.

aiohttp itself takes connections until the process has no descriptor left, and then logs a traceback for each.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from functools import partial
from typing import Any

from aiohttp import web

from ctr_ps.protos.errors import BindError
from ctr_ps.protos.role import address_to_bind

logger = logging.getLogger(__name__)

FIRST_REQUEST_S = 10.0
"""In which a connection has to send its first request; with TLS, its handshake, too."""

KEEP_ALIVE_S = 75.0  # between two requests of a connection: load balancers keep theirs for 60 s

_BACKLOG = 128
_RETRY_S = 0.1
_TELL_S = 60.0


class _Connection(web.RequestHandler):
    def __init__(
        self, listener: "HttpListener", accepted: socket.socket, host: str, **options: Any
    ) -> None:
        super().__init__(listener.server, loop=asyncio.get_running_loop(), **options)
        self.accepted = accepted
        self.host = host
        self._listener = listener

    @property
    def is_silent(self) -> bool:
        return self._request_count == 0

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._listener.forget(self)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.accepted.shutdown(socket.SHUT_RDWR)


class HttpListener:
    """Accepts connections for a server of aiohttp. For one event loop."""

    def __init__(
        self,
        server: web.Server,
        host: str,
        port: int,
        *,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        """Binds and listens; port 0 takes a free one. Raises BindError.

        One connection more than `max_connections` gets the place of one that is silent, or is closed. The
        options are those of `web.RequestHandler`.
        """
        self.server = server  # that of aiohttp
        self._max = max_connections
        self._tls = tls
        self._options = {"keepalive_timeout": KEEP_ALIVE_S, **options}
        self._open: dict[_Connection, asyncio.TimerHandle] = {}  # the oldest first
        self._handshakes: set[asyncio.Task[None]] = set()
        self._told_s = -_TELL_S
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise BindError(
                f"cannot bind {address_to_bind(host, port)} for HTTP: {error.strerror}"
            ) from error
        self._socket.setblocking(False)
        # host and port that are bound
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    async def close(self) -> None:
        """Accepts no more; connections that are open stay."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def forget(self, connection: _Connection) -> None:
        """A connection has ended."""
        if (timer := self._open.pop(connection, None)) is not None:
            timer.cancel()

    def _listen(self) -> None:
        # Not sock_accept: a task that is cancelled as a connection comes loses that.
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            accepted, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the caller has gone
            return
        except OSError as error:  # no descriptor is left
            self._tell("cannot accept connections: %s", error.strerror)
            self._loop.remove_reader(self._socket)
            self._retry = self._loop.call_later(_RETRY_S, self._listen)
            return
        if not self._has_place():
            self._tell(
                "%d connections are open, all with requests: further ones are closed", self._max
            )
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(self, accepted, address[0], **self._options)
        timer = self._loop.call_later(FIRST_REQUEST_S, self._end_if_silent, connection)
        self._open[connection] = timer
        task = self._loop.create_task(self._shake_hands(connection))
        self._handshakes.add(task)
        task.add_done_callback(partial(self._handshake_ended, connection))

    def _handshake_ended(self, connection: _Connection, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        if task.cancelled():  # before it began
            connection.accepted.close()
            self.forget(connection)

    def _has_place(self) -> bool:
        """Returns whether there is a place: a free one, or that of a silent connection, which is ended.

        That is the oldest of the address that has the most.
        """
        if len(self._open) < self._max:
            return True
        silent = [each for each in self._open if each.is_silent]
        if not silent:
            return False
        numbers = Counter(each.host for each in silent)
        ended = max(silent, key=lambda each: numbers[each.host])
        ended.hang_up()
        self.forget(ended)
        return True

    def _end_if_silent(self, connection: _Connection) -> None:
        if connection.is_silent:
            connection.hang_up()

    async def _shake_hands(self, connection: _Connection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                connection.accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else FIRST_REQUEST_S,
            )
        except (OSError, asyncio.CancelledError) as error:  # of TLS, or the caller has gone
            logger.debug("connection from %s failed: %s", connection.host, error)
            connection.accepted.close()
            self.forget(connection)

    def _tell(self, text: str, value: object) -> None:
        """Logs a fault, at most once a minute: callers can cause it as often as they like."""
        if time.monotonic() - self._told_s >= _TELL_S:
            self._told_s = time.monotonic()
            logger.warning(text, value)
