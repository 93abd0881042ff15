"""Columns of keys, values and gradients <-> fields of messages of protos/v1/data_plane.proto.

Decoded arrays are read-only views of the message.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import DenseGrad, SparseGrad, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import BlockState, Pulled, PulledPieces, RowStates, StateChunk
from ctr_ps.protos.store.moves import Moved, MovedCounters, MovedRows
from ctr_ps.protos.wire.encoding import arrays
from ctr_ps.protos.wire.encoding.codec import FieldCodec

Message = dict[str, Any]
Digests = Mapping[tuple[str, int], bytes]


def _encode_keys_of(keys: Mapping[str, Keys]) -> list[Message]:
    return [{"table": table, "keys": arrays.encode_keys(column)} for table, column in keys.items()]


def _decode_keys_of(columns: Any) -> dict[str, Keys]:
    keys = {column.table: arrays.decode_keys(column.keys) for column in columns}
    if len(keys) < len(columns):
        raise ProtocolError(
            f"a pull has {len(columns)} columns of keys, expected one for each of the tables {sorted(keys)}"
        )
    return keys


def _encode_pulled(pulled: Pulled) -> Message:
    return {
        "rows": [
            {
                "table": table,
                "values": arrays.encode_parameters(values, bfloat16=pulled.bfloat16),
                "num_rows": values.shape[0],
            }
            for table, values in pulled.rows.items()
        ],
        "version": pulled.version,
        "bfloat16": pulled.bfloat16,
    }


def _decode_pulled(found: Any) -> Pulled:
    rows = {
        column.table: arrays.decode_rows(column.values, column.num_rows, bfloat16=found.bfloat16)
        for column in found.rows
    }
    return Pulled(rows, found.version, found.bfloat16)


def _encode_changed_rows(rows: Mapping[str, tuple[Keys, Values]]) -> list[Message]:
    return [
        {"table": table, "keys": arrays.encode_keys(keys), "values": arrays.encode_values(values)}
        for table, (keys, values) in rows.items()
    ]


def _decode_changed_rows(columns: Any) -> dict[str, tuple[Keys, Values]]:
    rows: dict[str, tuple[Keys, Values]] = {}
    for column in columns:
        keys = arrays.decode_keys(column.keys)
        rows[column.table] = keys, arrays.decode_rows(column.values, keys.size)
    return rows


def _encode_pulled_pieces(pulled: PulledPieces) -> Message:
    return {
        "pieces": [
            {"block": block, "values": arrays.encode_parameters(piece, bfloat16=pulled.bfloat16)}
            for block, piece in pulled.pieces.items()
        ],
        "version": pulled.version,
        "bfloat16": pulled.bfloat16,
    }


def _decode_pulled_pieces(found: Any) -> PulledPieces:
    pieces = {
        column.block: arrays.decode_parameters(column.values, bfloat16=found.bfloat16)
        for column in found.pieces
    }
    return PulledPieces(pieces, found.version, found.bfloat16)


def _encode_examples(examples: float) -> Message:
    is_count = 0 <= examples < 2**64 and float(examples).is_integer()
    return {"examples": int(examples)} if is_count else {"weight": examples}


def _examples_of(column: Any) -> float:
    examples: float = column.weight if column.HasField("weight") else column.examples
    return examples


def _encode_chunk(chunk: PushChunk) -> Message:
    return {
        "sparse": [
            {
                "table": table,
                "keys": arrays.encode_keys(grad.keys),
                "values": arrays.encode_parameters(grad.values, bfloat16=chunk.bfloat16),
                **_encode_examples(grad.examples),
                "counts": arrays.encode_counts(grad.counts),
            }
            for table, grad in chunk.sparse
        ],
        "dense": [
            {
                "block": block,
                "values": arrays.encode_parameters(grad.values, bfloat16=chunk.bfloat16),
                **_encode_examples(grad.examples),
                "start": start,
            }
            for block, start, grad in chunk.dense
        ],
        "chunk": chunk.chunk,
        "num_chunks": chunk.num_chunks,
        "bfloat16": chunk.bfloat16,
    }


def _decode_chunk(found: Any) -> PushChunk:
    is_bfloat16 = found.bfloat16
    sparse = []
    for column in found.sparse:
        keys = arrays.decode_keys(column.keys)
        values = arrays.decode_rows(column.values, keys.size, bfloat16=is_bfloat16)
        counts = arrays.decode_counts(column.counts, keys.size)
        sparse.append((column.table, SparseGrad(keys, values, _examples_of(column), counts)))
    dense = []
    for column in found.dense:
        values = arrays.decode_parameters(column.values, bfloat16=is_bfloat16)
        dense.append((column.block, column.start, DenseGrad(values, _examples_of(column))))
    return PushChunk(sparse, dense, found.chunk, found.num_chunks, is_bfloat16)


def _encode_state(state: StateChunk) -> Message:
    return {
        "rows": [
            {
                "table": table,
                "keys": arrays.encode_keys(rows.keys),
                "weights": arrays.encode_values(rows.weights),
                "state": arrays.encode_values(rows.state),
                "optimizer": rows.optimizer,
            }
            for table, rows in state.rows
        ],
        "blocks": [
            {
                "block": block,
                "start": start,
                "weights": arrays.encode_values(stretch.weights),
                "element_state": arrays.encode_values(stretch.element_state),
                "scalars": arrays.encode_values(stretch.scalars),
                "num_states": len(stretch.element_state),
                "optimizer": stretch.optimizer,
            }
            for block, start, stretch in state.blocks
        ],
        "chunk": state.chunk,
        "num_chunks": state.num_chunks,
    }


def _decode_state(found: Any) -> StateChunk:
    rows = []
    for column in found.rows:
        keys = arrays.decode_keys(column.keys)
        weights, state = (
            arrays.decode_rows(data, keys.size) for data in (column.weights, column.state)
        )
        rows.append(
            (
                column.table,
                RowStates(keys=keys, weights=weights, state=state, optimizer=column.optimizer),
            )
        )
    blocks = [(column.block, column.start, _decode_stretch(column)) for column in found.blocks]
    return StateChunk(rows, blocks, found.chunk, found.num_chunks)


def _encode_moved(moved: Moved) -> Message:
    return {
        "rows": [
            {
                "table": rows.table,
                "keys": arrays.encode_keys(rows.keys),
                "weights": arrays.encode_values(rows.weights),
                "state": arrays.encode_values(rows.state),
                "statistics": arrays.encode_values(rows.statistics),
                "removed": arrays.encode_keys(rows.removed),
                "are_candidates": rows.are_candidates,
            }
            for rows in moved.rows
        ],
        "blocks": _encode_state(StateChunk((), moved.blocks))["blocks"],
        "counters": [
            {
                "table": each.table,
                "shard": each.shard,
                "counters": each.counters.tobytes(),
                "start": each.start,
            }
            for each in moved.counters
        ],
    }


def _decode_moved(found: Any) -> Moved:
    rows = []
    for column in found.rows:
        keys = arrays.decode_keys(column.keys)
        weights, state, statistics = (
            arrays.decode_rows(data, keys.size)
            for data in (column.weights, column.state, column.statistics)
        )
        rows.append(
            MovedRows(
                table=column.table,
                keys=keys,
                weights=weights,
                state=state,
                statistics=statistics,
                removed=arrays.decode_keys(column.removed),
                are_candidates=column.are_candidates,
            )
        )
    return Moved(
        rows,
        [(column.block, column.start, _decode_stretch(column)) for column in found.blocks],
        [
            MovedCounters(
                each.table, each.shard, np.frombuffer(each.counters, np.uint8), each.start
            )
            for each in found.counters
        ],
    )


def _decode_stretch(column: Any) -> BlockState:
    weights, element_state = (
        arrays.decode_values(column.weights),
        arrays.decode_values(column.element_state),
    )
    if element_state.size != column.num_states * weights.size:
        raise ProtocolError(
            f"a part of dense block {column.block!r} has {weights.size} elements and {element_state.size} "
            f"state values, expected {column.num_states} for each element"
        )
    return BlockState(
        weights=weights,
        element_state=element_state.reshape(column.num_states, weights.size),
        scalars=arrays.decode_values(column.scalars),
        optimizer=column.optimizer,
    )


def _encode_digests(digests: Digests) -> list[Message]:
    return [
        {"table": table, "shard": shard, "digest": digest}
        for (table, shard), digest in digests.items()
    ]


def _decode_digests(shards: Any) -> Digests:
    return {(shard.table, shard.shard): shard.digest for shard in shards}


VALUES = FieldCodec(arrays.encode_values, arrays.decode_values)
"""A server's piece of a dense block."""

KEYS = FieldCodec(_encode_keys_of, _decode_keys_of)
"""Keys by table."""

PULLED = FieldCodec(_encode_pulled, _decode_pulled)
"""Rows by table, float32[N, D], and their version."""

CHANGED_ROWS = FieldCodec(_encode_changed_rows, _decode_changed_rows)
"""Keys and rows by table; D is 0 where there are none."""

PULLED_PIECES = FieldCodec(_encode_pulled_pieces, _decode_pulled_pieces)
"""A server's pieces of dense blocks, by block, and their version."""

CHUNK = FieldCodec(_encode_chunk, _decode_chunk)
"""A chunk of a push, its gradients in the order sent."""

STATE = FieldCodec(_encode_state, _decode_state)
"""Rows and stretches of dense blocks with their optimizer state."""

MOVED = FieldCodec(_encode_moved, _decode_moved)
"""Whole rows, stretches of dense blocks and counters that move to another server."""

DIGESTS = FieldCodec(_encode_digests, _decode_digests)
"""Digests by table and shard."""
