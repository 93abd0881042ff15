"""Chunks of transferred state: messages have a limit, a push is joined before anything is written.

    state --split_state--> chunk 0 | chunk 1 | ... --join_state--> the same state

A chunk holds whole rows of tables and stretches of dense blocks, in the order of the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.chunking import KEY_BYTES, VALUE_BYTES, split_columns
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.store.state_transfer import BlockState, ModelState, RowStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Elements `start` to `stop`, exclusive, of a server's piece of a dense block."""

    block: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Chunk `chunk` of `num_chunks` of a transfer to or from one server.

    Attributes:
        rows: Tables, each with some rows.
        blocks: Blocks, where in the server's piece a stretch begins, and the stretch.
        chunk: From 0.
        num_chunks: 1 for what fits one message.
    """

    rows: Sequence[tuple[str, RowStates]]
    blocks: Sequence[tuple[str, int, BlockState]]
    chunk: int = 0
    num_chunks: int = 1

    @property
    def num_values(self) -> int:
        """Float32 numbers in it; a key counts as two."""
        rows = sum(
            each.weights.size + each.state.size + 2 * each.keys.size for _, each in self.rows
        )
        return rows + sum(
            each.weights.size + each.element_state.size + each.scalars.size
            for _, _, each in self.blocks
        )


def row_bytes(dim: int, state_width: int) -> int:
    """Returns the bytes of a row in a message."""
    return KEY_BYTES + VALUE_BYTES * (dim + state_width)


def split_state(state: ModelState, limit_bytes: int) -> list[StateChunk]:
    """Returns the chunks of a push, each of about `limit_bytes` at most; always at least one."""
    tables, blocks = list(state.rows.items()), list(state.blocks.items())
    columns = [
        (each.keys.size, row_bytes(each.weights.shape[1], each.state.shape[1]))
        for _, each in tables
    ]
    columns += [
        (each.weights.size, VALUE_BYTES * (1 + len(each.element_state))) for _, each in blocks
    ]
    groups = split_columns(columns, limit_bytes)
    return [
        StateChunk(
            [
                (tables[column][0], rows_at(tables[column][1], where))
                for column, where in group
                if column < len(tables)
            ],
            [
                (
                    blocks[column - len(tables)][0],
                    where.start,
                    stretch_of(blocks[column - len(tables)][1], where.start, where.stop),
                )
                for column, where in group
                if column >= len(tables)
            ],
            chunk,
            len(groups),
        )
        for chunk, group in enumerate(groups)
    ]


def rows_at(rows: RowStates, where: slice | NDArray[np.int32]) -> RowStates:
    """Returns the rows in a range, as views, or at positions int32[M], as copies."""
    return replace(
        rows, keys=rows.keys[where], weights=rows.weights[where], state=rows.state[where]
    )


def stretch_of(block: BlockState, start: int, stop: int) -> BlockState:
    """Returns a view of the elements `start` to `stop`, exclusive, of a block."""
    where = slice(start, stop)
    return replace(block, weights=block.weights[where], element_state=block.element_state[:, where])


def join_state(chunks: Sequence[StateChunk]) -> ModelState:
    """Returns the state of `chunks`, which are in order and complete.

    Raises:
        ProtocolError: If the chunks do not fit each other.
    """
    rows: dict[str, list[RowStates]] = {}
    blocks: dict[str, list[tuple[int, BlockState]]] = {}
    for chunk in chunks:
        for table, each in chunk.rows:
            rows.setdefault(table, []).append(each)
        for block, start, stretch in chunk.blocks:
            blocks.setdefault(block, []).append((start, stretch))
    return ModelState(
        rows={table: join_rows(table, parts) for table, parts in rows.items()},
        blocks={block: join_stretches(block, parts) for block, parts in blocks.items()},
    )


def join_rows(table: str, parts: Sequence[RowStates]) -> RowStates:
    """Returns the rows of all parts, in their order; a part without rows has no width.

    Raises:
        ProtocolError: If their widths or optimizers differ.
    """
    parts = [part for part in parts if part.keys.size] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    found = {(part.weights.shape[1], part.state.shape[1], part.optimizer) for part in parts}
    if len(found) > 1:
        raise ProtocolError(
            f"parts of table {table!r} differ in dim, width of state or optimizer: {sorted(found)}"
        )
    return RowStates(
        keys=np.concatenate([part.keys for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        state=np.concatenate([part.state for part in parts]),
        optimizer=parts[0].optimizer,
    )


def join_stretches(block: str, parts: Sequence[tuple[int, BlockState]]) -> BlockState:
    """Returns the stretches of a block, which follow each other, as one.

    Raises:
        ProtocolError: If one is missing, or they differ in what they have in common.
    """
    position = 0
    for start, stretch in parts:
        if start != position:
            raise ProtocolError(
                f"the state of dense block {block!r} continues at element {start} after {position} elements"
            )
        position += stretch.weights.size
    stretches = [stretch for _, stretch in parts]
    found = {
        (len(each.element_state), each.scalars.tobytes(), each.optimizer) for each in stretches
    }
    if len(found) > 1:
        raise ProtocolError(
            f"stretches of dense block {block!r} differ in optimizer, number of states or scalars"
        )
    return concatenated(stretches)


def concatenated(stretches: Sequence[BlockState]) -> BlockState:
    """Returns consecutive stretches as one, with the scalars of the first."""
    return replace(
        stretches[0],
        weights=np.concatenate([each.weights for each in stretches]),
        element_state=np.concatenate([each.element_state for each in stretches], axis=1),
    )
