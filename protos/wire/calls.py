"""The calls to a server: one row an RPC, with all of its properties.

    client: argument --request.encode--> bytes ~~~> bytes --request.decode--> argument: server
    server: answer --answer.encode--> bytes ~~~> bytes --answer.decode--> answer: client

A new RPC needs its messages in protos/v1/parameter_server.proto, a dataclass in requests.py, a row here,
and a method of a facet in protos/store and of both stores. A server calls the method of the RPC's name
with the fields of the argument, unless ps_server/rpc/handlers.py has a handler for it.

Every call is idempotent: after a lost answer it is retried, changes nothing, and is answered alike.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import MethodDescriptor

from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import (
    Changed,
    Joined,
    Message,
    Pulled,
    PulledPieces,
    PushedPulled,
    Reduced,
    ServerStatus,
    Shrunk,
    StateChunk,
    TakenFile,
    Version,
)
from ctr_ps.protos.store.moves import Cut, LogRecord, MapState, Taken
from ctr_ps.protos.v1 import parameter_server_pb2
from ctr_ps.protos.wire import requests
from ctr_ps.protos.wire.encoding import columns
from ctr_ps.protos.wire.encoding.codec import Codec, CodecOf, no_fields, record, value, whole
from ctr_ps.protos.wire.security.access import Access, Method

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
    KERNELS = enum.auto()
    """As long as kernels take to compile, on the first start of a server."""
    CHECKPOINT = enum.auto()
    """As long as a pass over all rows, or over a checkpoint."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a call waits for at its server until other workers arrive.

    `workers` are the awaited ones, if the call names them; errors of servers name all.
    """

    kind: str  # of waiting calls that are logged together
    place: str  # in lines of the log
    workers: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call(Method, Generic[Q, A]):
    """One RPC, which the .proto file documents, and the codecs of its argument and its answer."""

    access: Access = Access.TRAINER
    request: Codec[Q]
    answer: Codec[A]
    deadline: Deadline = Deadline.PLAIN
    is_logged: bool = False  # it changes a server's state, so a recovery repeats it
    is_durable: bool = False  # it changes nothing, but a loss of power does not undo its answer
    # in bulk: a stream takes it, and an overloaded server refuses it, unless a driver of moves calls
    moves_data: bool = False
    # it visits all rows, reaches a file system, or applies the steps that it completes
    is_long: bool = False
    # returns the spec in an argument, whose kernels may have to be compiled; None: no spec
    declares: Callable[[Q], TableSpec | DenseSpec] | None = None
    # returns what an argument waits for, None for no other worker; None: it never waits
    awaits: Callable[[Q], Awaited | None] | None = None


def call_of(
    method: MethodDescriptor, request: CodecOf[Q], answer: CodecOf[A], **columns: Any
) -> Call[Q, A]:
    """Returns the row of an RPC; `columns` are those of `Call` with other values than the defaults."""
    return Call(
        service=method.containing_service.full_name,
        name=method.name,
        request=request(method.input_type),
        answer=answer(method.output_type),
        **columns,
    )


def _call(name: str, request: CodecOf[Q], answer: CodecOf[A], **columns: Any) -> Call[Q, A]:
    return call_of(_SERVICE.methods_by_name[name], request, answer, **columns)


def _at_step(step: Version | None) -> Awaited | None:
    return None if step is None else Awaited("step", f"step {step}")


def _at_barrier(arrival: requests.Barrier | requests.AllReduce) -> Awaited:
    return Awaited(f"barrier {arrival.name}", f"barrier {arrival.name}")


def _in_exchange(call: requests.Post | requests.Take, workers: str = "") -> Awaited:
    return Awaited(f"exchange {call.exchange}", f"exchange {call.exchange}", workers)


# It may wait for a lease to run out.
JOIN: Call[requests.Join, Joined] = _call(
    "Join",
    record(requests.Join),
    record(Joined),
    deadline=Deadline.WORKERS,
    is_logged=True,
    awaits=lambda _: Awaited("join", "join"),
)
# Its sign of life is logged where it decides who has a place, by a record of its own.
# A worker that was lost comes back by it.
RENEW: Call[requests.Renew, None] = _call(
    "Renew", record(requests.Renew), no_fields, is_durable=True
)
CREATE_TABLE: Call[requests.CreateTable, None] = _call(
    "CreateTable",
    record(requests.CreateTable),
    no_fields,
    deadline=Deadline.KERNELS,
    is_logged=True,
    declares=lambda request: request.spec,
)
CREATE_DENSE: Call[requests.CreateDense, None] = _call(
    "CreateDense",
    record(requests.CreateDense, values=columns.VALUES),
    no_fields,
    deadline=Deadline.KERNELS,
    is_logged=True,
    declares=lambda request: request.spec,
)
PULL_SPARSE: Call[requests.PullSparse, Pulled] = _call(
    "PullSparse",
    record(requests.PullSparse, keys=columns.KEYS),
    whole(Pulled, columns.PULLED),
    deadline=Deadline.VERSION,
    access=Access.READER,
    moves_data=True,
    awaits=lambda pull: _at_step(pull.at),
)
PULL_DENSE: Call[requests.PullDense, PulledPieces] = _call(
    "PullDense",
    record(requests.PullDense),
    whole(PulledPieces, columns.PULLED_PIECES),
    deadline=Deadline.VERSION,
    access=Access.READER,
    moves_data=True,
    awaits=lambda pull: _at_step(pull.at),
)
PULL_CHANGED: Call[requests.PullChanged, Changed] = _call(
    "PullChanged",
    record(requests.PullChanged),
    record(Changed, rows=columns.CHANGED_ROWS),
    moves_data=True,
    is_long=True,
)
PUSH_GRAD: Call[requests.PushGrad, Version] = _call(
    "PushGrad",
    record(requests.PushGrad, chunk=columns.CHUNK),
    value("version", Version),
    is_logged=True,
    moves_data=True,
)
# Its parts are logged, as the calls that they are.
PUSH_PULL: Call[requests.PushPull, PushedPulled] = _call(
    "PushPull",
    record(
        requests.PushPull,
        push=PUSH_GRAD.request.fields,
        sparse=PULL_SPARSE.request.fields,
        dense=PULL_DENSE.request.fields,
    ),
    record(
        PushedPulled,
        push=PUSH_GRAD.answer.fields,
        sparse=PULL_SPARSE.answer.fields,
        dense=PULL_DENSE.answer.fields,
    ),
    deadline=Deadline.VERSION,
    moves_data=True,
    awaits=lambda both: _at_step(both.at),
)
PULL_STATE: Call[requests.PullState, StateChunk] = _call(
    "PullState",
    record(requests.PullState, keys=columns.KEYS),
    value("state", StateChunk, columns.STATE),
    moves_data=True,
)
PUSH_STATE: Call[requests.PushState, Version] = _call(
    "PushState",
    record(requests.PushState, chunk=columns.STATE),
    value("version", Version),
    is_logged=True,
    moves_data=True,
)
POST: Call[requests.Post, None] = _call(
    "Post",
    record(requests.Post),
    no_fields,
    deadline=Deadline.WORKERS,
    is_logged=True,
    moves_data=True,
    awaits=lambda post: _in_exchange(post, f"[{post.message.receiver}] "),
)
# What it takes is gone.
TAKE: Call[requests.Take, Sequence[Message]] = _call(
    "Take",
    record(requests.Take),
    value("messages", Sequence[Message]),
    deadline=Deadline.WORKERS,
    is_logged=True,
    awaits=_in_exchange,
)
WAIT_VERSION: Call[requests.WaitVersion, Version] = _call(
    "WaitVersion",
    record(requests.WaitVersion),
    value("version", Version),
    deadline=Deadline.WORKERS,
    is_durable=True,  # a snapshot of all servers follows
    awaits=lambda wait: _at_step(wait.at),
)
BARRIER: Call[requests.Barrier, Version] = _call(
    "Barrier",
    record(requests.Barrier),
    value("version", Version),
    deadline=Deadline.WORKERS,
    is_logged=True,
    awaits=_at_barrier,
)
ALL_REDUCE: Call[requests.AllReduce, Reduced] = _call(
    "AllReduce",
    record(requests.AllReduce),
    record(Reduced),
    deadline=Deadline.WORKERS,
    is_logged=True,
    awaits=_at_barrier,
)
ADVANCE: Call[requests.Advance, int] = _call(
    "Advance",
    record(requests.Advance),
    value("slowest", int),
    deadline=Deadline.WORKERS,
    is_logged=True,
    awaits=lambda clock: _at_step(clock.at_least),
)
TAKE_FILE: Call[requests.TakeFile, TakenFile] = _call(
    "TakeFile",
    record(requests.TakeFile),
    record(TakenFile),
    deadline=Deadline.WORKERS,
    is_logged=True,
    awaits=lambda take: Awaited("file", f"pass {take.pass_number}") if take.waits else None,
)
LEAVE: Call[requests.Leave, None] = _call(
    "Leave", record(requests.Leave), no_fields, is_logged=True, is_long=True
)
# It ends the log.
ABORT: Call[requests.Abort, None] = _call("Abort", record(requests.Abort), no_fields)
CHECK_FOLDER: Call[requests.CheckFolder, None] = _call(
    "CheckFolder", record(requests.CheckFolder), no_fields, access=Access.ADMIN, is_long=True
)
# It may wait for another save to end. A segment of the log begins with it.
SNAPSHOT: Call[requests.Snapshot, None] = _call(
    "Snapshot",
    record(requests.Snapshot),
    no_fields,
    deadline=Deadline.WORKERS,
    access=Access.ADMIN,
    is_long=True,
)
# Answers with the server's entries of the manifest, as JSON. Changes files, of which the log has a record.
SAVE: Call[requests.Save, str] = _call(
    "Save",
    record(requests.Save),
    value("share", str),
    deadline=Deadline.CHECKPOINT,
    access=Access.ADMIN,
    is_long=True,
)
LOAD: Call[requests.Load, None] = _call(
    "Load",
    record(requests.Load),
    no_fields,
    deadline=Deadline.CHECKPOINT,
    access=Access.ADMIN,
    is_logged=True,
    is_long=True,
)
RESUME: Call[requests.Resume, None] = _call(
    "Resume", record(requests.Resume), no_fields, access=Access.ADMIN, is_logged=True
)
SHRINK: Call[requests.Shrink, Mapping[str, Shrunk]] = _call(
    "Shrink",
    record(requests.Shrink),
    value("tables", Mapping[str, Shrunk]),
    deadline=Deadline.CHECKPOINT,
    access=Access.ADMIN,
    is_logged=True,
    is_long=True,
)
GET_DIGEST: Call[None, Mapping[tuple[str, int], bytes]] = _call(
    "GetDigest",
    no_fields,
    value("shards", Mapping[tuple[str, int], bytes], columns.DIGESTS),
    deadline=Deadline.CHECKPOINT,
    access=Access.READER,
    is_long=True,
)
GET_STATUS: Call[None, ServerStatus] = _call(
    "GetStatus", no_fields, record(ServerStatus), access=Access.READER
)

GET_MAP: Call[None, MapState] = _call("GetMap", no_fields, record(MapState), access=Access.READER)
BEGIN_MOVE: Call[requests.BeginMove, None] = _call(
    "BeginMove",
    record(requests.BeginMove),
    no_fields,
    access=Access.ADMIN,
    is_logged=True,
    is_long=True,
)
TAKE_MOVED: Call[requests.TakeMoved, Taken] = _call(
    "TakeMoved",
    record(requests.TakeMoved),
    record(Taken, moved=columns.MOVED),
    access=Access.ADMIN,
    is_long=True,
    moves_data=True,
)
PUT_MOVED: Call[requests.PutMoved, None] = _call(
    "PutMoved",
    record(requests.PutMoved, moved=columns.MOVED),
    no_fields,
    access=Access.ADMIN,
    is_logged=True,
    is_long=True,
    moves_data=True,
)
# It may wait for a step.
HOLD_MOVE: Call[requests.HoldMove, Cut] = _call(
    "HoldMove",
    record(requests.HoldMove),
    value("cut", Cut),
    deadline=Deadline.WORKERS,
    access=Access.ADMIN,
)
GET_JOB_STATE: Call[requests.GetJobState, Sequence[LogRecord]] = _call(
    "GetJobState",
    record(requests.GetJobState),
    value("records", Sequence[LogRecord]),
    access=Access.ADMIN,
    is_long=True,
)
PREPARE_MOVE: Call[requests.PrepareMove, None] = _call(
    "PrepareMove",
    record(requests.PrepareMove),
    no_fields,
    access=Access.ADMIN,
    is_logged=True,
    is_long=True,
)
# By a client whose driver is gone, too, but at the first server (ps_server/rpc/server.py).
END_MOVE: Call[requests.EndMove, None] = _call(
    "EndMove", record(requests.EndMove), no_fields, is_logged=True, is_long=True
)

CALLS: Mapping[str, Call[Any, Any]] = {
    each.name: each for each in list(globals().values()) if isinstance(each, Call)
}
"""All of them, by name."""
