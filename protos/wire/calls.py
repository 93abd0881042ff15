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


def _message(name: str) -> type[Any]:
    """Returns the class of a message of the .proto files."""
    module = data_plane_pb2 if hasattr(data_plane_pb2, name) else parameter_server_pb2
    message: type[Any] = getattr(module, name)
    return message


CodecOf = Callable[[type[Any]], Codec[T]]
"""Makes the codec of a message's class."""


def _call(
    name: str,
    request: CodecOf[Q],
    answer: CodecOf[A],
    *,
    deadline: Deadline = Deadline.PLAIN,
    retry: bool = False,
) -> Call[Q, A]:
    return Call(
        name=name,
        request=request(_message(f"{name}Request")),
        answer=answer(_message(f"{name}Response")),
        deadline=deadline,
        retry=retry,
    )


def _coded(encode: Callable[[T], Any], decode: Callable[[Any], T]) -> CodecOf[T]:
    return lambda message: Codec(message, encode, decode)


def _empty(message: type[Any]) -> Codec[None]:
    return Codec(message, lambda _: message(), lambda _: None)


def _field(name: str) -> CodecOf[Any]:
    """A message whose only field is the value."""
    return lambda message: Codec(
        message, lambda value: message(**{name: value}), lambda found: getattr(found, name)
    )


def _fields(dataclass_: type[T]) -> CodecOf[T]:
    """A message whose fields are named and typed as those of a dataclass; None is an absent field."""
    names = [field.name for field in fields(dataclass_)]  # type: ignore[arg-type]

    def codec(message: type[Any]) -> Codec[T]:
        described = message.DESCRIPTOR.fields_by_name
        optional = {name for name in names if described[name].has_presence}

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

    return codec


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


CREATE_TABLE: Call[TableSpec, None] = _call(
    "CreateTable",
    _coded(
        lambda spec: parameter_server_pb2.CreateTableRequest(
            spec=spec_messages.table_spec_to_message(spec)
        ),
        lambda message: spec_messages.table_spec_from_message(message.spec),
    ),
    _empty,
    retry=True,
)
CREATE_DENSE: Call[DenseSpec, None] = _call(
    "CreateDense",
    _coded(
        lambda spec: parameter_server_pb2.CreateDenseRequest(
            spec=spec_messages.dense_spec_to_message(spec)
        ),
        lambda message: spec_messages.dense_spec_from_message(message.spec),
    ),
    _empty,
    retry=True,
)
PULL_SPARSE: Call[data_messages.PullSparse, Pulled] = _call(
    "PullSparse",
    _coded(data_messages.pull_sparse_to_message, data_messages.pull_sparse_from_message),
    _coded(data_messages.pulled_to_message, data_messages.pulled_from_message),
    deadline=Deadline.VERSION,
    retry=True,
)
PULL_DENSE: Call[data_messages.PullDense, PulledPieces] = _call(
    "PullDense",
    _coded(data_messages.pull_dense_to_message, data_messages.pull_dense_from_message),
    _coded(data_messages.pieces_to_message, data_messages.pieces_from_message),
    deadline=Deadline.VERSION,
    retry=True,
)
# Not retried: rows in an answer count as known to the worker.
PULL_CHANGED: Call[PullChanged, Changed] = _call(
    "PullChanged",
    _fields(PullChanged),
    _coded(data_messages.changed_to_message, data_messages.changed_from_message),
)
# Not retried: a server could not tell a repeated push from a new one.
PUSH_GRAD: Call[data_messages.PushGrad, Version] = _call(
    "PushGrad",
    _coded(data_messages.push_grad_to_message, data_messages.push_grad_from_message),
    _field("version"),
)
POST: Call[data_messages.Post, None] = _call(
    "Post",
    _coded(data_messages.post_to_message, data_messages.post_from_message),
    _empty,
    deadline=Deadline.WORKERS,
    retry=True,
)
TAKE: Call[Take, Sequence[Message]] = _call(
    "Take",
    _fields(Take),
    _coded(data_messages.taken_to_message, data_messages.taken_from_message),
    deadline=Deadline.WORKERS,
    retry=True,
)
WAIT_VERSION: Call[WaitVersion, Version] = _call(
    "WaitVersion",
    _fields(WaitVersion),
    _field("version"),
    deadline=Deadline.WORKERS,
    retry=True,
)
BARRIER: Call[Barrier, Version] = _call(
    "Barrier", _fields(Barrier), _field("version"), deadline=Deadline.WORKERS
)
ALL_REDUCE: Call[control_messages.AllReduce, Reduced] = _call(
    "AllReduce",
    _coded(control_messages.all_reduce_to_message, control_messages.all_reduce_from_message),
    _coded(control_messages.reduced_to_message, control_messages.reduced_from_message),
    deadline=Deadline.WORKERS,
)
ADVANCE: Call[Advance, int] = _call(
    "Advance", _fields(Advance), _field("slowest"), deadline=Deadline.WORKERS
)
# Not retried: late ones would count for the next job of a server that stays.
LEAVE: Call[Leave, None] = _call("Leave", _fields(Leave), _empty)
ABORT: Call[Abort, None] = _call("Abort", _fields(Abort), _empty)
CHECK_FOLDER: Call[CheckFolder, None] = _call(
    "CheckFolder", _fields(CheckFolder), _empty, retry=True
)
# It may wait for another save to end.
SNAPSHOT: Call[Snapshot, None] = _call(
    "Snapshot", _fields(Snapshot), _empty, deadline=Deadline.WORKERS
)
# Answers with the server's entries of the manifest, as JSON.
SAVE: Call[control_messages.Save, str] = _call(
    "Save",
    _coded(control_messages.save_to_message, control_messages.save_from_message),
    _field("share"),
    deadline=Deadline.CHECKPOINT,
)
LOAD: Call[Load, None] = _call("Load", _fields(Load), _empty, deadline=Deadline.CHECKPOINT)
RESUME: Call[control_messages.Resume, None] = _call(
    "Resume",
    _coded(control_messages.resume_to_message, control_messages.resume_from_message),
    _empty,
)
# Not retried: each call is a pass.
SHRINK: Call[Shrink, Mapping[str, Shrunk]] = _call(
    "Shrink",
    _fields(Shrink),
    _coded(control_messages.shrunk_to_message, control_messages.shrunk_from_message),
    deadline=Deadline.CHECKPOINT,
)
GET_DIGEST: Call[None, Mapping[tuple[str, int], bytes]] = _call(
    "GetDigest",
    _empty,
    _coded(control_messages.digests_to_message, control_messages.digests_from_message),
    deadline=Deadline.CHECKPOINT,
    retry=True,
)
GET_STATUS: Call[None, ServerStatus] = _call(
    "GetStatus",
    _empty,
    _coded(control_messages.status_to_message, control_messages.status_from_message),
    retry=True,
)

CALLS: Mapping[str, Call[Any, Any]] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Call)
}
"""All of them, by name."""
