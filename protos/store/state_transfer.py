"""State transfer: parameters with their optimizer state, which train elsewhere for a time and come back.

    pull_state --> train on a device, with the same optimizers --> push_state

So a step needs no call to a store. Nobody else may train the same rows and blocks meanwhile. State too large
for one message crosses the wire in chunks, and a push is joined before anything is written:

    state --split_state--> chunk 0 | chunk 1 | ... --join_state--> the same state

A chunk holds whole rows of tables and stretches of dense blocks, in the order of the state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.chunking import KEY_BYTES, VALUE_BYTES, split_columns
from ctr_ps.protos.errors import GradientError, ProtocolError
from ctr_ps.protos.futures import Future
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store.parameters import PushId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """Rows of one table, with unique keys, and the state of an optimizer."""

    keys: Keys  # [N]
    weights: Values  # [N, D]
    state: Values  # [N, K]
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """A dense block, or a stretch of it, and the state of an optimizer: of each element, of the block."""

    weights: Values  # [p]
    element_state: Values  # [J, p]
    scalars: Values  # [s]
    optimizer: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """Rows by table, and dense blocks by name, with their optimizer state."""

    rows: Mapping[str, RowStates] = field(default_factory=dict)
    blocks: Mapping[str, BlockState] = field(default_factory=dict)


class StateTransfer(Protocol):
    """Parameters as values and optimizer state together.

    Tables that keep statistics have no part in it: what trains elsewhere counts no shows and clicks.
    """

    def pull_state(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> Future[ModelState]:
        """Reads the rows of unique `keys`, and whole dense blocks.

        A key without a row reads as a new row would be; none is created.

        Raises:
            UnknownTableError: If a table or block does not exist.
            ProtocolError: If a table keeps statistics.
        """

    def push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        """Overwrites whole rows and blocks; returns the version. A key without a row gets one.

        It counts as any push on arrival: applied once, and advancing the version and the worker's progress as
        its push id says. Each server checks its part as a whole before it changes anything.

        Raises:
            UnknownTableError: If a table or block does not exist.
            ProtocolError: If shapes do not fit, the state is of another optimizer, a table keeps statistics,
                or another process has the worker's place.
            GradientError: If a value is infinite or not a number.
            OverloadedError: If it would create rows while tables are over the memory limit.
        """


def require_finite_state(state: ModelState) -> None:
    """Raises GradientError if a value is infinite or not a number; names the key's row, or the block."""
    for table, rows in state.rows.items():
        for values in (rows.weights, rows.state):
            if not (is_finite := np.isfinite(values).all(axis=1)).all():
                key = rows.keys[np.flatnonzero(~is_finite)[0]]
                raise GradientError(f"the row of key {key} of table {table!r} {_NOT_FINITE}")
    for block, stretch in state.blocks.items():
        for values in (stretch.weights, stretch.element_state, stretch.scalars):
            if not np.isfinite(values).all():
                raise GradientError(f"dense block {block!r} {_NOT_FINITE}")


_NOT_FINITE = (
    "has a value that is infinite or NaN; nothing was written: lower the learning rate, or check the "
    "scaling of the input"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Elements `start` to `stop`, exclusive, of a server's piece of a dense block."""

    block: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Chunk `chunk` of `num_chunks` of a transfer to or from one server: tables, each with some rows.

    `blocks` are blocks, where in the server's piece a stretch begins, and the stretch.
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
    chunks = []
    for chunk, group in enumerate(groups):
        rows, stretches = [], []
        for column, where in group:
            if column < len(tables):
                table, each = tables[column]
                rows.append((table, rows_at(each, where)))
            else:
                block, whole = blocks[column - len(tables)]
                stretches.append((block, where.start, stretch_of(whole, where.start, where.stop)))
        chunks.append(StateChunk(rows, stretches, chunk, len(groups)))
    return chunks


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
    """Joins complete, ordered chunks into state; raises ProtocolError if they do not fit each other."""
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

    Raises ProtocolError if their widths or optimizers differ.
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

    Raises ProtocolError if one is missing, or they differ in what they have in common.
    """
    position = 0
    for start, stretch in parts:
        if start != position:
            raise ProtocolError(
                f"a part of the state of dense block {block!r} starts at element {start}, expected "
                f"{position}"
            )
        position += stretch.weights.size
    stretches = [stretch for _, stretch in parts]
    found = {
        (len(each.element_state), each.scalars.tobytes(), each.optimizer) for each in stretches
    }
    if len(found) > 1:
        raise ProtocolError(
            f"parts of the state of dense block {block!r} differ in optimizer, or in number of states or "
            "scalars"
        )
    return concatenated(stretches)


def concatenated(stretches: Sequence[BlockState]) -> BlockState:
    """Returns consecutive stretches as one, with the scalars of the first that has elements.

    Those of a piece without elements are never updated.
    """
    return replace(
        next((each for each in stretches if each.weights.size), stretches[0]),
        weights=np.concatenate([each.weights for each in stretches]),
        element_state=np.concatenate([each.element_state for each in stretches], axis=1),
    )
