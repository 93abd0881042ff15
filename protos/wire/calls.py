"""The calls to a server: one row an RPC, with its codecs and its deadline.

    client: argument --request.encode--> message ~~~> message --request.decode--> argument: server
    server: answer --answer.encode--> message ~~~> message --answer.decode--> answer: client

A new RPC needs its messages in protos/v1/parameter_server.proto, a dataclass in requests.py, a row here, a
method of a facet in protos/store and of both stores; a server calls the method that has the RPC's name, with
the fields of the argument, unless ps_server/rpc/handlers.py has a handler for it.

Every call is idempotent: sent again because its answer was lost, it changes nothing and is answered alike.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass

from protos.spec import TableSpec
from protos.store import (
    Changed,
    Joined,
    Message,
    Pulled,
    PulledPieces,
    Reduced,
    ServerStatus,
    Shrunk,
    StateChunk,
    Version,
)
from protos.v1 import parameter_server_pb2
from protos.wire import columns
from protos.wire.codec import Codec, FieldCodec, record_codec, value_codec
from protos.wire.requests import (
    Abort,
    Advance,
    AllReduce,
    Barrier,
    CheckFolder,
    CreateDense,
    Join,
    Leave,
    Load,
    Post,
    PullChanged,
    PullDense,
    PullSparse,
    PullState,
    PushGrad,
    PushState,
    Renew,
    Resume,
    Save,
    Shrink,
    Snapshot,
    Take,
    WaitVersion,
)

T = TypeVar("T")
Q = TypeVar("Q")  # what a call is given
A = TypeVar("A")  # what it answers

_SERVICE = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"]

SERVICE: str = _SERVICE.full_name


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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call(Generic[Q, A]):
    """One RPC of `ParameterServer`.

    Attributes:
        name: Its name in the .proto file, which says what it does.
        request: What it is given.
        answer: What it answers.
        deadline: How long it may take.
        retry: Whether it is worth sending again while its server is unavailable.
    """

    name: str
    request: Codec[Q]
    answer: Codec[A]
    deadline: Deadline = Deadline.PLAIN
    retry: bool = True


CodecOf = Callable[[Descriptor], Codec[T]]
"""Makes the codec for a type of message."""


def _call(
    name: str,
    request: CodecOf[Q],
    answer: CodecOf[A],
    *,
    deadline: Deadline = Deadline.PLAIN,
    retry: bool = True,
) -> Call[Q, A]:
    method = _SERVICE.methods_by_name[name]
    return Call(
        name=name,
        request=request(method.input_type),
        answer=answer(method.output_type),
        deadline=deadline,
        retry=retry,
    )


def _nothing(message: Descriptor) -> Codec[None]:
    class_ = GetMessageClass(message)
    return Codec(class_, lambda _: class_(), lambda _: None)


def _record(record: type[T], **columns: FieldCodec[Any]) -> CodecOf[T]:
    """A message whose fields are those of a dataclass; codecs for its columns of numbers."""
    return lambda message: record_codec(record, message, **columns)


def _value(name: str, annotation: Any, codec: FieldCodec[Any] | None = None) -> CodecOf[Any]:
    """A message whose only field is the value."""
    return lambda message: value_codec(annotation, name, message, codec)


# It may wait for a lease to run out.
JOIN: Call[Join, Joined] = _call("Join", _record(Join), _record(Joined), deadline=Deadline.WORKERS)
# The next one comes soon.
RENEW: Call[Renew, None] = _call("Renew", _record(Renew), _nothing, retry=False)
CREATE_TABLE: Call[TableSpec, None] = _call("CreateTable", _value("spec", TableSpec), _nothing)
CREATE_DENSE: Call[CreateDense, None] = _call(
    "CreateDense",
    _record(CreateDense, values=columns.VALUES),
    _nothing,
)
PULL_SPARSE: Call[PullSparse, Pulled] = _call(
    "PullSparse",
    _record(PullSparse, keys=columns.KEYS),
    _record(Pulled, rows=columns.ROWS),
    deadline=Deadline.VERSION,
)
PULL_DENSE: Call[PullDense, PulledPieces] = _call(
    "PullDense",
    _record(PullDense),
    _record(PulledPieces, pieces=columns.PIECES),
    deadline=Deadline.VERSION,
)
PULL_CHANGED: Call[PullChanged, Changed] = _call(
    "PullChanged",
    _record(PullChanged),
    _record(Changed, rows=columns.CHANGED_ROWS),
)
PUSH_GRAD: Call[PushGrad, Version] = _call(
    "PushGrad",
    _record(PushGrad, chunk=columns.CHUNK),
    _value("version", Version),
)
PULL_STATE: Call[PullState, StateChunk] = _call(
    "PullState",
    _record(PullState, keys=columns.KEYS),
    _value("state", StateChunk, columns.STATE),
)
PUSH_STATE: Call[PushState, Version] = _call(
    "PushState",
    _record(PushState, chunk=columns.STATE),
    _value("version", Version),
)
POST: Call[Post, None] = _call(
    "Post",
    _record(Post),
    _nothing,
    deadline=Deadline.WORKERS,
)
TAKE: Call[Take, Sequence[Message]] = _call(
    "Take",
    _record(Take),
    _value("messages", Sequence[Message]),
    deadline=Deadline.WORKERS,
)
WAIT_VERSION: Call[WaitVersion, Version] = _call(
    "WaitVersion",
    _record(WaitVersion),
    _value("version", Version),
    deadline=Deadline.WORKERS,
)
BARRIER: Call[Barrier, Version] = _call(
    "Barrier", _record(Barrier), _value("version", Version), deadline=Deadline.WORKERS
)
ALL_REDUCE: Call[AllReduce, Reduced] = _call(
    "AllReduce",
    _record(AllReduce),
    _record(Reduced),
    deadline=Deadline.WORKERS,
)
ADVANCE: Call[Advance, int] = _call(
    "Advance", _record(Advance), _value("slowest", int), deadline=Deadline.WORKERS
)
LEAVE: Call[Leave, None] = _call("Leave", _record(Leave), _nothing)
# Its process ends, and a server that is not there learns that by the lease.
ABORT: Call[Abort, None] = _call("Abort", _record(Abort), _nothing, retry=False)
CHECK_FOLDER: Call[CheckFolder, None] = _call("CheckFolder", _record(CheckFolder), _nothing)
# It may wait for another save to end.
SNAPSHOT: Call[Snapshot, None] = _call(
    "Snapshot", _record(Snapshot), _nothing, deadline=Deadline.WORKERS
)
# Answers with the server's entries of the manifest, as JSON.
SAVE: Call[Save, str] = _call(
    "Save",
    _record(Save),
    _value("share", str),
    deadline=Deadline.CHECKPOINT,
)
LOAD: Call[Load, None] = _call("Load", _record(Load), _nothing, deadline=Deadline.CHECKPOINT)
RESUME: Call[Resume, None] = _call(
    "Resume",
    _record(Resume),
    _nothing,
)
SHRINK: Call[Shrink, Mapping[str, Shrunk]] = _call(
    "Shrink",
    _record(Shrink),
    _value("tables", Mapping[str, Shrunk]),
    deadline=Deadline.CHECKPOINT,
)
GET_DIGEST: Call[None, Mapping[tuple[str, int], bytes]] = _call(
    "GetDigest",
    _nothing,
    _value("shards", Mapping[tuple[str, int], bytes], columns.DIGESTS),
    deadline=Deadline.CHECKPOINT,
)
GET_STATUS: Call[None, ServerStatus] = _call(
    "GetStatus",
    _nothing,
    _record(ServerStatus),
)

CALLS: Mapping[str, Call[Any, Any]] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Call)
}
"""All of them, by name."""
