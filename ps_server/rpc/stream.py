"""The stream of a server: TCP connections for calls that move data, on the event loop of its gRPC server.

    head --access and room are checked--> request --> Service.method --> answer, in any order
              `--refused--> the request is read into nothing --> failure

A connection costs a bounded number of bytes: one request that is not complete, and answers that its client
does not read, beyond which nothing more is read from it. See protos/wire/stream.py for the frames.
"""

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

import grpc

from ctr_ps.protos.errors import BindError, CtrPsError, ProtocolError
from ctr_ps.protos.limits import MAX_CHUNKS, MAX_MESSAGE_BYTES
from ctr_ps.protos.store import StreamOffer
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.grpc_status import details_of, metadata_of, status_of
from ctr_ps.protos.wire.security.authorization import Authority
from ctr_ps.protos.wire.security.credentials import Credentials, tls_contexts
from ctr_ps.protos.wire.security.tls_layer import PIECE_BYTES, TlsLayer
from ctr_ps.protos.wire.stream import (
    CANCEL,
    HEAD,
    HELLO,
    MAX_HELLO_BYTES,
    SOCKET_OPTIONS,
    STREAMED,
    FailedCallError,
    Failure,
    Metadata,
    body_of,
    metadata_of_hello,
)
from ctr_ps.ps_server.rpc.service import Service, in_task

logger = logging.getLogger(__name__)

HELLO_S = 10.0
"""For a hello, and in which at least a byte comes of a request that has begun."""

MAX_CALLS = 4 * MAX_CHUNKS
"""Of a connection at once, as over gRPC."""

MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES
"""Of answers that a client does not read; then nothing more is read from it."""

MAX_INCOMPLETE_BYTES = 32 * MAX_MESSAGE_BYTES
"""Of all requests that are not complete; then others wait for them."""

_SCRATCH_BYTES = 64 * 2**10

_HANDSHAKE_PIECE_BYTES = 4 * 2**10

_MAX_HANDSHAKE_BYTES = 64 * 2**10
"""Of TLS, from a caller of whom nothing is known yet: ample for a chain of certificates."""


class _Context:
    """What `Service.method` needs of a context of gRPC."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", metadata: Metadata = ()
    ) -> None:
        raise FailedCallError(Failure(code, details, metadata))


class StreamPort:
    """Accepts streams and answers their calls. Belongs to the event loop that made it."""

    def __init__(self, service: Service, credentials: Credentials, *, max_connections: int) -> None:
        """Prepares to serve; `credentials` say whom, and whether over TLS.

        Beyond `max_connections`, new ones are closed at once.
        """
        self.methods = {kind: service.method(call) for kind, call in STREAMED.items()}
        self.service = service
        self.authority = Authority(credentials, ()) if credentials.tell_callers_apart else None
        self.tls = tls_contexts(credentials)
        self.key = secrets.randbits(64)
        self.tasks: set[asyncio.Task[None]] = set()  # of all connections
        self._max_connections = max_connections
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._incomplete_bytes = 0
        self.when_room: list[Callable[[], None]] = []

    def start(self, host: str, port: int) -> StreamOffer:
        """Listens at a port, 0 for a free one; returns what clients are told.

        Raises:
            BindError: If the address cannot be bound.
        """
        name = host.strip("[]")
        try:
            if name in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():  # gRPC takes both, too
                listener = socket.create_server(
                    ("::", port), family=socket.AF_INET6, dualstack_ipv6=True
                )
            else:
                family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
                listener = socket.create_server((name, port), family=family)
        except OSError as error:
            raise BindError(
                f"cannot bind {host}:{port} for the stream: {error.strerror}"
            ) from error
        listener.setblocking(False)
        self._listener = listener
        self._loop.add_reader(listener, self._accept, listener)
        self._loop.call_later(HELLO_S, self._close_stalled)
        return StreamOffer(port=listener.getsockname()[1], key=self.key)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the client is gone again, or descriptors are short
            accepted, address = listener.accept()
            if len(self._connections) >= self._max_connections:
                accepted.close()
                return
            try:
                accepted.setblocking(False)
                for option in SOCKET_OPTIONS:
                    accepted.setsockopt(*option)
            except OSError:
                accepted.close()
                raise
            connection = _Connection(self, accepted, address)
            task = self._loop.create_task(connection.serve())
            self._connections[task] = connection
            task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()

    def _close_stalled(self) -> None:
        """Closes, from time to time, the connections of which a request has begun and does not go on."""
        for task, connection in self._connections.items():
            if connection.has_stalled():
                task.cancel()
        if self._listener is not None:
            self._loop.call_later(HELLO_S, self._close_stalled)

    def reserve(self, num_bytes: int) -> bool:
        """Whether there is room for a request, until `release`; else it may wait in `when_room`."""
        if self._incomplete_bytes + num_bytes > MAX_INCOMPLETE_BYTES:
            return False
        self._incomplete_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """A request is complete, or its connection has ended: those that wait for room try again."""
        self._incomplete_bytes -= num_bytes
        waiting, self.when_room = self.when_room, []
        for try_again in waiting:
            try_again()

    async def stop(self, grace_s: float) -> None:
        """Takes no more connections, lets calls end within the grace, and closes what is open."""
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=grace_s)
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


class _Link:
    """The bytes of a connection."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self._loop = asyncio.get_running_loop()
        self.peer: Mapping[str, list[bytes]] = {}  # names in the client's certificate

    async def open(self) -> None:
        """Prepares for both directions."""

    def receive_into(self, view: memoryview) -> int:
        """Returns how many bytes were received, 0: the client has closed; or raises BlockingIOError."""
        return self.socket.recv_into(view)

    def has_unread(self) -> bool:
        """Whether there are bytes of which the socket knows no more."""
        return False

    async def send(self, *parts: bytes) -> None:
        """Sends a frame."""
        try:
            sent = self.socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        if sent < sum(map(len, parts)):
            await in_task()
            await self._loop.sock_sendall(self.socket, memoryview(b"".join(parts))[sent:])


class _TlsLink(_Link):
    """The same, with TLS."""

    def __init__(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(accepted)
        self._tls = TlsLayer(context)

    async def open(self) -> None:
        left = _MAX_HANDSHAKE_BYTES
        try:
            while not self._tls.do_handshake():
                await self._loop.sock_sendall(self.socket, self._tls.data_to_send())
                if left <= 0:
                    raise ProtocolError(f"its handshake has over {_MAX_HANDSHAKE_BYTES} bytes")
                arrived = await self._loop.sock_recv(self.socket, _HANDSHAKE_PIECE_BYTES)
                if not arrived:
                    raise ConnectionResetError
                self._tls.receive_data(arrived)
                left -= len(arrived)
        finally:  # where it failed, this says why
            await self._loop.sock_sendall(self.socket, self._tls.data_to_send())
        self.peer = self._tls.auth_context()

    def receive_into(self, view: memoryview) -> int:
        if not (count := self._tls.read_into(view)):
            arrived = self.socket.recv(PIECE_BYTES)
            if not arrived:
                return 0
            self._tls.receive_data(arrived)
            if not (count := self._tls.read_into(view)):
                raise BlockingIOError  # no more in this turn: a client can send TLS without content
        return count

    def has_unread(self) -> bool:
        return self._tls.has_unread()

    async def send(self, *parts: bytes) -> None:
        await super().send(self._tls.write(*parts))


class _Connection:
    """The stream of one client.

        head --begin--> body --take--> call --answer--> sent

    The loop calls `_read_frame` when bytes have come. A coroutine that waits for them, and a task a call,
    took a tenth to a fifth of a server's time for a small call.
    """

    def __init__(self, port: StreamPort, accepted: socket.socket, address: Any) -> None:
        self._port = port
        self._address = address
        self._link = _TlsLink(accepted, port.tls()) if port.tls else _Link(accepted)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Exception] = self._loop.create_future()
        self._hello_limit = asyncio.timeout(HELLO_S)
        self._metadata: Metadata | None = None  # of its hello; None: that has not come
        self._calls: dict[int, asyncio.Task[None] | None] = {}  # that its client may cancel
        self._tasks: set[asyncio.Task[None]] = set()  # calls and answers that wait
        self._sending = asyncio.Lock()
        self._unsent_bytes = 0
        self._is_reading = False
        self._reads_again = False  # soon: bytes that the socket does not announce
        # takes the body of the frame; None: a head is next
        self._take: Callable[[bytearray], None] | None = None
        self._expect(HEAD.size)
        self._received_bytes = 0
        self._received_before: int | None = None
        self._reserved_bytes = 0

    def has_stalled(self) -> bool:
        """Whether no byte has come of a request since this was asked last."""
        is_within = self._take is not None and self._is_reading
        received = self._received_bytes if is_within else None
        before, self._received_before = self._received_before, received
        return before is not None and before == received

    async def serve(self) -> None:
        """Answers calls until the client closes the connection, or breaks the rules."""
        try:
            async with self._hello_limit:
                await self._link.open()
                self._resume()
                raise await self._ended
        except (ProtocolError, ssl.SSLError) as error:
            logger.warning("stream closed peer=%s: %s", self._address, error)
        except OSError:  # the client is gone
            if self._hello_limit.expired():
                logger.warning("stream closed peer=%s: no hello came", self._address)
        except Exception:
            logger.exception("stream failed peer=%s", self._address)
        finally:
            self._ended.cancel()
            self._pause()
            self._release()
            self._take = None
            self._view.release()  # which tracebacks hold
            self._expect(0)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Closes the connection, once `serve` has ended, or was cancelled before it began."""
        self._link.socket.close()

    # Frames

    def _resume(self) -> None:
        """Reads on, unless it has ended."""
        if self._is_reading or self._ended.done():
            return
        self._loop.add_reader(self._link.socket, self._read_frame)
        self._is_reading = True
        self._read_unread()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._link.socket)

    def _end_by(self, error: Exception) -> None:
        """Ends `serve`."""
        self._pause()
        if not self._ended.done():
            self._ended.set_result(error)

    def _read_unread(self) -> None:
        if not self._reads_again and self._link.has_unread():
            self._reads_again = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._reads_again = False
        self._read_frame()

    def _read_frame(self) -> None:
        """Reads what has come, up to the end of a frame: then other connections have a turn."""
        try:
            if self._is_reading and self._take is None:
                self._read_head()
            if self._is_reading and self._take is not None and self._fill():
                take, body = self._take, self._data
                self._take = None
                self._expect(HEAD.size)
                self._release()
                take(body)
            if self._is_reading:
                self._read_unread()
        except Exception as error:
            self._end_by(error)

    def _read_head(self) -> None:
        if len(self._tasks) >= MAX_CALLS or self._unsent_bytes >= MAX_UNSENT_BYTES:
            self._pause()  # until a task ends
            return
        if not self._fill():
            return
        length, kind, _, number = HEAD.unpack(self._data)
        self._expect(HEAD.size)
        if self._metadata is None:
            if kind != HELLO or length > MAX_HELLO_BYTES:
                raise ProtocolError("it does not begin with a hello")
            self._take = self._open
            self._expect(length)
        elif kind != CANCEL:
            self._begin(self._metadata, length, kind, number)
        elif length:
            raise ProtocolError(
                f"the cancelling of request {number} has {length} bytes, expected none"
            )
        elif (running := self._calls.get(number)) is not None:
            running.cancel()

    def _expect(self, size: int) -> None:
        self._data = bytearray(size)
        self._view = memoryview(self._data)

    def _fill(self) -> bool:
        """Receives what is expected; returns whether all of it is there."""
        while self._view:
            try:
                count = self._link.receive_into(self._view)
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError
            self._view = self._view[count:]
            self._received_bytes += count
        return True

    def _open(self, hello: bytearray) -> None:
        self._metadata = metadata_of_hello(bytes(hello), self._port.key)
        self._hello_limit.reschedule(None)
        self._run(self._send(0, self._port.key, b""))

    # Requests

    def _begin(self, metadata: Metadata, length: int, kind: int, number: int) -> None:
        """A request begins: from its head it is known whether it is refused."""
        call = STREAMED.get(kind)
        if call is None:
            raise ProtocolError(f"request {number} is of unknown kind {kind}")
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"request {number} has {length} bytes, expected up to {MAX_MESSAGE_BYTES}"
            )
        if number in self._calls:
            raise ProtocolError(f"request {number} has the number of an unfinished one")
        if (error := self._refusal(call, metadata)) is not None:
            self._refuse(number, error, length, bytearray())
            return
        self._take = partial(self._start, kind, number)
        self._receive(length)

    def _receive(self, length: int) -> None:
        """Reads the body of a request, when others leave room for it."""
        if self._ended.done():
            return
        try:
            if not self._port.reserve(length):
                self._pause()
                self._port.when_room.append(partial(self._receive, length))
                return
            self._reserved_bytes = length
            self._expect(length)
            self._resume()
        except Exception as error:  # not for the connection that made room
            self._end_by(error)

    def _release(self) -> None:
        if self._reserved_bytes:
            reserved, self._reserved_bytes = self._reserved_bytes, 0
            self._port.release(reserved)

    def _refusal(self, call: Call[Any, Any], metadata: Metadata) -> CtrPsError | None:
        """Returns why a call is refused before its request is read."""
        authority = self._port.authority
        refusal = None
        if authority is not None and authority.asks_for_tokens:
            refusal = authority.refusal(call, metadata)
        elif authority is not None:
            refusal = authority.refusal_of_peer(call, self._link.peer)
        return refusal or self._port.service.overload(call)

    def _refuse(self, number: int, error: CtrPsError, length: int, _: bytearray) -> None:
        """Reads the rest of a request into nothing, then says why."""
        if length:
            size = min(length, _SCRATCH_BYTES)
            self._take = partial(self._refuse, number, error, length - size)
            self._expect(size)
            return
        failure = Failure(status_of(error), details_of(error), metadata_of(error))
        self._run(self._send(failure.code.value[0], number, body_of(failure)))

    def _start(self, kind: int, number: int, request: bytearray) -> None:
        """Starts the call of a request."""
        self._calls[number] = None
        task = self._run(self._answer(kind, number, request))
        if number in self._calls:  # else it is answered, and at most its answer waits
            self._calls[number] = task

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Runs a coroutine; returns the task of what it leaves, beginning with `in_task`."""
        try:
            work.send(None)
        except StopIteration:
            return None
        task = self._loop.create_task(work)
        for tasks in (self._tasks, self._port.tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, _: asyncio.Task[None]) -> None:
        if self._take is None:  # else it waits for room, or reads
            self._resume()

    async def _answer(self, kind: int, number: int, request: bytearray) -> None:
        code = 0
        try:
            answer = await self._port.methods[kind](cast("bytes", request), _Context())
        except FailedCallError as error:
            code, answer = error.failure.code.value[0], body_of(error.failure)
        finally:
            del self._calls[number]  # no cancelling from here on: it would cut a frame short
        await self._send(code, number, answer)

    async def _send(self, code: int, number: int, body: bytes) -> None:
        """Sends an answer, one at a time; one whose client is gone is dropped."""
        if self._ended.done():
            return
        if self._unsent_bytes:
            await in_task()
        head = HEAD.pack(len(body), code, 0, number)
        self._unsent_bytes += len(head) + len(body)
        try:
            async with self._sending:
                await self._link.send(head, body)
        except Exception as error:  # perhaps within a frame
            self._end_by(error)
        finally:
            self._unsent_bytes -= len(head) + len(body)
