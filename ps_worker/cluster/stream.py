"""The stream to a server, beside its channel: one TCP connection for the calls that move data.

    call --stream is open--> frame --> server --> its number --> reader thread --> answer
             `--not yet, or another call--> gRPC

A thread asks the server for its port (GetStatus), opens the connection, and reads answers until it is lost;
then all calls on their way fail as those of a lost channel do, and it asks again. Meanwhile gRPC is used.
"""

import contextlib
import itertools
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from typing import Any, cast

import grpc

from ctr_ps.protos.errors import ProtocolError, UsageError
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES
from ctr_ps.protos.store import StreamOffer
from ctr_ps.protos.wire.calls import GET_STATUS
from ctr_ps.protos.wire.security.credentials import Credentials, caller_context
from ctr_ps.protos.wire.security.tls_layer import PIECE_BYTES, TlsLayer
from ctr_ps.protos.wire.stream import (
    CANCEL,
    HEAD,
    KINDS,
    SOCKET_OPTIONS,
    FailedCallError,
    Failure,
    Metadata,
    failure_of,
    hello_of,
)

logger = logging.getLogger(__name__)

Secure = Callable[[socket.socket], Any]
"""Makes a connected socket one with TLS."""

PAUSE_S = 0.5
"""Before a server is asked again for its port; doubled after each failure to reach that port."""

LONGEST_PAUSE_S = 30.0

FAILURES_BEFORE_WARNING = 3
"""A server that restarts fails once or twice."""

_ASK_S = 5.0
_OPEN_S = 10.0
_CLOSE_S = 1.0
"""For the thread's end: it may still wait for an address that does not answer, for up to `_OPEN_S`."""

_SEND_S = 30.0
"""A server that takes no byte for so long is gone: it reads whatever comes."""

_LOOK_S = 0.25
"""Between looks at the deadlines of calls."""


class StreamCall(futures.Future[bytes]):
    """A call on its way, with what is used of a grpc.Future. Thread-safe."""

    def __init__(self, stream: "_Stream", number: int, until: float) -> None:
        super().__init__()
        self._stream = stream
        self._number = number
        self.until = until

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """See concurrent.futures.Future, which keeps it: a circle around the answer, if it has this call."""
        once = [fn]

        def told(call: Any) -> None:
            once.pop()(call)

        super().add_done_callback(told)

    def cancel(self) -> bool:
        """Ends it, and has the server end it."""
        self._stream.cancel(self._number)
        return True


class _TlsSocket:
    """A connected socket with TLS, and what is used here of one. One thread sends, another receives."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        """Shakes hands.

        Raises:
            OSError: If that fails, as of a certificate that is not trusted.
        """
        self._plain = plain
        self._tls = TlsLayer(context, server_name=server_name)
        self._lock = threading.Lock()  # of the layer
        self._unsent = b""  # of a frame that did not wait
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        until = time.monotonic() + _OPEN_S
        while not self._tls.do_handshake():
            if time.monotonic() > until:
                raise TimeoutError("the handshake does not end")
            plain.sendall(self._tls.data_to_send())
            if not self._receive():
                raise ConnectionResetError("the server has closed it")
        plain.sendall(self._tls.data_to_send())

    def _receive(self) -> int:
        count = self._plain.recv_into(self._buffer)
        with self._lock:
            self._tls.receive_data(self._buffer[:count])
        return count

    def recv_into(self, view: memoryview, _size: int = 0, _flags: int = 0) -> int:
        """See socket.socket; what is there."""
        while True:
            with self._lock:
                count = self._tls.read_into(view)
            if count or not self._receive():
                return count

    def sendmsg(self, parts: Sequence[bytes]) -> int:
        """See socket.socket; sends all."""
        with self._lock:
            data = self._tls.write(*parts)
        self._plain.sendall(self._unsent + data if self._unsent else data)
        self._unsent = b""
        return sum(map(len, parts))

    def send(self, data: bytes, flags: int) -> int:
        """See socket.socket; what does not leave at once does so before the next frame."""
        with self._lock:
            self._unsent += self._tls.write(data, b"")
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._plain.send(self._unsent, flags) :]
        return len(data)

    def sendall(self, data: bytes) -> None:
        self.sendmsg([data, b""])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)  # its options and its end


class _Stream:
    """One connection. Its reader thread calls `read`; all else is thread-safe."""

    def __init__(self, host: str, offer: StreamOffer) -> None:
        """Connects.

        Raises:
            OSError: If nobody listens.
        """
        self._name = f"{host}:{offer.port}"
        self._key = offer.key
        self._socket: Any = socket.create_connection((host, offer.port), timeout=_OPEN_S)
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, StreamCall] = {}  # one operation each: threads need no lock
        self._is_lost = False
        self._next_look = 0.0

    def open(self, metadata: Metadata, secure: Secure | None) -> None:
        """Shakes hands and says hello; the socket is closed if that fails.

        Raises:
            OSError: If the server does not take the hello, or `close` was called.
        """
        plain = self._socket
        try:
            for option in SOCKET_OPTIONS:
                plain.setsockopt(*option)
            if secure is not None:
                self._socket = secure(plain)
            self._socket.sendall(hello_of(self._key, metadata))
            if HEAD.unpack(self._receive(HEAD.size))[3] != self._key:
                raise ConnectionError(f"another process answers at {self._name}")
            plain.settimeout(None)
            for name, seconds in ((socket.SO_RCVTIMEO, _LOOK_S), (socket.SO_SNDTIMEO, _SEND_S)):
                timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
                plain.setsockopt(socket.SOL_SOCKET, name, timeout)
        except BaseException:
            plain.close()
            raise

    def send(self, kind: int, request: bytes, timeout_s: float) -> StreamCall:
        """Sends a call; its answer is read by the reader thread."""
        number = next(self._numbers)
        call = StreamCall(self, number, time.monotonic() + timeout_s)
        self._calls[number] = call
        try:
            self._write(HEAD.pack(len(request), kind, 0, number), request)
        except OSError as error:
            self.close()
            self._fail(number, grpc.StatusCode.UNAVAILABLE, f"the stream is lost: {error}")
        if self._is_lost:  # meanwhile: who ended it may not have seen this call
            self._fail(number, grpc.StatusCode.UNAVAILABLE, "the stream is lost")
        return call

    def _write(self, head: bytes, body: bytes) -> None:
        with self._sending:
            sent = self._socket.sendmsg([head, body])
            if sent < len(head) + len(body):
                rest = memoryview(body)[max(sent - len(head), 0) :]
                self._socket.sendall(head[sent:])
                self._socket.sendall(rest)

    def cancel(self, number: int) -> None:
        """Ends a call, and has the server end it."""
        self._fail(number, grpc.StatusCode.CANCELLED, "cancelled")

    def _fail(self, number: int, code: grpc.StatusCode, details: str) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        if code is not grpc.StatusCode.UNAVAILABLE:
            self._cancel_there(number)
        call.set_exception(FailedCallError(Failure(code, details)))

    def _cancel_there(self, number: int) -> None:
        """Has the server end a call, unless that would wait: who reads may not wait for who sends.

        A call that is not ended there ends by the server's own limit.
        """
        if not self._sending.acquire(blocking=False):
            return
        try:
            frame = HEAD.pack(0, CANCEL, 0, number)
            if self._socket.send(frame, socket.MSG_DONTWAIT) < len(frame):
                self.close()
        except OSError:  # there is no room for it, or the stream is lost
            pass
        finally:
            self._sending.release()

    def read(self) -> None:
        """Reads answers until the connection is lost; then all calls have failed."""
        reason = "the stream is lost"
        try:
            while True:
                length, code, _, number = HEAD.unpack(self._receive(HEAD.size))
                if length > MAX_MESSAGE_BYTES:
                    raise ConnectionError(
                        f"{self._name} sends an answer of {length} bytes, expected up to {MAX_MESSAGE_BYTES}"
                    )
                body = self._receive(length)
                call = self._calls.pop(number, None)
                if call is None:  # it has ended here
                    continue
                if code == 0:
                    call.set_result(body)
                else:
                    call.set_exception(FailedCallError(failure_of(code, body)))
        except OSError as error:
            reason = f"the stream is lost: {error}"
        finally:  # whatever it was: nobody reads answers any more
            self._is_lost = True
            for number in list(self._calls):
                self._fail(number, grpc.StatusCode.UNAVAILABLE, reason)
            self._socket.close()

    def _receive(self, size: int) -> bytes:
        """Returns the next bytes; ends meanwhile the calls whose deadline is over."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                # All of it by one call, not each piece by a turn of this thread at the interpreter.
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing came for _LOOK_S
                count = -1
            if count == 0:
                raise ConnectionResetError("the server has closed it")
            view = view[max(count, 0) :]
            if (now := time.monotonic()) >= self._next_look:
                self._next_look = now + _LOOK_S
                self._expire(now)
        return cast("bytes", data)  # nobody changes it

    def _expire(self, now: float) -> None:
        for number, call in list(self._calls.items()):
            if call.until <= now:
                self._fail(number, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def close(self) -> None:
        """Ends it; the reader thread fails its calls."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class StreamChannel:
    """A channel whose calls that move data go over the server's stream while that is open. Thread-safe.

    It has what `GrpcTransport` uses of a grpc.Channel.
    """

    def __init__(
        self, channel: grpc.Channel, endpoint: str, metadata: Metadata, credentials: Credentials
    ) -> None:
        self._channel = channel
        self._host = endpoint.rpartition(":")[0].strip("[]")
        self._metadata = metadata
        self._credentials = credentials
        self._get_status = channel.unary_unary(GET_STATUS.path)
        self._closed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._opening: _Stream | None = None
        self.stream: _Stream | None = None

    def unary_unary(self, path: str, **options: Any) -> Any:
        """See grpc.Channel."""
        method = self._channel.unary_unary(path, **options)
        return _Method(self, KINDS[path], method) if path in KINDS else method

    def open_soon(self) -> None:
        """Starts the thread, unless it was started before."""
        with self._starting:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        failures, pause_s = 0, PAUSE_S  # to reach the port
        while not self._closed.is_set():
            try:
                offer = self._ask()
            except (grpc.RpcError, ValueError, ProtocolError):  # away, or the channel was closed
                self._closed.wait(PAUSE_S)
                continue
            if offer is None:
                return
            try:
                self.stream = self._open(offer)
            except (OSError, ValueError, UsageError) as error:
                failures += 1
                if failures == FAILURES_BEFORE_WARNING:
                    logger.warning(
                        "cannot reach port %d of %s, calls use gRPC: %s",
                        offer.port,
                        self._host,
                        error,
                    )
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            failures, pause_s = 0, PAUSE_S
            try:
                self.stream.read()
            finally:
                self.stream = None

    def _open(self, offer: StreamOffer) -> _Stream:
        secure: Secure | None = None
        context = caller_context(self._credentials)  # of the files as they are now
        if context is not None:
            name = self._credentials.server_name or self._host
            secure = partial(_TlsSocket, context=context, server_name=name)
        stream = self._opening = _Stream(self._host, offer)
        if self._closed.is_set():  # `close` has seen the one before
            stream.close()
        stream.open(self._metadata, secure)
        return stream

    def _ask(self) -> StreamOffer | None:
        answer = self._get_status(b"", timeout=_ASK_S, metadata=self._metadata)
        return GET_STATUS.answer.decode(answer).stream

    def close(self) -> None:
        """See grpc.Channel."""
        self._closed.set()
        if self._opening is not None:  # it may be open by now
            self._opening.close()
        self._channel.close()
        with self._starting:
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_S)


class _Method:
    """A method of the calls that a stream takes. Thread-safe."""

    def __init__(self, channel: StreamChannel, kind: int, method: Any) -> None:
        self._channel = channel
        self._kind = kind
        self._method = method

    def future(self, request: bytes, *, timeout: float, **options: Any) -> Any:
        stream = self._channel.stream
        if stream is not None:
            return stream.send(self._kind, request, timeout)
        self._channel.open_soon()
        return self._method.future(request, timeout=timeout, **options)
