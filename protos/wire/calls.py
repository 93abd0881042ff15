"""The calls to a server: one row an RPC, with its codecs, its deadline and whether it is retried.

    client: argument --request.encode--> message ~~~> message --request.decode--> argument: server
    server: answer --answer.encode--> message ~~~> message --answer.decode--> answer: client

A new RPC needs its messages in protos/v1/parameter_server.proto, a row here, a method of a facet in
protos/store and of both stores; a server calls the method that has the RPC's name, with the fields of the
argument, unless ps_server/rpc/handlers.py has a handler for it.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from protos.spec import DenseSpec, TableSpec
from protos.store import (
    Changed,
    Message,
    Pulled,
    PulledPieces,
    Reduced,
    ServerStatus,
    Shrunk,
    Version,
)
from protos.v1 import data_plane_pb2, parameter_server_pb2
from protos.wire import control_messages, data_messages, spec_messages

T = TypeVar("T")
Q = TypeVar("Q")  # what a call is given
A = TypeVar("A")  # what it answers

SERVICE: str = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"].full_name


class Deadline(enum.Enum):
    """How long a call may take."""

    PLAIN = enum.auto()
    """A moment."""
    VERSION = enum.auto()
    """As long as other workers, if its argument has a version `at` to wait for; else a moment."""
    WORKERS = enum.auto()
    """As long as other workers."""
    CHECKPOINT = enum.auto()
    """As long as a pass over all rows, or over a checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class Codec(Generic[T]):
    """Values as messages of one protobuf class, and back."""

    message: type[Any]
    encode: Callable[[T], Any]
    decode: Callable[[Any], T]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call(Generic[Q, A]):
    """One RPC of `ParameterServer`.

    Attributes:
        name: Its name in the .proto file, which says what it does.
        request: What it is given.
        answer: What it answers.
        deadline: How long it may take.
        retry: Whether a client may repeat it when a server is unavailable: repeated, it changes nothing.
    """

    name: str
    request: Codec[Q]
    answer: Codec[A]
    deadline: Deadline = Deadline.PLAIN
    retry: bool = False


def _empty(message: type[Any]) -> Codec[None]:
    return Codec(message, lambda _: message(), lambda _: None)


def _field(message: type[Any], name: str) -> Codec[Any]:
    """A message whose only field is the value."""
    return Codec(
        message, lambda value: message(**{name: value}), lambda found: getattr(found, name)
    )


def _fields(message: type[Any], dataclass_: type[T]) -> Codec[T]:
    """A message whose fields are named and typed as those of a dataclass; None is an absent field."""
    names = [field.name for field in fields(dataclass_)]  # type: ignore[arg-type]
    optional = {name for name in names if message.DESCRIPTOR.fields_by_name[name].has_presence}

    def encode(value: T) -> Any:
        return message(**{name: getattr(value, name) for name in names})

    def decode(found: Any) -> T:
        return dataclass_(
            **{
                name: None
                if name in optional and not found.HasField(name)
                else getattr(found, name)
                for name in names
            }
        )

    return Codec(message, encode, decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullChanged:
    """See `Changes.pull_changed`."""

    tables: Sequence[str]
    worker: int
    max_rows: int
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """See `Exchange.take`."""

    exchange: str
    worker: int
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitVersion:
    """See `Coordination.wait_version`."""

    at: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """See `Coordination.barrier`."""

    name: str
    worker: int
    step: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """See `Coordination.advance`."""

    worker: int
    clock: int
    at_least: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """See `Coordination.leave`."""

    worker: int
    step: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """See `Coordination.abort`."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFolder:
    """Request to check that a server could save into a folder, which holds the token."""

    folder: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Request for a snapshot, to be saved with the same token; `base` is the token of a delta's base."""

    token: str
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """See `Checkpoints.load`; of the server's share."""

    url: str
    token: str = ""
    only: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """See `Admin.shrink`; of the server's shards."""

    max_norm: float | None = None
    dry_run: bool = False


CREATE_TABLE: Call[TableSpec, None] = Call(
    name="CreateTable",
    request=Codec(
        parameter_server_pb2.CreateTableRequest,
        lambda spec: parameter_server_pb2.CreateTableRequest(
            spec=spec_messages.table_spec_to_message(spec)
        ),
        lambda message: spec_messages.table_spec_from_message(message.spec),
    ),
    answer=_empty(parameter_server_pb2.CreateTableResponse),
    retry=True,
)
CREATE_DENSE: Call[DenseSpec, None] = Call(
    name="CreateDense",
    request=Codec(
        parameter_server_pb2.CreateDenseRequest,
        lambda spec: parameter_server_pb2.CreateDenseRequest(
            spec=spec_messages.dense_spec_to_message(spec)
        ),
        lambda message: spec_messages.dense_spec_from_message(message.spec),
    ),
    answer=_empty(parameter_server_pb2.CreateDenseResponse),
    retry=True,
)
PULL_SPARSE: Call[data_messages.PullSparse, Pulled] = Call(
    name="PullSparse",
    request=Codec(
        data_plane_pb2.PullSparseRequest,
        data_messages.pull_sparse_to_message,
        data_messages.pull_sparse_from_message,
    ),
    answer=Codec(
        data_plane_pb2.PullSparseResponse,
        data_messages.pulled_to_message,
        data_messages.pulled_from_message,
    ),
    deadline=Deadline.VERSION,
    retry=True,
)
PULL_DENSE: Call[data_messages.PullDense, PulledPieces] = Call(
    name="PullDense",
    request=Codec(
        data_plane_pb2.PullDenseRequest,
        data_messages.pull_dense_to_message,
        data_messages.pull_dense_from_message,
    ),
    answer=Codec(
        data_plane_pb2.PullDenseResponse,
        data_messages.pieces_to_message,
        data_messages.pieces_from_message,
    ),
    deadline=Deadline.VERSION,
    retry=True,
)
# Not retried: rows in an answer count as known to the worker.
PULL_CHANGED: Call[PullChanged, Changed] = Call(
    name="PullChanged",
    request=_fields(data_plane_pb2.PullChangedRequest, PullChanged),
    answer=Codec(
        data_plane_pb2.PullChangedResponse,
        data_messages.changed_to_message,
        data_messages.changed_from_message,
    ),
)
# Not retried: a server could not tell a repeated push from a new one.
PUSH_GRAD: Call[data_messages.PushGrad, Version] = Call(
    name="PushGrad",
    request=Codec(
        data_plane_pb2.PushGradRequest,
        data_messages.push_grad_to_message,
        data_messages.push_grad_from_message,
    ),
    answer=_field(data_plane_pb2.PushGradResponse, "version"),
)
POST: Call[data_messages.Post, None] = Call(
    name="Post",
    request=Codec(
        data_plane_pb2.PostRequest,
        data_messages.post_to_message,
        data_messages.post_from_message,
    ),
    answer=_empty(data_plane_pb2.PostResponse),
    deadline=Deadline.WORKERS,
    retry=True,
)
TAKE: Call[Take, Sequence[Message]] = Call(
    name="Take",
    request=_fields(data_plane_pb2.TakeRequest, Take),
    answer=Codec(
        data_plane_pb2.TakeResponse,
        data_messages.taken_to_message,
        data_messages.taken_from_message,
    ),
    deadline=Deadline.WORKERS,
    retry=True,
)
WAIT_VERSION: Call[WaitVersion, Version] = Call(
    name="WaitVersion",
    request=_fields(parameter_server_pb2.WaitVersionRequest, WaitVersion),
    answer=_field(parameter_server_pb2.WaitVersionResponse, "version"),
    deadline=Deadline.WORKERS,
    retry=True,
)
BARRIER: Call[Barrier, Version] = Call(
    name="Barrier",
    request=_fields(parameter_server_pb2.BarrierRequest, Barrier),
    answer=_field(parameter_server_pb2.BarrierResponse, "version"),
    deadline=Deadline.WORKERS,
)
ALL_REDUCE: Call[control_messages.AllReduce, Reduced] = Call(
    name="AllReduce",
    request=Codec(
        parameter_server_pb2.AllReduceRequest,
        control_messages.all_reduce_to_message,
        control_messages.all_reduce_from_message,
    ),
    answer=Codec(
        parameter_server_pb2.AllReduceResponse,
        control_messages.reduced_to_message,
        control_messages.reduced_from_message,
    ),
    deadline=Deadline.WORKERS,
)
ADVANCE: Call[Advance, int] = Call(
    name="Advance",
    request=_fields(parameter_server_pb2.AdvanceRequest, Advance),
    answer=_field(parameter_server_pb2.AdvanceResponse, "slowest"),
    deadline=Deadline.WORKERS,
)
# Not retried: a late one would count for the next job of a server that stays.
LEAVE: Call[Leave, None] = Call(
    name="Leave",
    request=_fields(parameter_server_pb2.LeaveRequest, Leave),
    answer=_empty(parameter_server_pb2.LeaveResponse),
)
# Not retried: a late one would end the next job of a server that stays.
ABORT: Call[Abort, None] = Call(
    name="Abort",
    request=_fields(parameter_server_pb2.AbortRequest, Abort),
    answer=_empty(parameter_server_pb2.AbortResponse),
)
CHECK_FOLDER: Call[CheckFolder, None] = Call(
    name="CheckFolder",
    request=_fields(parameter_server_pb2.CheckFolderRequest, CheckFolder),
    answer=_empty(parameter_server_pb2.CheckFolderResponse),
    retry=True,
)
# It may wait for another save to end.
SNAPSHOT: Call[Snapshot, None] = Call(
    name="Snapshot",
    request=_fields(parameter_server_pb2.SnapshotRequest, Snapshot),
    answer=_empty(parameter_server_pb2.SnapshotResponse),
    deadline=Deadline.WORKERS,
)
# Answers with the server's entries of the manifest, as JSON.
SAVE: Call[control_messages.Save, str] = Call(
    name="Save",
    request=Codec(
        parameter_server_pb2.SaveRequest,
        control_messages.save_to_message,
        control_messages.save_from_message,
    ),
    answer=_field(parameter_server_pb2.SaveResponse, "share"),
    deadline=Deadline.CHECKPOINT,
)
LOAD: Call[Load, None] = Call(
    name="Load",
    request=_fields(parameter_server_pb2.LoadRequest, Load),
    answer=_empty(parameter_server_pb2.LoadResponse),
    deadline=Deadline.CHECKPOINT,
)
RESUME: Call[control_messages.Resume, None] = Call(
    name="Resume",
    request=Codec(
        parameter_server_pb2.ResumeRequest,
        control_messages.resume_to_message,
        control_messages.resume_from_message,
    ),
    answer=_empty(parameter_server_pb2.ResumeResponse),
)
# Not retried: each call is a pass.
SHRINK: Call[Shrink, Mapping[str, Shrunk]] = Call(
    name="Shrink",
    request=_fields(parameter_server_pb2.ShrinkRequest, Shrink),
    answer=Codec(
        parameter_server_pb2.ShrinkResponse,
        control_messages.shrunk_to_message,
        control_messages.shrunk_from_message,
    ),
    deadline=Deadline.CHECKPOINT,
)
GET_DIGEST: Call[None, Mapping[tuple[str, int], bytes]] = Call(
    name="GetDigest",
    request=_empty(parameter_server_pb2.GetDigestRequest),
    answer=Codec(
        parameter_server_pb2.GetDigestResponse,
        control_messages.digests_to_message,
        control_messages.digests_from_message,
    ),
    deadline=Deadline.CHECKPOINT,
    retry=True,
)
GET_STATUS: Call[None, ServerStatus] = Call(
    name="GetStatus",
    request=_empty(parameter_server_pb2.GetStatusRequest),
    answer=Codec(
        parameter_server_pb2.GetStatusResponse,
        control_messages.status_to_message,
        control_messages.status_from_message,
    ),
    retry=True,
)

CALLS: Mapping[str, Call[Any, Any]] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Call)
}
"""All of them, by name."""
