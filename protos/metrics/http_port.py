"""A port of its own for metrics and pages, over HTTP: a few routes, each answered by a function.

    GET path --caller allowed?--> route(headers) --> type and bytes

For the people and the scrapers who look after a process, a few requests a second: a connection and a thread
each, and no more than `MAX_REQUESTS` at once. Where all places are taken, a connection gets that of one whose
request has not come, so silent ones keep nobody out. It knows nothing of tokens or certificates: who opens it
says how callers are judged, and gives the TLS context.
"""

import contextlib
import http.server
import logging
import socket
import socketserver
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.message import Message
from typing import Any, cast
from urllib.parse import urlsplit

from ctr_ps.protos.errors import BindError

logger = logging.getLogger(__name__)

MAX_REQUESTS = 16  # at once; a connection more is closed, unless one of them is silent

HEADERS_LIMIT_S = 3.0  # from a connection to the end of its request's headers

REQUEST_LIMIT_S = 10.0
"""From there to its end. One that takes a byte now and then would have a place for days."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a route answers."""

    content_type: str
    content: bytes


Route = Callable[[Message], Page]
"""Makes a page for a request with such headers."""

Refusal = Callable[[Message, Mapping[str, Any] | None], str]
"""Says why a request is refused, by its headers and its peer's certificate, if any; empty: it is not."""


class HttpPort(AbstractContextManager["HttpPort"]):
    """Serves routes until it is closed, at the `port` that it has bound; `url` is that of its root."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        *,
        refusal: Refusal = lambda _headers, _certificate: "",
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Binds, and serves in threads of its own; raises BindError if the address cannot be bound.

        Port 0 takes a free one. `routes` are by path, `refusal` judges callers, and `tls` returns the context
        for the next connection; None: without TLS.
        """
        handler = type(
            "_Handler", (_Handler,), {"routes": dict(routes), "refusal": staticmethod(refusal)}
        )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = _Server((host, port), handler, family, tls)
        except OSError as error:
            raise BindError(f"cannot bind {host}:{port} for metrics: {error.strerror}") from error
        self.port: int = self._server.server_address[1]
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Frees the port; requests that are being answered may be cut short."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Place:
    """A connection's place, which it has for a limited time."""

    def __init__(self, request: socket.socket, host: str) -> None:
        self.host = host
        self.is_silent = True
        self._connection = request.dup()  # TLS detaches the other one
        self._timer = self._ends_after(HEADERS_LIMIT_S)

    def hear(self) -> None:
        self.is_silent = False
        self._timer.cancel()
        self._timer = self._ends_after(REQUEST_LIMIT_S)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._timer.cancel()
        self._connection.close()

    def _ends_after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.hang_up)
        timer.daemon = True
        timer.start()
        return timer


class _Server(http.server.ThreadingHTTPServer):
    """A thread for each connection, up to a limit; the handshake of TLS is made by that thread."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[http.server.BaseHTTPRequestHandler],
        family: socket.AddressFamily,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self.address_family = family
        self._tls = tls
        self._lock = threading.Lock()
        # By the callers' addresses and ports, the oldest first.
        self._places: dict[Any, _Place] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._take_place(request, client_address):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread
            self._give_back(client_address)
            raise

    def _take_place(self, request: socket.socket, client_address: Any) -> bool:
        """Returns whether there is a place: a free one, or that of a silent connection, which is ended.

        That is the oldest of the address that has the most.
        """
        with self._lock:
            if len(self._places) >= MAX_REQUESTS:
                numbers = Counter(place.host for place in self._places.values())
                silent = [key for key, place in self._places.items() if place.is_silent]
                if not silent:
                    return False
                ended = max(silent, key=lambda key: numbers[self._places[key].host])
                self._places[ended].hang_up()
                self._places.pop(ended).close()
            self._places[client_address] = _Place(request, client_address[0])
        return True

    def hear(self, client_address: Any) -> None:
        with self._lock:
            if (place := self._places.get(client_address)) is not None:
                place.hear()

    def _give_back(self, client_address: Any) -> None:
        with self._lock:
            if (place := self._places.pop(client_address, None)) is not None:
                place.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls is not None:
                request = self._tls().wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError as error:  # of the handshake
            logger.debug("connection for metrics from %s failed: %s", client_address, error)
            self.shutdown_request(request)
        finally:
            self._give_back(client_address)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks a name server for the name of this machine.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("request for metrics from %s failed", client_address, exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    routes: Mapping[str, Route]
    refusal: Refusal
    server_version = "ctr-ps"
    sys_version = ""

    def parse_request(self) -> bool:
        is_request = super().parse_request()
        cast(_Server, self.server).hear(self.client_address)
        return is_request

    def do_GET(self) -> None:  # as the library calls it
        certificate = (
            self.connection.getpeercert() if isinstance(self.connection, ssl.SSLSocket) else None
        )
        if refusal := self.refusal(self.headers, certificate):
            self._say(403 if certificate else 401, refusal)
            return
        route = self.routes.get(urlsplit(self.path).path)
        if route is None:
            self._say(404, f"not found; pages are {', '.join(sorted(self.routes))}")
            return
        try:
            page = route(self.headers)
        except Exception:
            logger.exception("cannot answer %s", self.path)
            self._say(500, "the request failed: see the log of this process")
            return
        self._answer(200, page)

    do_HEAD = do_GET  # noqa: N815

    def _say(self, status: int, text: str) -> None:
        self._answer(status, Page("text/plain; charset=utf-8", f"{text}\n".encode()))

    def _answer(self, status: int, page: Page) -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="ctr-ps"')
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.content)))
        self.send_header("Cache-Control", "no-store")
        # A page needs nothing of others, and may be shown in none.
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:; frame-ancestors 'none'",
        )
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.content)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
