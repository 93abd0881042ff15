"""A minimal HTTP/2 client, for messages that no library sends: without an end, or expanding.

It obeys flow control, so that a server reads as much as it allows.
"""

import gzip
import socket
import struct
import time
from collections.abc import Mapping
from typing import Self

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW = 0x4

_FRAME_BYTES = 16_384
_QUIET_S = 0.5
"""After so long without a change nothing more is expected."""


def message(content: bytes, *, is_compressed: bool = False) -> bytes:
    return bytes([is_compressed]) + struct.pack(">I", len(content)) + content


def bomb(size: int) -> bytes:
    """Compresses a message of `size` zeros, a thousand to one."""
    return message(gzip.compress(bytes(size)), is_compressed=True)


class Connection:
    """One connection, for one thread; OSError if the server closes it at once."""

    def __init__(self, port: int, limit_s: float = 10.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), limit_s)
        self._limit_s = limit_s
        self._received = b""
        self._window, self._initial = 65_535, 65_535
        self._windows: dict[int, int] = {}
        self._next_stream = 1
        self.ended: set[int] = set()
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))
        self._read(limit_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, path: str, headers: Mapping[str, str] | None = None) -> int:
        """Begins a call; returns its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "test",
            "content-type": "application/grpc",
            "te": "trailers",
            **(headers or {}),
        }
        block = b"".join(map(_literal, fields, fields.values()))
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, block))
        self._windows[stream] = self._initial
        return stream

    def send(self, bodies: Mapping[int, bytes], *, end: bool) -> int:
        """Sends bodies to their streams, as the windows allow; returns the number of bytes sent.

        Bodies of ended streams are dropped. With `end` they are complete.
        """
        left, sent, changed = dict(bodies), 0, time.monotonic()
        while left and time.monotonic() - changed < _QUIET_S:
            for stream, body in tuple(left.items()):
                size = min(_FRAME_BYTES, len(body), self._window, self._windows[stream])
                if stream in self.ended:
                    del left[stream]
                elif size > 0:
                    is_last = size == len(body)
                    flags = _END_STREAM if end and is_last else 0
                    self._socket.sendall(_frame(_DATA, flags, stream, body[:size]))
                    self._window -= size
                    self._windows[stream] -= size
                    sent += size
                    left[stream] = body[size:]
                    if is_last:
                        del left[stream]
                else:
                    continue
                changed = time.monotonic()
            self._read(0.02)
        return sent

    def wait_for_end(self, *streams: int) -> None:
        """Waits until calls have ended; raises TimeoutError otherwise."""
        end = time.monotonic() + self._limit_s
        while not self.ended >= set(streams):
            if time.monotonic() > end:
                raise TimeoutError
            self._read(0.1)

    def _read(self, wait_s: float) -> None:
        """Waits for data if there is none, and processes it; raises ConnectionError at the end."""
        self._socket.settimeout(wait_s)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return
        finally:
            self._socket.settimeout(self._limit_s)
        if not data:
            raise ConnectionError("closed by the server")
        self._received += data
        while len(self._received) >= 9:
            size = 9 + int.from_bytes(self._received[:3], "big")
            if len(self._received) < size:
                return
            kind, flags, stream = struct.unpack(">BBI", self._received[3:9])
            self._take(kind, flags, stream, self._received[9:size])
            self._received = self._received[size:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == _INITIAL_WINDOW:
                    change, self._initial = value - self._initial, value
                    self._windows = {each: size + change for each, size in self._windows.items()}
            self._socket.sendall(_frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == _WINDOW:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == _RESET or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            self.ended.add(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Encodes a short header outside of all tables."""
    return b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))
