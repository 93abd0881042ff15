"""Frames of a server's stream: a TCP connection for the calls that move data, beside gRPC.

    client                                   server
      hello: key of the server, token  -->
                                       <--   answer, whose number is the key: it is open
      head, request                    -->           any number of calls at once
                                       <--   head, answer or failure; in any order
      cancel                           -->

Requests and answers are the bytes of gRPC's. Each has a head before it:

    length u32, kind u16, 0 u16, number u64; little endian

The kind of a request is its method's place in parameter_server.proto, from 1; that of an answer a status code
of gRPC. A failure is JSON: its details and its trailing metadata. The number is the client's own.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.v1 import parameter_server_pb2
from ctr_ps.protos.wire.calls import CALLS, Call

HEAD = struct.Struct("<IHHQ")

HELLO = 0
CANCEL = 0xFFFF

MAX_HELLO_BYTES = 8 * 2**10

SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A machine that is gone is noticed as soon as over gRPC (protos/wire/channel.py).
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
)
"""Of both ends."""

_KEY = struct.Struct("<Q")

Metadata = Sequence[tuple[str, str]]

_METHODS = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"].methods
_PLACES = {method.name: place for place, method in enumerate(_METHODS, 1)}

STREAMED: Mapping[int, Call[Any, Any]] = {
    _PLACES[call.name]: call for call in CALLS.values() if call.moves_data
}
"""The calls that a stream takes, by kind: those that move data. All others are rare."""

KINDS: Mapping[str, int] = {call.path: kind for kind, call in STREAMED.items()}
"""Their kinds, by their paths."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Failure:
    """How a call failed, as gRPC would say it."""

    code: grpc.StatusCode
    details: str
    metadata: Metadata = ()


class FailedCallError(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """Error of a call without gRPC, with what is read of gRPC's own."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.details)
        self.failure = failure

    def code(self) -> grpc.StatusCode:
        """See grpc.Call."""
        return self.failure.code

    def details(self) -> str:
        """See grpc.Call."""
        return self.failure.details

    def trailing_metadata(self) -> Metadata:
        """See grpc.Call."""
        return self.failure.metadata


def hello_of(key: int, metadata: Metadata) -> bytes:
    """Returns the frame that opens a stream, for a caller that shows `metadata` in calls of gRPC."""
    body = _KEY.pack(key) + json.dumps(metadata).encode()
    return HEAD.pack(len(body), HELLO, 0, 0) + body


def metadata_of_hello(body: bytes, key: int) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a caller, from the body of its hello.

    Raises:
        ProtocolError: If it is none, or for another server than the one with this key.
    """
    try:
        (sent,) = _KEY.unpack_from(body)
        metadata = tuple((str(name), str(value)) for name, value in json.loads(body[_KEY.size :]))
    except (ValueError, TypeError, RecursionError, struct.error) as error:
        raise ProtocolError(
            f"a stream begins with {len(body)} bytes that are not a hello"
        ) from error
    if sent != key:
        raise ProtocolError("a stream was opened for a server that had this port before")
    return metadata


def body_of(failure: Failure) -> bytes:
    """Returns the body of an answer that is a failure."""
    return json.dumps([failure.details, failure.metadata]).encode()


def failure_of(code: int, body: bytes) -> Failure:
    """Returns the failure that an answer is; one that cannot be read has the code INTERNAL."""
    try:
        details, metadata = json.loads(body)
        pairs = tuple((str(name), str(value)) for name, value in metadata)
        return Failure(_CODES[code], str(details), pairs)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Failure(grpc.StatusCode.INTERNAL, f"an answer of kind {code} cannot be read")
