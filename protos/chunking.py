"""Chunks: pushes and pulls too large for one message are split; a push is joined before it is applied.

    gradients --split_push--> chunk 0 | chunk 1 | ... --join_push--> the same gradients

A chunk holds whole rows of tables and stretches of dense blocks, in the order of the gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctr_ps.protos.errors import ProtocolError, SpecError
from ctr_ps.protos.gradients import NUM_COUNTS, DenseGrad, Gradients, SparseGrad, Values
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES, MAX_NUMBERS_BYTES
from ctr_ps.protos.spec import DenseSpec

KEY_BYTES = 8
VALUE_BYTES = 4
COUNT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PushChunk:
    """Chunk `chunk` of the `num_chunks` of one push.

    `sparse` has tables with some rows of their gradients; `dense` blocks, the first element of a stretch
    of the gradient, and the stretch. With `bfloat16` the gradients cross the wire as such.
    """

    sparse: Sequence[tuple[str, SparseGrad]]
    dense: Sequence[tuple[str, int, DenseGrad]]
    chunk: int = 0
    num_chunks: int = 1
    bfloat16: bool = False

    @property
    def num_values(self) -> int:
        """Number of float32 values; a key counts as two."""
        rows = sum(grad.values.size + 2 * grad.keys.size for _, grad in self.sparse)
        return rows + sum(grad.values.size for _, _, grad in self.dense)


def require_piece_fits(spec: DenseSpec, num_servers: int) -> None:
    """Raises SpecError if a server's piece of a block, which a pull does not split, exceeds a message."""
    piece_bytes = VALUE_BYTES * -(-spec.length // num_servers)
    if piece_bytes > MAX_NUMBERS_BYTES:
        raise SpecError(
            f"dense block {spec.name!r} has {spec.length} elements, {piece_bytes} bytes on each of "
            f"{num_servers} servers, more than the {MAX_MESSAGE_BYTES} that a message may have: use more "
            "servers, or several blocks"
        )


def require_values(spec: DenseSpec, values: Values | None, length: int) -> None:
    """Raises SpecError unless a dense block has valid initial values exactly if its spec announces them."""
    if (values is not None) != (spec.values_digest != 0) and length:
        has = "initial values, but no digest of them"
        if spec.values_digest:
            has = "a digest of initial values, but no values"
        raise SpecError(f"dense block {spec.name!r} has {has}")
    if values is not None and values.shape != (length,):
        raise SpecError(
            f"initial values of dense block {spec.name!r} have shape {values.shape}, expected ({length},)"
        )
    if values is not None and not np.isfinite(values).all():
        raise SpecError(f"initial values of dense block {spec.name!r} are infinite or NaN")


def split_columns(
    columns: Sequence[tuple[int, int]], limit_bytes: int
) -> list[list[tuple[int, slice]]]:
    """Splits columns, each a number of elements and the bytes of one, into groups of at most `limit_bytes`.

    Returns groups of (index of the column, its elements), in order. A single element may exceed the limit; an
    empty column is in one of the groups.
    """
    groups: list[list[tuple[int, slice]]] = [[]]
    room = limit_bytes
    for column, (count, element_bytes) in enumerate(columns):
        start = 0
        while True:
            fitting = max(room // element_bytes, 0 if groups[-1] else 1)
            stop = min(count, start + fitting)
            if stop > start or count == 0:
                groups[-1].append((column, slice(start, stop)))
                room -= (stop - start) * element_bytes
            if stop == count:
                break
            start = stop
            groups.append([])
            room = limit_bytes
    return groups


def split_push(
    gradients: Gradients, limit_bytes: int, *, bfloat16: bool = False
) -> list[PushChunk]:
    """Splits a push into chunks of about `limit_bytes` of float32 each; returns at least one."""
    tables, blocks = list(gradients.sparse.items()), list(gradients.dense.items())
    columns = [(grad.keys.size, _row_bytes(grad)) for _, grad in tables]
    columns += [(grad.values.size, VALUE_BYTES) for _, grad in blocks]
    groups = split_columns(columns, limit_bytes)
    chunks = []
    for chunk, group in enumerate(groups):
        sparse, dense = [], []
        for column, part in group:
            if column < len(tables):
                table, rows = tables[column]
                sparse.append((table, rows.stretch(part)))
            else:
                block, grad = blocks[column - len(tables)]
                dense.append((block, part.start, DenseGrad(grad.values[part], grad.examples)))
        chunks.append(PushChunk(sparse, dense, chunk, len(groups), bfloat16))
    return chunks


def _row_bytes(grad: SparseGrad) -> int:
    dim: int = grad.values.shape[1]
    num_counts = 0 if grad.counts is None else NUM_COUNTS
    return KEY_BYTES + VALUE_BYTES * dim + COUNT_BYTES * num_counts


def join_push(chunks: Sequence[PushChunk]) -> Gradients:
    """Joins complete, ordered chunks into gradients; raises ProtocolError if they do not fit each other."""
    sparse: dict[str, list[SparseGrad]] = {}
    dense: dict[str, list[tuple[int, DenseGrad]]] = {}
    for chunk in chunks:
        for table, rows in chunk.sparse:
            sparse.setdefault(table, []).append(rows)
        for block, start, stretch in chunk.dense:
            dense.setdefault(block, []).append((start, stretch))
    return Gradients(
        sparse={table: _join_rows(table, pieces) for table, pieces in sparse.items()},
        dense={block: _join_stretches(block, pieces) for block, pieces in dense.items()},
    )


def _join_rows(table: str, pieces: list[SparseGrad]) -> SparseGrad:
    if len(pieces) == 1:
        return pieces[0]
    _require_equal(f"table {table!r}", "dim", [piece.values.shape[1] for piece in pieces])
    _require_equal(f"table {table!r}", "examples", [piece.examples for piece in pieces])
    counts = [piece.counts for piece in pieces if piece.counts is not None]
    has_counts = [int(piece.counts is not None) for piece in pieces]
    _require_equal(f"table {table!r}", "having counts", has_counts)
    return SparseGrad(
        np.concatenate([piece.keys for piece in pieces]),
        np.concatenate([piece.values for piece in pieces]),
        pieces[0].examples,
        np.concatenate(counts) if counts else None,
    )


def _join_stretches(block: str, pieces: list[tuple[int, DenseGrad]]) -> DenseGrad:
    position = 0
    for start, stretch in pieces:
        if start != position:
            raise ProtocolError(
                f"a chunk of a push to dense block {block!r} starts at element {start}, expected {position}"
            )
        position += stretch.values.size
    if len(pieces) == 1:
        return pieces[0][1]
    _require_equal(f"dense block {block!r}", "examples", [piece.examples for _, piece in pieces])
    return DenseGrad(
        np.concatenate([stretch.values for _, stretch in pieces]), pieces[0][1].examples
    )


def _require_equal(what: str, attribute: str, numbers: Sequence[float]) -> None:
    if len(set(numbers)) > 1:
        raise ProtocolError(f"the chunks of a push to {what} differ in {attribute}: {numbers}")
