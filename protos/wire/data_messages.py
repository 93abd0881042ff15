"""Keys, rows, gradients, push ids and messages <-> messages of the data plane, both ways, once."""

from collections.abc import Iterable, Mapping, Sequence

from protos.chunking import PushChunk
from protos.errors import ProtocolError
from protos.gradients import DenseGrad, SparseGrad, Values
from protos.keys import Keys
from protos.store import Changed, Message, Missing, Pulled, PushId
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


def pull_changed_request(
    tables: Iterable[str], worker: int, max_rows: int
) -> data_plane_pb2.PullChangedRequest:
    """Returns the request for rows that changed."""
    return data_plane_pb2.PullChangedRequest(tables=tables, worker=worker, max_rows=max_rows)


def changed_to_message(changed: Changed) -> data_plane_pb2.PullChangedResponse:
    """Returns the response with rows that changed."""
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


def changed_from_message(response: data_plane_pb2.PullChangedResponse) -> Changed:
    """Returns the rows that changed, read-only; D is 0 where there are none."""
    rows: dict[str, tuple[Keys, Values]] = {}
    for column in response.columns:
        keys = decode_keys(column.keys)
        rows[column.table] = keys, decode_rows(column.values, keys.size)
    return Changed(rows, response.version, response.has_more)


def pull_dense_request(blocks: Iterable[str], at: int | None) -> data_plane_pb2.PullDenseRequest:
    """Returns the request for a server's pieces of dense blocks."""
    return data_plane_pb2.PullDenseRequest(blocks=blocks, at=at)


def pull_dense_arguments(request: data_plane_pb2.PullDenseRequest) -> tuple[list[str], int | None]:
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


def push_grad_request(
    push_id: PushId, chunk: PushChunk, at: int | None
) -> data_plane_pb2.PushGradRequest:
    """Returns the request that carries one chunk of a push."""
    return data_plane_pb2.PushGradRequest(
        push_id=push_id_to_message(push_id),
        sparse=[sparse_grad_to_message(table, grad) for table, grad in chunk.sparse],
        dense=[dense_grad_to_message(block, grad, start) for block, start, grad in chunk.dense],
        at=at,
        chunk=chunk.chunk,
        num_chunks=chunk.num_chunks,
    )


def push_grad_arguments(
    request: data_plane_pb2.PushGradRequest,
) -> tuple[PushId, PushChunk, int | None]:
    """Returns the push id, the chunk of the push that the request carries, and its step."""
    chunk = PushChunk(
        sparse=sparse_grads_of(request),
        dense=dense_grads_of(request),
        chunk=request.chunk,
        num_chunks=request.num_chunks,
    )
    return push_id_from_message(request.push_id), chunk, _at_of(request)


def post_request(exchange: str, message: Message) -> data_plane_pb2.PostRequest:
    """Returns the request that hands over a message."""
    return data_plane_pb2.PostRequest(
        exchange=exchange,
        sender=message.sender,
        receiver=message.receiver,
        sequence=message.sequence,
        content=message.content,
    )


def posted_message(request: data_plane_pb2.PostRequest) -> Message:
    """Returns the message that is handed over."""
    return Message(
        sender=request.sender,
        receiver=request.receiver,
        sequence=request.sequence,
        content=request.content if request.HasField("content") else None,
    )


def take_response(messages: Sequence[Message]) -> data_plane_pb2.TakeResponse:
    """Returns the response with messages, each with a content."""
    return data_plane_pb2.TakeResponse(
        messages=[
            data_plane_pb2.ExchangeMessage(
                sender=message.sender, sequence=message.sequence, content=message.content
            )
            for message in messages
        ]
    )


def taken_from_response(response: data_plane_pb2.TakeResponse, receiver: int) -> list[Message]:
    """Returns the messages of a response."""
    return [
        Message(sender=each.sender, receiver=receiver, sequence=each.sequence, content=each.content)
        for each in response.messages
    ]


def _at_of(
    request: data_plane_pb2.PullSparseRequest
    | data_plane_pb2.PullDenseRequest
    | data_plane_pb2.PushGradRequest,
) -> int | None:
    return request.at if request.HasField("at") else None
