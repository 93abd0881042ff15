"""Specs, gradients and states <-> messages, both ways, once.

Nothing else takes messages apart: servers and clients see dataclasses and arrays.
"""

from collections.abc import Iterable, Mapping

from protos.codec import (
    decode_keys,
    decode_numbers,
    decode_rows,
    decode_values,
    encode_keys,
    encode_numbers,
    encode_values,
)
from protos.errors import ProtocolError
from protos.gradients import DenseGrad, SparseGrad, Values
from protos.numbers import Numbers
from protos.partition import Keys
from protos.parts import PushPart
from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from protos.staleness import Staleness, merge_staleness
from protos.store import Missing, Pulled, Reduced, ReduceOp, Stamp, StoreStatus, TableStatus
from protos.v1 import control_plane_pb2, data_plane_pb2, spec_pb2

_MISSING_TO_MESSAGE = {
    Missing.INITIAL: data_plane_pb2.MISSING_INITIAL,
    Missing.ZEROS: data_plane_pb2.MISSING_ZEROS,
}
_MISSING_FROM_MESSAGE = {number: missing for missing, number in _MISSING_TO_MESSAGE.items()}

_OP_TO_MESSAGE = {
    ReduceOp.SUM: control_plane_pb2.REDUCE_OP_SUM,
    ReduceOp.MAX: control_plane_pb2.REDUCE_OP_MAX,
    ReduceOp.MIN: control_plane_pb2.REDUCE_OP_MIN,
}
_OP_FROM_MESSAGE = {number: op for op, number in _OP_TO_MESSAGE.items()}


def optimizer_to_message(spec: OptimizerSpec) -> spec_pb2.OptimizerSpec:
    """Returns the message of an optimizer spec."""
    return spec_pb2.OptimizerSpec(
        name=spec.name,
        params=[
            spec_pb2.HyperParameter(name=name, value=value) for name, value in spec.params.items()
        ],
    )


def optimizer_from_message(message: spec_pb2.OptimizerSpec) -> OptimizerSpec:
    """Returns the optimizer spec of a message."""
    return OptimizerSpec(
        name=message.name, params={param.name: param.value for param in message.params}
    )


def initializer_to_message(spec: InitializerSpec) -> spec_pb2.InitializerSpec:
    """Returns the message of an initializer spec."""
    return spec_pb2.InitializerSpec(kind=spec.kind, scale=spec.scale)


def initializer_from_message(message: spec_pb2.InitializerSpec) -> InitializerSpec:
    """Returns the initializer spec of a message."""
    return InitializerSpec(kind=message.kind, scale=message.scale)


def table_spec_to_message(spec: TableSpec) -> spec_pb2.TableSpec:
    """Returns the message of a table spec."""
    return spec_pb2.TableSpec(
        name=spec.name,
        dim=spec.dim,
        initializer=initializer_to_message(spec.initializer),
        optimizer=optimizer_to_message(spec.optimizer),
        seed=spec.seed,
        num_shards=spec.num_shards,
    )


def table_spec_from_message(message: spec_pb2.TableSpec) -> TableSpec:
    """Returns the table spec of a message."""
    return TableSpec(
        name=message.name,
        dim=message.dim,
        initializer=initializer_from_message(message.initializer),
        optimizer=optimizer_from_message(message.optimizer),
        seed=message.seed,
        num_shards=message.num_shards,
    )


def dense_spec_to_message(spec: DenseSpec) -> spec_pb2.DenseSpec:
    """Returns the message of a dense spec."""
    return spec_pb2.DenseSpec(
        name=spec.name,
        segments=[
            spec_pb2.DenseSegment(
                length=segment.length, initializer=initializer_to_message(segment.initializer)
            )
            for segment in spec.segments
        ],
        optimizer=optimizer_to_message(spec.optimizer),
        seed=spec.seed,
    )


def dense_spec_from_message(message: spec_pb2.DenseSpec) -> DenseSpec:
    """Returns the dense spec of a message."""
    return DenseSpec(
        name=message.name,
        segments=tuple(
            DenseSegment(
                length=segment.length, initializer=initializer_from_message(segment.initializer)
            )
            for segment in message.segments
        ),
        optimizer=optimizer_from_message(message.optimizer),
        seed=message.seed,
    )


def stamp_to_message(stamp: Stamp) -> data_plane_pb2.Stamp:
    """Returns the message of a stamp."""
    return data_plane_pb2.Stamp(
        worker=stamp.worker,
        incarnation=stamp.incarnation,
        sequence=stamp.sequence,
        step=stamp.step,
        examples=stamp.examples,
        batches=stamp.batches,
        pulled=stamp.pulled,
    )


def stamp_from_message(message: data_plane_pb2.Stamp) -> Stamp:
    """Returns the stamp of a message."""
    return Stamp(
        worker=message.worker,
        incarnation=message.incarnation,
        sequence=message.sequence,
        step=message.step,
        examples=message.examples,
        batches=message.batches,
        pulled=message.pulled,
    )


def pull_sparse_request(
    keys: Mapping[str, Keys], missing: Missing, at: int | None
) -> data_plane_pb2.PullSparseRequest:
    """Returns the request for embeddings of `keys` by table."""
    return data_plane_pb2.PullSparseRequest(
        columns=[
            data_plane_pb2.KeyColumn(table=table, keys=encode_keys(column))
            for table, column in keys.items()
        ],
        missing=_MISSING_TO_MESSAGE[missing],
        at=at,
    )


def pull_sparse_arguments(
    request: data_plane_pb2.PullSparseRequest,
) -> tuple[dict[str, Keys], Missing, int | None]:
    """Returns the keys by table, what missing keys read, and the version to wait for."""
    if request.missing not in _MISSING_FROM_MESSAGE:
        raise ProtocolError(f"a pull must say what missing keys read, got {request.missing}")
    keys = {column.table: decode_keys(column.keys) for column in request.columns}
    return keys, _MISSING_FROM_MESSAGE[request.missing], _at_of(request)


def pull_sparse_response(pulled: Pulled) -> data_plane_pb2.PullSparseResponse:
    """Returns the response with embeddings by table."""
    return data_plane_pb2.PullSparseResponse(
        columns=[
            data_plane_pb2.ValueColumn(table=table, values=encode_values(column))
            for table, column in pulled.rows.items()
        ],
        version=pulled.version,
    )


def pulled_rows(response: data_plane_pb2.PullSparseResponse, num_keys: Mapping[str, int]) -> Pulled:
    """Returns read-only float32[N, D] by table; `num_keys` is N as it was asked for."""
    rows = {
        column.table: decode_rows(column.values, num_keys[column.table])
        for column in response.columns
    }
    return Pulled(rows, response.version)


def pull_dense_request(blocks: Iterable[str], at: int | None) -> data_plane_pb2.PullDenseRequest:
    """Returns the request for a server's pieces of dense blocks."""
    return data_plane_pb2.PullDenseRequest(blocks=blocks, at=at)


def pull_dense_arguments(
    request: data_plane_pb2.PullDenseRequest,
) -> tuple[list[str], int | None]:
    """Returns the blocks, and the version to wait for."""
    return list(request.blocks), _at_of(request)


def pull_dense_response(
    values: Mapping[str, Values], version: int
) -> data_plane_pb2.PullDenseResponse:
    """Returns the response with pieces of dense blocks."""
    return data_plane_pb2.PullDenseResponse(
        columns=[
            data_plane_pb2.DenseColumn(block=block, values=encode_values(piece))
            for block, piece in values.items()
        ],
        version=version,
    )


def pulled_pieces(response: data_plane_pb2.PullDenseResponse) -> dict[str, Values]:
    """Returns read-only float32[p] by block."""
    return {column.block: decode_values(column.values) for column in response.columns}


def sparse_grad_to_message(table: str, grad: SparseGrad) -> data_plane_pb2.SparseGradColumn:
    """Returns the message of one table's gradients."""
    return data_plane_pb2.SparseGradColumn(
        table=table,
        keys=encode_keys(grad.keys),
        values=encode_values(grad.values),
        examples=grad.examples,
    )


def dense_grad_to_message(
    block: str, grad: DenseGrad, start: int = 0
) -> data_plane_pb2.DenseGradColumn:
    """Returns the message of a gradient that begins at `start` of the server's piece."""
    return data_plane_pb2.DenseGradColumn(
        block=block, values=encode_values(grad.values), examples=grad.examples, start=start
    )


def sparse_grads_of(request: data_plane_pb2.PushGradRequest) -> list[tuple[str, SparseGrad]]:
    """Returns the table gradients of one part of a push, in the order sent."""
    grads = []
    for column in request.sparse:
        keys = decode_keys(column.keys)
        values = decode_rows(column.values, keys.size)
        grads.append((column.table, SparseGrad(keys, values, column.examples)))
    return grads


def dense_grads_of(
    request: data_plane_pb2.PushGradRequest,
) -> list[tuple[str, int, DenseGrad]]:
    """Returns block, start and gradient for the dense columns of one part of a push."""
    return [
        (column.block, column.start, DenseGrad(decode_values(column.values), column.examples))
        for column in request.dense
    ]


def push_grad_request(
    stamp: Stamp, part: PushPart, at: int | None
) -> data_plane_pb2.PushGradRequest:
    """Returns the request that carries one part of a push."""
    return data_plane_pb2.PushGradRequest(
        stamp=stamp_to_message(stamp),
        sparse=[sparse_grad_to_message(table, grad) for table, grad in part.sparse],
        dense=[dense_grad_to_message(block, grad, start) for block, start, grad in part.dense],
        at=at,
        part=part.part,
        num_parts=part.num_parts,
    )


def push_grad_arguments(
    request: data_plane_pb2.PushGradRequest,
) -> tuple[Stamp, PushPart, int | None]:
    """Returns who pushes, the part of the push that the request carries, and its step."""
    part = PushPart(
        sparse=sparse_grads_of(request),
        dense=dense_grads_of(request),
        part=request.part,
        num_parts=request.num_parts,
    )
    return stamp_from_message(request.stamp), part, _at_of(request)


def all_reduce_request(
    name: str, worker: int, values: Numbers, op: ReduceOp, step: int
) -> control_plane_pb2.BarrierRequest:
    """Returns the request of a worker that comes to a barrier with numbers."""
    return control_plane_pb2.BarrierRequest(
        name=name, worker=worker, step=step, values=encode_numbers(values), op=_OP_TO_MESSAGE[op]
    )


def brought_numbers(
    request: control_plane_pb2.BarrierRequest,
) -> tuple[Numbers, ReduceOp] | None:
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


def status_to_message(
    status: StoreStatus, server_index: int, num_servers: int
) -> control_plane_pb2.GetStatusResponse:
    """Returns the message of one server's status."""
    return control_plane_pb2.GetStatusResponse(
        version=status.version,
        tables=[
            control_plane_pb2.TableStatus(table=name, rows=table.rows, size_bytes=table.size_bytes)
            for name, table in status.tables.items()
        ],
        workers=[
            control_plane_pb2.WorkerStatus(
                worker=worker,
                examples=status.examples.get(worker, 0),
                done=worker in status.done,
            )
            for worker in sorted(status.examples.keys() | status.done)
        ],
        server_index=server_index,
        num_servers=num_servers,
        staleness=staleness_to_message(status.staleness),
    )


def status_from_message(message: control_plane_pb2.GetStatusResponse) -> StoreStatus:
    """Returns the status of one server."""
    return StoreStatus(
        version=message.version,
        tables={
            table.table: TableStatus(rows=table.rows, size_bytes=table.size_bytes)
            for table in message.tables
        },
        examples={worker.worker: worker.examples for worker in message.workers},
        done=frozenset(worker.worker for worker in message.workers if worker.done),
        staleness=staleness_from_message(message.staleness),
    )


def merge_status(parts: list[StoreStatus]) -> StoreStatus:
    """Returns the status of a cluster: sizes add up, the rest every server has seen alike.

    But for staleness: pushes meet each server in an order of its own, so what all have counted is kept, each
    batch once for every server.
    """
    names = sorted({name for part in parts for name in part.tables})
    return StoreStatus(
        version=min(part.version for part in parts),
        tables={
            name: TableStatus(
                rows=sum(part.tables[name].rows for part in parts if name in part.tables),
                size_bytes=sum(
                    part.tables[name].size_bytes for part in parts if name in part.tables
                ),
            )
            for name in names
        },
        examples={
            worker: max(part.examples.get(worker, 0) for part in parts)
            for worker in sorted({worker for part in parts for worker in part.examples})
        },
        done=frozenset.intersection(*(part.done for part in parts)),
        staleness=merge_staleness(part.staleness for part in parts),
    )


def digests_to_message(
    digests: Mapping[tuple[str, int], bytes],
) -> control_plane_pb2.GetDigestResponse:
    """Returns the message of the digests of one server's shards, by table and shard."""
    return control_plane_pb2.GetDigestResponse(
        shards=[
            control_plane_pb2.ShardDigest(table=table, shard=shard, sha256=sha256)
            for (table, shard), sha256 in digests.items()
        ]
    )


def digests_from_message(
    message: control_plane_pb2.GetDigestResponse,
) -> dict[tuple[str, int], bytes]:
    """Returns the digests of one server's shards, by table and shard."""
    return {(shard.table, shard.shard): shard.sha256 for shard in message.shards}


def _at_of(
    request: data_plane_pb2.PullSparseRequest
    | data_plane_pb2.PullDenseRequest
    | data_plane_pb2.PushGradRequest,
) -> int | None:
    return request.at if request.HasField("at") else None
