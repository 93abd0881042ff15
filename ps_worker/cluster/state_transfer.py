"""State of a cluster as one: pulls and pushes of rows and blocks with their optimizer state, by server.

keys, blocks --route, split--> a request for each message --> chunks --joined--> the whole state
state --check, route--> the part of each server --split--> chunks
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctr_ps.protos.chunking import VALUE_BYTES, split_columns
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys, require_unique
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import BlockState, ModelState, RowStates, StateChunk, Stretch
from ctr_ps.protos.store.state_transfer import (
    concatenated,
    require_finite_state,
    row_bytes,
    rows_at,
    split_state,
    stretch_of,
)
from ctr_ps.protos.wire.requests import PullState
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_worker.cluster.routing import Positions, Routing


@dataclass(frozen=True, slots=True)
class PartOfPull:
    """A request to one server, and where in the whole answer its rows belong, by table."""

    server: int
    positions: Mapping[str, Positions]
    request: PullState


def parts_of_pull(
    routing: Routing, keys: Mapping[str, Keys], blocks: Sequence[str]
) -> list[PartOfPull]:
    """Returns the requests of a pull of keys, by table, and of blocks; each answer fits a message."""
    routes = routing.positions(keys)
    specs = {table: routing.table(table) for table in keys}
    element_bytes = {
        block: VALUE_BYTES * (1 + optimizer_of(routing.block(block).optimizer).num_slots)
        for block in blocks
    }
    names = [*keys, *element_bytes]
    parts = []
    for server in routing.shard_map.servers:
        columns = [
            (routes[table][server].size, row_bytes(spec.dim, _state_width(spec)))
            for table, spec in specs.items()
        ]
        columns += [
            (routing.piece_length(block, server), size) for block, size in element_bytes.items()
        ]
        for group in split_columns(columns, routing.chunk_bytes):
            positions = {
                names[column]: routes[names[column]][server][where]
                for column, where in group
                if column < len(keys)
            }
            request = PullState(
                keys={table: keys[table][where] for table, where in positions.items()},
                stretches=[
                    Stretch(block=names[column], start=where.start, stop=where.stop)
                    for column, where in group
                    if column >= len(keys)
                ],
                shard_map_epoch=routing.shard_map.epoch,
            )
            parts.append(PartOfPull(server, positions, request))
    return parts


def joined(
    routing: Routing, keys: Mapping[str, Keys], answers: Sequence[tuple[PartOfPull, StateChunk]]
) -> ModelState:
    """Returns the whole state of the answers to `parts_of_pull`, in its order.

    Scalars of a block are those of its first piece: others differ only if their servers had not applied the
    same pushes.

    Raises:
        ProtocolError: If an answer is not what was asked for.
    """
    rows = {}
    for table, column in keys.items():
        spec = routing.table(table)
        rows[table] = RowStates(
            keys=column,
            weights=np.empty((column.size, spec.dim), np.float32),
            state=np.empty((column.size, _state_width(spec)), np.float32),
            optimizer=spec.optimizer.name,
        )
    stretches: dict[str, list[BlockState]] = {}
    for part, chunk in answers:
        _require_columns(part, chunk)
        for table, found in chunk.rows:
            positions = part.positions[table]
            _require_rows(part, table, found, rows[table])
            if positions.size:
                rows[table].weights[positions] = found.weights
                rows[table].state[positions] = found.state
        for block, _, stretch in chunk.blocks:
            _require_stretch(part, block, stretch, routing.block(block))
            stretches.setdefault(block, []).append(stretch)
    return ModelState(rows, {block: concatenated(parts) for block, parts in stretches.items()})


def split_push(routing: Routing, state: ModelState) -> dict[int, list[StateChunk]]:
    """Returns, by server, the chunks of a push, at least one; it is checked as a whole.

    Raises:
        UnknownTableError: If a table or block was not declared.
        ProtocolError: If shapes do not fit the specs, keys are there twice, or numbers are not finite.
    """
    _require_whole(routing, state)
    for table, whole_rows in state.rows.items():
        require_unique(f"push of rows of table {table!r}", whole_rows.keys, ProtocolError)
    require_finite_state(state)
    routes = routing.positions({table: rows.keys for table, rows in state.rows.items()})
    chunks = {}
    for server in routing.shard_map.servers:
        rows = {table: rows_at(whole, routes[table][server]) for table, whole in state.rows.items()}
        blocks = {}
        for block, whole in state.blocks.items():
            piece = routing.piece(block, server)
            blocks[block] = stretch_of(whole, piece.start, piece.stop)
        chunks[server] = split_state(ModelState(rows, blocks), routing.chunk_bytes)
    return chunks


def _require_whole(routing: Routing, state: ModelState) -> None:
    """Raises ProtocolError unless shapes fit the specs: a server sees its own part alone."""
    for table, rows in state.rows.items():
        spec = routing.table(table)
        expected = ((rows.keys.size, spec.dim), (rows.keys.size, _state_width(spec)))
        _require_shapes(f"table {table!r}", (rows.weights.shape, rows.state.shape), expected)
    for block, values in state.blocks.items():
        dense = routing.block(block)
        slots = optimizer_of(dense.optimizer).num_slots
        shapes = values.weights.shape, values.element_state.shape
        _require_shapes(f"dense block {block!r}", shapes, ((dense.length,), (slots, dense.length)))


def _require_shapes(
    what: str, shapes: tuple[tuple[int, ...], ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    if shapes != expected:
        raise ProtocolError(
            f"push of {what} has weights and state of shapes {shapes}, expected {expected}"
        )


def _state_width(spec: TableSpec) -> int:
    return optimizer_of(spec.optimizer).state_width(spec.dim)


def _require_columns(part: PartOfPull, chunk: StateChunk) -> None:
    """Raises ProtocolError unless a server answered with the tables and stretches that were asked for."""
    request = part.request
    asked: list[object] = [
        *request.keys,
        *((each.block, each.start, each.stop) for each in request.stretches),
    ]
    found: list[object] = [
        *(table for table, _ in chunk.rows),
        *((block, start, start + each.weights.size) for block, start, each in chunk.blocks),
    ]
    if found != asked:
        raise ProtocolError(
            f"server {part.server} was asked for the state of tables and parts of dense blocks {asked}, but "
            f"answered with {found}"
        )


def _require_rows(part: PartOfPull, table: str, found: RowStates, whole: RowStates) -> None:
    keys = part.request.keys[table]
    if not np.array_equal(found.keys, keys):
        raise ProtocolError(
            f"server {part.server} answered with the state of other keys of table {table!r} than asked for"
        )
    arrays = (found.weights, found.state)
    widths = (whole.weights.shape[1], whole.state.shape[1])
    expected = tuple((keys.size, width) for width in widths)
    if keys.size:  # rows without any have no width
        _require_found(part, f"table {table!r}", arrays, expected)
    _require_optimizer(part, f"table {table!r}", found.optimizer, whole.optimizer)


def _require_stretch(part: PartOfPull, block: str, found: BlockState, spec: DenseSpec) -> None:
    optimizer, length = optimizer_of(spec.optimizer), found.weights.size
    arrays = (found.weights, found.element_state, found.scalars)
    expected = (length,), (optimizer.num_slots, length), (len(optimizer.initial_scalars),)
    _require_found(part, f"dense block {block!r}", arrays, expected)
    _require_optimizer(part, f"dense block {block!r}", found.optimizer, optimizer.name)


def _require_found(
    part: PartOfPull, what: str, arrays: Sequence[Values], expected: tuple[tuple[int, ...], ...]
) -> None:
    shapes = tuple(each.shape for each in arrays)
    dtypes = sorted({str(each.dtype) for each in arrays})
    if shapes != expected or dtypes != ["float32"]:
        raise ProtocolError(
            f"server {part.server} answered with a state of {what} of shapes {shapes} and {dtypes}, "
            f"expected {expected} and float32: it has another spec"
        )


def _require_optimizer(part: PartOfPull, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ProtocolError(
            f"server {part.server} answered with a state of {what} of optimizer {found!r}, expected "
            f"{expected!r}: it has another spec"
        )
