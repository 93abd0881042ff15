"""Requests and answers other than data <-> messages of protos/v1/parameter_server.proto, both ways, once."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast, get_args

from protos.errors import ProtocolError
from protos.store import (
    InferenceDtype,
    InferenceSettings,
    Numbers,
    Reduced,
    ReduceOp,
    SaveStatus,
    ServerStatus,
    Shrunk,
    Staleness,
    StoreStatus,
    TableStatus,
    Version,
    WorkerProgress,
)
from protos.v1 import parameter_server_pb2
from protos.wire.codec import decode_numbers, encode_numbers

_OP_TO_MESSAGE = {
    ReduceOp.SUM: parameter_server_pb2.REDUCE_OP_SUM,
    ReduceOp.MAX: parameter_server_pb2.REDUCE_OP_MAX,
    ReduceOp.MIN: parameter_server_pb2.REDUCE_OP_MIN,
}
_OP_FROM_MESSAGE = {number: op for op, number in _OP_TO_MESSAGE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Request that a server writes its share of a checkpoint; `inference` as in `SaveRequest`."""

    folder: str
    token: str
    inference: InferenceSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """Request to take part in an all-reduce; see `Coordination.all_reduce`."""

    name: str
    worker: int
    values: Numbers
    op: ReduceOp
    step: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Request to resume a run; see `Checkpoints.resume`."""

    version: Version
    progress: Mapping[int, WorkerProgress]


def save_to_message(request: Save) -> parameter_server_pb2.SaveRequest:
    """Returns the message of a request to save."""
    inference = None
    if request.inference is not None:
        inference = parameter_server_pb2.Inference(
            dtype=request.inference.dtype, min_score=request.inference.min_score
        )
    return parameter_server_pb2.SaveRequest(
        folder=request.folder, token=request.token, inference=inference
    )


def save_from_message(message: parameter_server_pb2.SaveRequest) -> Save:
    """Returns the request of a message.

    Raises:
        ProtocolError: If no such dtype exists.
    """
    inference = None
    if message.HasField("inference"):
        dtype = message.inference.dtype
        if dtype not in get_args(InferenceDtype):
            raise ProtocolError(
                f"a save for inference has dtype {dtype!r}, expected one of float32, float16"
            )
        inference = InferenceSettings(
            dtype=cast("InferenceDtype", dtype), min_score=message.inference.min_score
        )
    return Save(folder=message.folder, token=message.token, inference=inference)


def all_reduce_to_message(request: AllReduce) -> parameter_server_pb2.AllReduceRequest:
    """Returns the message of a worker's numbers."""
    return parameter_server_pb2.AllReduceRequest(
        name=request.name,
        worker=request.worker,
        step=request.step,
        values=encode_numbers(request.values),
        op=_OP_TO_MESSAGE[request.op],
    )


def all_reduce_from_message(message: parameter_server_pb2.AllReduceRequest) -> AllReduce:
    """Returns a worker's numbers, read-only.

    Raises:
        ProtocolError: If no such op exists.
    """
    if message.op not in _OP_FROM_MESSAGE:
        raise ProtocolError(f"all_reduce {message.name!r} has the unknown op {message.op}")
    return AllReduce(
        name=message.name,
        worker=message.worker,
        values=decode_numbers(message.values),
        op=_OP_FROM_MESSAGE[message.op],
        step=message.step,
    )


def reduced_to_message(reduced: Reduced) -> parameter_server_pb2.AllReduceResponse:
    """Returns the message of the result of an all-reduce."""
    return parameter_server_pb2.AllReduceResponse(
        version=reduced.version, values=encode_numbers(reduced.values)
    )


def reduced_from_message(message: parameter_server_pb2.AllReduceResponse) -> Reduced:
    """Returns the result of an all-reduce, read-only."""
    return Reduced(decode_numbers(message.values), message.version)


def staleness_to_message(staleness: Staleness) -> parameter_server_pb2.Staleness:
    """Returns the message of a histogram."""
    return parameter_server_pb2.Staleness(
        counts=staleness.counts, total=staleness.total, largest=staleness.largest
    )


def staleness_from_message(message: parameter_server_pb2.Staleness) -> Staleness:
    """Returns the histogram of a message."""
    return Staleness(counts=tuple(message.counts), total=message.total, largest=message.largest)


def progress_to_message(progress: WorkerProgress) -> parameter_server_pb2.WorkerProgress:
    """Returns the message of one worker's progress."""
    return parameter_server_pb2.WorkerProgress(
        incarnation=progress.incarnation,
        sequence=progress.sequence,
        step=progress.step,
        position=progress.position,
    )


def progress_from_message(message: parameter_server_pb2.WorkerProgress) -> WorkerProgress:
    """Returns the progress of a message."""
    return WorkerProgress(
        incarnation=message.incarnation,
        sequence=message.sequence,
        step=message.step,
        position=message.position,
    )


def resume_to_message(request: Resume) -> parameter_server_pb2.ResumeRequest:
    """Returns the message of a request to resume."""
    workers = {worker: progress_to_message(each) for worker, each in request.progress.items()}
    return parameter_server_pb2.ResumeRequest(version=request.version, progress=workers)


def resume_from_message(message: parameter_server_pb2.ResumeRequest) -> Resume:
    """Returns the request of a message."""
    progress = {worker: progress_from_message(each) for worker, each in message.progress.items()}
    return Resume(version=message.version, progress=progress)


def status_to_message(server: ServerStatus) -> parameter_server_pb2.GetStatusResponse:
    """Returns the message of one server's status."""
    status = server.store
    return parameter_server_pb2.GetStatusResponse(
        version=status.version,
        tables=[
            parameter_server_pb2.TableStatus(table=name, **asdict(table))
            for name, table in status.tables.items()
        ],
        workers=[
            parameter_server_pb2.WorkerStatus(
                worker=worker,
                examples=status.examples.get(worker, 0),
                has_left=worker in status.left,
                progress=(
                    progress_to_message(status.progress[worker])
                    if worker in status.progress
                    else None
                ),
            )
            for worker in sorted(status.examples.keys() | status.left | status.progress.keys())
        ],
        server_index=server.server_index,
        num_servers=server.num_servers,
        staleness=staleness_to_message(status.staleness),
        last_save=None if status.last_save is None else _save_status_to_message(status.last_save),
    )


def status_from_message(message: parameter_server_pb2.GetStatusResponse) -> ServerStatus:
    """Returns the status of one server."""
    last_save = message.last_save if message.HasField("last_save") else None
    store = StoreStatus(
        version=message.version,
        tables={
            table.table: TableStatus(
                rows=table.rows,
                size_bytes=table.size_bytes,
                candidates=table.candidates,
                candidate_bytes=table.candidate_bytes,
                expired=table.expired,
                evicted=table.evicted,
            )
            for table in message.tables
        },
        examples={worker.worker: worker.examples for worker in message.workers},
        left=frozenset(worker.worker for worker in message.workers if worker.has_left),
        staleness=staleness_from_message(message.staleness),
        progress={
            worker.worker: progress_from_message(worker.progress)
            for worker in message.workers
            if worker.HasField("progress")
        },
        last_save=None if last_save is None else _save_status_from_message(last_save),
    )
    return ServerStatus(store, message.server_index, message.num_servers)


def _save_status_to_message(save: SaveStatus) -> parameter_server_pb2.SaveStatus:
    return parameter_server_pb2.SaveStatus(
        pause_s=save.pause_s, duration_s=save.duration_s, is_over=save.is_over
    )


def _save_status_from_message(message: parameter_server_pb2.SaveStatus) -> SaveStatus:
    return SaveStatus(
        pause_s=message.pause_s, duration_s=message.duration_s, is_over=message.is_over
    )


def shrunk_to_message(shrunk: Mapping[str, Shrunk]) -> parameter_server_pb2.ShrinkResponse:
    """Returns the message of what was removed from one server's tables."""
    return parameter_server_pb2.ShrinkResponse(
        tables=[
            parameter_server_pb2.ShrunkTable(table=name, **asdict(each))
            for name, each in shrunk.items()
        ]
    )


def shrunk_from_message(message: parameter_server_pb2.ShrinkResponse) -> dict[str, Shrunk]:
    """Returns what was removed from one server's tables."""
    return {
        table.table: Shrunk(
            rows=table.rows,
            size_bytes=table.size_bytes,
            left_rows=table.left_rows,
            candidates=table.candidates,
        )
        for table in message.tables
    }


def digests_to_message(
    digests: Mapping[tuple[str, int], bytes],
) -> parameter_server_pb2.GetDigestResponse:
    """Returns the message of the digests of one server's shards, by table and shard."""
    return parameter_server_pb2.GetDigestResponse(
        shards=[
            parameter_server_pb2.ShardDigest(table=table, shard=shard, digest=digest)
            for (table, shard), digest in digests.items()
        ]
    )


def digests_from_message(
    message: parameter_server_pb2.GetDigestResponse,
) -> dict[tuple[str, int], bytes]:
    """Returns the digests of one server's shards, by table and shard."""
    return {(shard.table, shard.shard): shard.digest for shard in message.shards}
