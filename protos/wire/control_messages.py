"""Barriers, digests and states <-> messages of the control plane, both ways, once."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import cast, get_args

from protos.errors import ProtocolError
from protos.store import (
    InferenceDtype,
    InferenceSettings,
    Numbers,
    Reduced,
    ReduceOp,
    SaveStatus,
    Shrunk,
    Staleness,
    StoreStatus,
    TableStatus,
    WorkerProgress,
)
from protos.v1 import control_plane_pb2
from protos.wire.codec import decode_numbers, encode_numbers

_OP_TO_MESSAGE = {
    ReduceOp.SUM: control_plane_pb2.REDUCE_OP_SUM,
    ReduceOp.MAX: control_plane_pb2.REDUCE_OP_MAX,
    ReduceOp.MIN: control_plane_pb2.REDUCE_OP_MIN,
}
_OP_FROM_MESSAGE = {number: op for op, number in _OP_TO_MESSAGE.items()}


def save_inference_request(
    folder: str, token: str, settings: InferenceSettings
) -> control_plane_pb2.SaveRequest:
    """Returns the request to save what predictions need."""
    inference = control_plane_pb2.Inference(dtype=settings.dtype, min_score=settings.min_score)
    return control_plane_pb2.SaveRequest(folder=folder, token=token, inference=inference)


def inference_settings(request: control_plane_pb2.SaveRequest) -> InferenceSettings | None:
    """Returns what of the model is to be saved to predict with; None: all is, to train on from.

    Raises:
        ProtocolError: If there is no such dtype.
    """
    if not request.HasField("inference"):
        return None
    dtype = request.inference.dtype
    if dtype not in get_args(InferenceDtype):
        raise ProtocolError(
            f"a save for inference has dtype {dtype!r}, expected one of float32, float16"
        )
    return InferenceSettings(
        dtype=cast("InferenceDtype", dtype), min_score=request.inference.min_score
    )


def all_reduce_request(
    name: str, worker: int, values: Numbers, op: ReduceOp, step: int
) -> control_plane_pb2.BarrierRequest:
    """Returns the request of a worker that comes to a barrier with numbers."""
    return control_plane_pb2.BarrierRequest(
        name=name, worker=worker, step=step, values=encode_numbers(values), op=_OP_TO_MESSAGE[op]
    )


def brought_numbers(request: control_plane_pb2.BarrierRequest) -> tuple[Numbers, ReduceOp] | None:
    """Returns what a worker brings to a barrier; None if it comes without numbers."""
    if request.op == control_plane_pb2.REDUCE_OP_UNSPECIFIED:
        return None
    if request.op not in _OP_FROM_MESSAGE:
        raise ProtocolError(f"all_reduce {request.name!r} has op {request.op}, which is none")
    return decode_numbers(request.values), _OP_FROM_MESSAGE[request.op]


def reduced_to_message(reduced: Reduced) -> control_plane_pb2.BarrierResponse:
    """Returns the response of a barrier with numbers."""
    return control_plane_pb2.BarrierResponse(
        version=reduced.version, values=encode_numbers(reduced.values)
    )


def reduced_from_message(response: control_plane_pb2.BarrierResponse) -> Reduced:
    """Returns what all workers' numbers come to."""
    return Reduced(decode_numbers(response.values), response.version)


def staleness_to_message(staleness: Staleness) -> control_plane_pb2.Staleness:
    """Returns the message of a histogram."""
    return control_plane_pb2.Staleness(
        counts=staleness.counts, total=staleness.total, largest=staleness.largest
    )


def staleness_from_message(message: control_plane_pb2.Staleness) -> Staleness:
    """Returns the histogram of a message."""
    return Staleness(counts=tuple(message.counts), total=message.total, largest=message.largest)


def progress_to_message(progress: WorkerProgress) -> control_plane_pb2.WorkerProgress:
    """Returns the message of one worker's progress."""
    return control_plane_pb2.WorkerProgress(
        incarnation=progress.incarnation,
        sequence=progress.sequence,
        step=progress.step,
        position=progress.position,
    )


def progress_from_message(message: control_plane_pb2.WorkerProgress) -> WorkerProgress:
    """Returns the progress of a message."""
    return WorkerProgress(
        incarnation=message.incarnation,
        sequence=message.sequence,
        step=message.step,
        position=message.position,
    )


def resume_request(
    version: int, progress: Mapping[int, WorkerProgress]
) -> control_plane_pb2.ResumeRequest:
    """Returns the request to go on with an earlier run."""
    workers = {worker: progress_to_message(each) for worker, each in progress.items()}
    return control_plane_pb2.ResumeRequest(version=version, progress=workers)


def resumed_run(
    request: control_plane_pb2.ResumeRequest,
) -> tuple[int, dict[int, WorkerProgress]]:
    """Returns the version of an earlier run, and the progress of its workers."""
    workers = {
        worker: progress_from_message(message) for worker, message in request.progress.items()
    }
    return request.version, workers


def status_to_message(
    status: StoreStatus, server_index: int, num_servers: int
) -> control_plane_pb2.GetStatusResponse:
    """Returns the message of one server's status."""
    return control_plane_pb2.GetStatusResponse(
        version=status.version,
        tables=[
            control_plane_pb2.TableStatus(table=name, **asdict(table))
            for name, table in status.tables.items()
        ],
        workers=[
            control_plane_pb2.WorkerStatus(
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
        server_index=server_index,
        num_servers=num_servers,
        staleness=staleness_to_message(status.staleness),
        last_save=None if status.last_save is None else _save_to_message(status.last_save),
    )


def status_from_message(message: control_plane_pb2.GetStatusResponse) -> StoreStatus:
    """Returns the status of one server."""
    return StoreStatus(
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
        last_save=_save_from_message(message.last_save) if message.HasField("last_save") else None,
    )


def _save_to_message(save: SaveStatus) -> control_plane_pb2.SaveStatus:
    return control_plane_pb2.SaveStatus(
        pause_s=save.pause_s, duration_s=save.duration_s, is_over=save.is_over
    )


def _save_from_message(message: control_plane_pb2.SaveStatus) -> SaveStatus:
    return SaveStatus(
        pause_s=message.pause_s, duration_s=message.duration_s, is_over=message.is_over
    )


def shrunk_to_message(shrunk: Mapping[str, Shrunk]) -> control_plane_pb2.ShrinkResponse:
    """Returns the message of what was removed from one server's tables."""
    return control_plane_pb2.ShrinkResponse(
        tables=[
            control_plane_pb2.ShrunkTable(table=name, **asdict(each))
            for name, each in shrunk.items()
        ]
    )


def shrunk_from_message(message: control_plane_pb2.ShrinkResponse) -> dict[str, Shrunk]:
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
) -> control_plane_pb2.GetDigestResponse:
    """Returns the message of the digests of one server's shards, by table and shard."""
    return control_plane_pb2.GetDigestResponse(
        shards=[
            control_plane_pb2.ShardDigest(table=table, shard=shard, digest=digest)
            for (table, shard), digest in digests.items()
        ]
    )


def digests_from_message(
    message: control_plane_pb2.GetDigestResponse,
) -> dict[tuple[str, int], bytes]:
    """Returns the digests of one server's shards, by table and shard."""
    return {(shard.table, shard.shard): shard.digest for shard in message.shards}
