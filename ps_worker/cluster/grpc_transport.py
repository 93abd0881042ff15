"""Calls to servers over gRPC: the only place on the worker's side that knows it.

Every call has a deadline. Calls that only read or declare, and messages, which have numbers, are tried again
by the channel when a server is unavailable, within that deadline; a push never is, because the server could
not tell it from a new one.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from protos.chunking import CHUNK_BYTES, PushChunk
from protos.gradients import Values
from protos.keys import Keys
from protos.spec import DenseSpec, TableSpec
from protos.store import (
    Changed,
    Future,
    InferenceSettings,
    Message,
    Missing,
    Numbers,
    Pulled,
    PushId,
    Reduced,
    ReduceOp,
    Shrunk,
    Version,
    WorkerProgress,
)
from protos.v1 import (
    control_plane_pb2,
    data_plane_pb2,
    parameter_server_pb2,
    parameter_server_pb2_grpc,
)
from protos.wire import control_messages, data_messages, spec_messages
from protos.wire.channel import CHANNEL_OPTIONS
from protos.wire.grpc_status import error_of
from ps_worker.cluster.transport import ServerStatus

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_SERVICE = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"].full_name

# Repeating these changes nothing on a server, not even on one that was restarted in between: it knows no
# tables or messages, and says so.
_RETRIED = (
    "CreateTable",
    "CreateDense",
    "PullSparse",
    "PullDense",
    "Post",
    "Take",
    "CheckFolder",
    "GetDigest",
    "GetStatus",
)

_RETRY_OPTIONS = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "methodConfig": [
                    {
                        "name": [{"service": _SERVICE, "method": method} for method in _RETRIED],
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


class _Call(Generic[T_co]):
    """An answer on its way: `result` waits for it, at most until its deadline."""

    def __init__(self, rpc: Any, endpoint: str, name: str, decode: Callable[[Any], T_co]) -> None:
        self._rpc = rpc
        self._endpoint = endpoint
        self._name = name
        self._decode = decode

    def result(self) -> T_co:
        """Returns the answer, or raises what the server raised, or TransportError."""
        try:
            response = self._rpc.result()
        except grpc.RpcError as failure:
            raise error_of(failure, self._endpoint, self._name) from failure
        return self._decode(response)


class GrpcTransport:
    """Channels to all servers: a `ps_worker.cluster.transport.Transport`. Thread-safe."""

    def __init__(self, endpoints: Sequence[str], deadlines: Deadlines | None = None) -> None:
        """Opens a channel to each server; whether they answer shows at the first call."""
        self.endpoints: Sequence[str] = tuple(endpoints)
        self._deadlines = deadlines or Deadlines()
        self._channels = [
            grpc.insecure_channel(endpoint, options=[*CHANNEL_OPTIONS, *_RETRY_OPTIONS])
            for endpoint in endpoints
        ]
        self._stubs = [
            parameter_server_pb2_grpc.ParameterServerStub(channel)  # type: ignore[no-untyped-call]
            for channel in self._channels
        ]

    def create_table(self, server: int, spec: TableSpec) -> Future[None]:
        """See `Transport`."""
        request = control_plane_pb2.CreateTableRequest(
            spec=spec_messages.table_spec_to_message(spec)
        )
        return self._call(server, "CreateTable", request, _nothing)

    def create_dense(self, server: int, spec: DenseSpec) -> Future[None]:
        """See `Transport`."""
        request = control_plane_pb2.CreateDenseRequest(
            spec=spec_messages.dense_spec_to_message(spec)
        )
        return self._call(server, "CreateDense", request, _nothing)

    def pull_sparse(
        self, server: int, keys: Mapping[str, Keys], missing: Missing, at: Version | None
    ) -> Future[Pulled]:
        """See `Transport`."""
        num_keys = {table: column.size for table, column in keys.items()}
        return self._call(
            server,
            "PullSparse",
            data_messages.pull_sparse_request(keys, missing, at),
            lambda response: data_messages.pulled_rows(response, num_keys),
            wait_s=self._wait_s(at),
        )

    def pull_dense(
        self, server: int, blocks: Sequence[str], at: Version | None
    ) -> Future[tuple[Mapping[str, Values], Version]]:
        """See `Transport`."""
        return self._call(
            server,
            "PullDense",
            data_messages.pull_dense_request(blocks, at),
            lambda response: (data_messages.pulled_pieces(response), response.version),
            wait_s=self._wait_s(at),
        )

    def pull_changed(
        self, server: int, tables: Sequence[str], worker: int, max_rows: int
    ) -> Future[Changed]:
        """See `Transport`."""
        request = data_messages.pull_changed_request(tables, worker, max_rows)
        return self._call(server, "PullChanged", request, data_messages.changed_from_message)

    def push_grad(
        self, server: int, part: PushChunk, push_id: PushId, at: Version | None
    ) -> Future[Version]:
        """See `Transport`."""
        return self._call(
            server, "PushGrad", data_messages.push_grad_request(push_id, part, at), _version
        )

    def post(self, server: int, exchange: str, message: Message) -> Future[None]:
        """See `Transport`."""
        request = data_messages.post_request(exchange, message)
        wait_s = self._deadlines.wait_s
        return self._call(server, "Post", request, _nothing, wait_s=wait_s)

    def take(
        self, server: int, exchange: str, worker: int, received: int
    ) -> Future[Sequence[Message]]:
        """See `Transport`."""
        request = data_plane_pb2.TakeRequest(exchange=exchange, worker=worker, received=received)
        return self._call(
            server,
            "Take",
            request,
            lambda response: data_messages.taken_from_response(response, worker),
            wait_s=self._deadlines.wait_s,
        )

    def barrier(self, server: int, name: str, worker: int, step: Version) -> Future[Version]:
        """See `Transport`."""
        request = control_plane_pb2.BarrierRequest(name=name, worker=worker, step=step)
        return self._call(server, "Barrier", request, _version, wait_s=self._deadlines.wait_s)

    def all_reduce(
        self, server: int, name: str, worker: int, values: Numbers, op: ReduceOp, step: Version
    ) -> Future[Reduced]:
        """See `Transport`."""
        request = control_messages.all_reduce_request(name, worker, values, op, step)
        wait_s = self._deadlines.wait_s
        return self._call(
            server, "Barrier", request, control_messages.reduced_from_message, wait_s=wait_s
        )

    def advance(self, server: int, worker: int, clock: int, at_least: int) -> Future[int]:
        """See `Transport`."""
        request = control_plane_pb2.AdvanceRequest(worker=worker, clock=clock, at_least=at_least)
        wait_s = self._deadlines.wait_s
        return self._call(
            server, "Advance", request, lambda response: int(response.slowest), wait_s=wait_s
        )

    def leave(self, server: int, worker: int, step: Version) -> Future[None]:
        """See `Transport`."""
        request = control_plane_pb2.LeaveRequest(worker=worker, step=step)
        return self._call(server, "Leave", request, _nothing)

    def check_folder(self, server: int, folder: str, token: str) -> Future[None]:
        """See `Transport`."""
        request = control_plane_pb2.CheckFolderRequest(folder=folder, token=token)
        return self._call(server, "CheckFolder", request, _nothing)

    def snapshot(self, server: int, token: str, base: str) -> Future[None]:
        """See `Transport`; it may wait for another save to end."""
        request = control_plane_pb2.SnapshotRequest(token=token, base=base)
        return self._call(server, "Snapshot", request, _nothing, wait_s=self._deadlines.wait_s)

    def save(self, server: int, folder: str, token: str) -> Future[str]:
        """See `Transport`."""
        request = control_plane_pb2.SaveRequest(folder=folder, token=token)
        wait_s = self._deadlines.checkpoint_s
        return self._call(
            server, "Save", request, lambda response: str(response.part), wait_s=wait_s
        )

    def save_inference(
        self, server: int, folder: str, token: str, settings: InferenceSettings
    ) -> Future[str]:
        """See `Transport`."""
        request = control_messages.save_inference_request(folder, token, settings)
        wait_s = self._deadlines.checkpoint_s
        return self._call(
            server, "Save", request, lambda response: str(response.part), wait_s=wait_s
        )

    def load(self, server: int, folder: str, token: str, only: Collection[str]) -> Future[None]:
        """See `Transport`."""
        request = control_plane_pb2.LoadRequest(folder=folder, token=token, only=sorted(only))
        wait_s = self._deadlines.checkpoint_s
        return self._call(server, "Load", request, _nothing, wait_s=wait_s)

    def resume(
        self, server: int, version: Version, progress: Mapping[int, WorkerProgress]
    ) -> Future[None]:
        """See `Transport`."""
        request = control_messages.resume_request(version, progress)
        return self._call(server, "Resume", request, _nothing)

    def shrink(
        self, server: int, max_norm: float | None, dry_run: bool
    ) -> Future[Mapping[str, Shrunk]]:
        """See `Transport`."""
        request = control_plane_pb2.ShrinkRequest(max_norm=max_norm, dry_run=dry_run)
        wait_s = self._deadlines.checkpoint_s
        return self._call(
            server, "Shrink", request, control_messages.shrunk_from_message, wait_s=wait_s
        )

    def digest(self, server: int) -> Future[Mapping[tuple[str, int], bytes]]:
        """See `Transport`."""
        request = control_plane_pb2.GetDigestRequest()
        wait_s = self._deadlines.checkpoint_s
        return self._call(
            server, "GetDigest", request, control_messages.digests_from_message, wait_s=wait_s
        )

    def status(self, server: int, *, wait_s: float | None = None) -> Future[ServerStatus]:
        """See `Transport`."""
        rpc = self._stubs[server].GetStatus.future(
            control_plane_pb2.GetStatusRequest(),
            timeout=self._deadlines.rpc_s if wait_s is None else wait_s,
            wait_for_ready=wait_s is not None,
        )
        return _Call(rpc, self.endpoints[server], "GetStatus", _status)

    def close(self) -> None:
        """See `Transport`."""
        for channel in self._channels:
            channel.close()

    def _wait_s(self, at: Version | None) -> float:
        return 0.0 if at is None else self._deadlines.wait_s

    def _call(
        self,
        server: int,
        name: str,
        request: Any,
        decode: Callable[[Any], T],
        wait_s: float = 0.0,
    ) -> _Call[T]:
        method = getattr(self._stubs[server], name)
        rpc = method.future(request, timeout=self._deadlines.rpc_s + wait_s)
        return _Call(rpc, self.endpoints[server], name, decode)


def _nothing(_response: Any) -> None:
    return None


def _version(response: Any) -> Version:
    return int(response.version)


def _status(response: control_plane_pb2.GetStatusResponse) -> ServerStatus:
    return ServerStatus(
        control_messages.status_from_message(response), response.server_index, response.num_servers
    )
