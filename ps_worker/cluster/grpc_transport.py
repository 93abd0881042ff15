"""Calls to servers over gRPC: the only place on the worker's side that knows it.

Every call has a deadline. Calls that may be retried are repeated by the channel when a server is unavailable,
within that deadline.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from protos.futures import Future
from protos.limits import CHUNK_BYTES
from protos.wire.calls import CALLS, SERVICE, Call, Deadline
from protos.wire.channel import CHANNEL_OPTIONS
from protos.wire.grpc_status import error_of

Q = TypeVar("Q")
A = TypeVar("A")

_RETRIED = [{"service": SERVICE, "method": call.name} for call in CALLS.values() if call.retry]
_RETRY_OPTIONS = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "methodConfig": [
                    {
                        "name": _RETRIED,
                        "retryPolicy": {
                            "maxAttempts": 5,
                            "initialBackoff": "0.2s",
                            "maxBackoff": "2s",
                            "backoffMultiplier": 2,
                            "retryableStatusCodes": ["UNAVAILABLE"],
                        },
                    }
                ]
            }
        ),
    ),
    # A request that does not fit the buffer is not tried again; the default is 256 KiB.
    ("grpc.per_rpc_retry_buffer_size", 2 * CHUNK_BYTES),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long calls may take, in seconds.

    Attributes:
        rpc_s: An ordinary call.
        wait_s: What a call may take longer if it waits for other workers. A server has such a limit of
            its own (`ps-server --wait-limit`), whose error names who is missing: let it come first.
        checkpoint_s: Saving, loading, hashing or shrinking one server's part.
    """

    rpc_s: float = 60.0
    wait_s: float = 600.0
    checkpoint_s: float = 3600.0

    def of(self, call: Call[Q, Any], argument: Q) -> float:
        """Returns how long a call may take."""
        match call.deadline:
            case Deadline.PLAIN:
                return self.rpc_s
            case Deadline.VERSION if getattr(argument, "at") is None:  # noqa: B009 - typed by its row
                return self.rpc_s
            case Deadline.VERSION | Deadline.WORKERS:
                return self.rpc_s + self.wait_s
            case Deadline.CHECKPOINT:
                return self.rpc_s + self.checkpoint_s


class _Answer(Generic[A]):
    """An answer on its way: `result` waits for it, at most until its deadline."""

    def __init__(self, rpc: Any, endpoint: str, call: Call[Any, A]) -> None:
        self._rpc = rpc
        self._endpoint = endpoint
        self._call = call

    def result(self) -> A:
        """Returns the answer, or raises what the server raised, or TransportError."""
        try:
            message = self._rpc.result()
        except grpc.RpcError as failure:
            raise error_of(failure, self._endpoint, self._call.name) from failure
        return self._call.answer.decode(message)


class GrpcTransport:
    """Channels to all servers: a `ps_worker.cluster.transport.Transport`. Thread-safe."""

    def __init__(self, endpoints: Sequence[str], deadlines: Deadlines | None = None) -> None:
        """Opens a channel to each server; whether they answer shows at the first call."""
        self.servers_recover = False
        self.endpoints: Sequence[str] = tuple(endpoints)
        self._deadlines = deadlines or Deadlines()
        self._channels = [
            grpc.insecure_channel(endpoint, options=[*CHANNEL_OPTIONS, *_RETRY_OPTIONS])
            for endpoint in endpoints
        ]
        self._methods = [
            {
                call.name: channel.unary_unary(
                    f"/{SERVICE}/{call.name}",
                    request_serializer=call.request.message.SerializeToString,
                    response_deserializer=call.answer.message.FromString,
                    _registered_method=True,  # as generated stubs have it: less work a call
                )
                for call in CALLS.values()
            }
            for channel in self._channels
        ]

    def call(
        self, server: int, call: Call[Q, A], argument: Q, *, ready_s: float | None = None
    ) -> Future[A]:
        """See `Transport`."""
        rpc = self._methods[server][call.name].future(
            call.request.encode(argument),
            timeout=self._deadlines.of(call, argument) if ready_s is None else ready_s,
            wait_for_ready=ready_s is not None,
        )
        return _Answer(rpc, self.endpoints[server], call)

    def close(self) -> None:
        """See `Transport`."""
        for channel in self._channels:
            channel.close()
