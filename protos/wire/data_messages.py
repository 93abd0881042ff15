"""Requests and answers that move data <-> messages of protos/v1/data_plane.proto, both ways, once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.chunking import PushChunk
from protos.errors import ProtocolError
from protos.gradients import DenseGrad, SparseGrad, Values
from protos.keys import Keys
from protos.store import Changed, Message, Missing, Pulled, PulledPieces, PushId, Version
from protos.v1 import data_plane_pb2
from protos.wire.codec import (
    decode_counts,
    decode_keys,
    decode_rows,
    decode_values,
    encode_counts,
    encode_keys,
    encode_values,
)

_MISSING_TO_MESSAGE = {
    Missing.INITIAL: data_plane_pb2.MISSING_INITIAL,
    Missing.ZEROS: data_plane_pb2.MISSING_ZEROS,
}
_MISSING_FROM_MESSAGE = {number: missing for missing, number in _MISSING_TO_MESSAGE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSparse:
    """Request for embeddings; see `ParameterReader.pull_sparse`."""

    keys: Mapping[str, Keys]
    missing: Missing
    at: Version | None = None
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDense:
    """Request for a server's pieces of dense blocks."""

    blocks: Sequence[str]
    at: Version | None = None
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushGrad:
    """Request that hands over one chunk of a push; see `Parameters.push_grad`."""

    chunk: PushChunk
    push_id: PushId
    at: Version | None = None
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Request that hands over a message; see `Exchange.post`."""

    exchange: str
    message: Message


def push_id_to_message(push_id: PushId) -> data_plane_pb2.PushId:
    """Returns the message of a push id."""
    return data_plane_pb2.PushId(
        worker=push_id.worker,
        incarnation=push_id.incarnation,
        sequence=push_id.sequence,
        step=push_id.step,
        examples=push_id.examples,
        batches=push_id.batches,
        pulled=push_id.pulled,
        position=push_id.position,
    )


def push_id_from_message(message: data_plane_pb2.PushId) -> PushId:
    """Returns the push id of a message."""
    return PushId(
        worker=message.worker,
        incarnation=message.incarnation,
        sequence=message.sequence,
        step=message.step,
        examples=message.examples,
        batches=message.batches,
        pulled=message.pulled,
        position=message.position,
    )


def pull_sparse_to_message(request: PullSparse) -> data_plane_pb2.PullSparseRequest:
    """Returns the message of a request for embeddings."""
    return data_plane_pb2.PullSparseRequest(
        columns=[
            data_plane_pb2.KeyColumn(table=table, keys=encode_keys(column))
            for table, column in request.keys.items()
        ],
        missing=_MISSING_TO_MESSAGE[request.missing],
        at=request.at,
        shard_map_epoch=request.shard_map_epoch,
    )


def pull_sparse_from_message(message: data_plane_pb2.PullSparseRequest) -> PullSparse:
    """Returns the request of a message; its keys are read-only."""
    if message.missing not in _MISSING_FROM_MESSAGE:
        raise ProtocolError(f"a pull must say what missing keys read, got {message.missing}")
    return PullSparse(
        keys={column.table: decode_keys(column.keys) for column in message.columns},
        missing=_MISSING_FROM_MESSAGE[message.missing],
        at=_at_of(message),
        shard_map_epoch=message.shard_map_epoch,
    )


def pulled_to_message(pulled: Pulled) -> data_plane_pb2.PullSparseResponse:
    """Returns the message of embeddings."""
    return data_plane_pb2.PullSparseResponse(
        columns=[
            data_plane_pb2.ValueColumn(
                table=table, values=encode_values(rows), num_rows=rows.shape[0]
            )
            for table, rows in pulled.rows.items()
        ],
        version=pulled.version,
    )


def pulled_from_message(message: data_plane_pb2.PullSparseResponse) -> Pulled:
    """Returns the embeddings of a message, read-only."""
    rows = {column.table: decode_rows(column.values, column.num_rows) for column in message.columns}
    return Pulled(rows, message.version)


def changed_to_message(changed: Changed) -> data_plane_pb2.PullChangedResponse:
    """Returns the message of changed rows."""
    return data_plane_pb2.PullChangedResponse(
        columns=[
            data_plane_pb2.ChangedColumn(
                table=table, keys=encode_keys(keys), values=encode_values(values)
            )
            for table, (keys, values) in changed.rows.items()
        ],
        version=changed.version,
        has_more=changed.has_more,
    )


def changed_from_message(message: data_plane_pb2.PullChangedResponse) -> Changed:
    """Returns the changed rows of a message, read-only; D is 0 where there are none."""
    rows: dict[str, tuple[Keys, Values]] = {}
    for column in message.columns:
        keys = decode_keys(column.keys)
        rows[column.table] = keys, decode_rows(column.values, keys.size)
    return Changed(rows, message.version, message.has_more)


def pull_dense_to_message(request: PullDense) -> data_plane_pb2.PullDenseRequest:
    """Returns the message of a request for pieces."""
    return data_plane_pb2.PullDenseRequest(
        blocks=request.blocks, at=request.at, shard_map_epoch=request.shard_map_epoch
    )


def pull_dense_from_message(message: data_plane_pb2.PullDenseRequest) -> PullDense:
    """Returns the request of a message."""
    return PullDense(
        blocks=list(message.blocks),
        at=_at_of(message),
        shard_map_epoch=message.shard_map_epoch,
    )


def pieces_to_message(pulled: PulledPieces) -> data_plane_pb2.PullDenseResponse:
    """Returns the message of pieces."""
    return data_plane_pb2.PullDenseResponse(
        columns=[
            data_plane_pb2.DenseColumn(block=block, values=encode_values(piece))
            for block, piece in pulled.pieces.items()
        ],
        version=pulled.version,
    )


def pieces_from_message(message: data_plane_pb2.PullDenseResponse) -> PulledPieces:
    """Returns the pieces of a message, read-only."""
    pieces = {column.block: decode_values(column.values) for column in message.columns}
    return PulledPieces(pieces, message.version)


def sparse_grad_to_message(table: str, grad: SparseGrad) -> data_plane_pb2.SparseGradColumn:
    """Returns the message of one table's gradients."""
    return data_plane_pb2.SparseGradColumn(
        table=table,
        keys=encode_keys(grad.keys),
        values=encode_values(grad.values),
        examples=grad.examples,
        counts=encode_counts(grad.counts),
    )


def dense_grad_to_message(
    block: str, grad: DenseGrad, start: int = 0
) -> data_plane_pb2.DenseGradColumn:
    """Returns the message of a gradient that begins at `start` of the server's piece."""
    return data_plane_pb2.DenseGradColumn(
        block=block, values=encode_values(grad.values), examples=grad.examples, start=start
    )


def sparse_grads_of(request: data_plane_pb2.PushGradRequest) -> list[tuple[str, SparseGrad]]:
    """Returns the table gradients of one chunk of a push, in the order sent."""
    grads = []
    for column in request.sparse:
        keys = decode_keys(column.keys)
        values = decode_rows(column.values, keys.size)
        counts = decode_counts(column.counts, keys.size)
        grads.append((column.table, SparseGrad(keys, values, column.examples, counts)))
    return grads


def dense_grads_of(request: data_plane_pb2.PushGradRequest) -> list[tuple[str, int, DenseGrad]]:
    """Returns block, start and gradient for the dense columns of one chunk of a push."""
    return [
        (column.block, column.start, DenseGrad(decode_values(column.values), column.examples))
        for column in request.dense
    ]


def push_grad_to_message(request: PushGrad) -> data_plane_pb2.PushGradRequest:
    """Returns the message of one chunk of a push."""
    chunk = request.chunk
    return data_plane_pb2.PushGradRequest(
        push_id=push_id_to_message(request.push_id),
        sparse=[sparse_grad_to_message(table, grad) for table, grad in chunk.sparse],
        dense=[dense_grad_to_message(block, grad, start) for block, start, grad in chunk.dense],
        at=request.at,
        chunk=chunk.chunk,
        num_chunks=chunk.num_chunks,
        shard_map_epoch=request.shard_map_epoch,
    )


def push_grad_from_message(message: data_plane_pb2.PushGradRequest) -> PushGrad:
    """Returns the chunk of a push; its arrays are read-only."""
    chunk = PushChunk(
        sparse=sparse_grads_of(message),
        dense=dense_grads_of(message),
        chunk=message.chunk,
        num_chunks=message.num_chunks,
    )
    return PushGrad(
        chunk=chunk,
        push_id=push_id_from_message(message.push_id),
        at=_at_of(message),
        shard_map_epoch=message.shard_map_epoch,
    )


def post_to_message(request: Post) -> data_plane_pb2.PostRequest:
    """Returns the message of a request to post."""
    return data_plane_pb2.PostRequest(
        exchange=request.exchange,
        sender=request.message.sender,
        receiver=request.message.receiver,
        sequence=request.message.sequence,
        content=request.message.content,
    )


def post_from_message(message: data_plane_pb2.PostRequest) -> Post:
    """Returns the request of a message."""
    posted = Message(
        sender=message.sender,
        receiver=message.receiver,
        sequence=message.sequence,
        content=message.content if message.HasField("content") else None,
    )
    return Post(exchange=message.exchange, message=posted)


def taken_to_message(taken: Sequence[Message]) -> data_plane_pb2.TakeResponse:
    """Returns the message of workers' messages, each with a content."""
    return data_plane_pb2.TakeResponse(
        messages=[
            data_plane_pb2.ExchangeMessage(
                sender=each.sender,
                receiver=each.receiver,
                sequence=each.sequence,
                content=each.content,
            )
            for each in taken
        ]
    )


def taken_from_message(message: data_plane_pb2.TakeResponse) -> list[Message]:
    """Returns the workers' messages."""
    return [
        Message(
            sender=each.sender,
            receiver=each.receiver,
            sequence=each.sequence,
            content=each.content,
        )
        for each in message.messages
    ]


def _at_of(
    request: data_plane_pb2.PullSparseRequest
    | data_plane_pb2.PullDenseRequest
    | data_plane_pb2.PushGradRequest,
) -> int | None:
    return request.at if request.HasField("at") else None
