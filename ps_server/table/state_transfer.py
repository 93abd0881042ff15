"""State transfer: rows and dense blocks for devices, checked before they are written back."""

import numpy as np

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys, require_unique
from ctr_ps.protos.store import BlockState, RowStates
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.sparse_table import SparseTable


def rows_of(table: SparseTable, keys: Keys) -> RowStates:
    """Returns the rows of `keys` uint64[N], initial ones for missing rows; ProtocolError with statistics."""
    _require_no_statistics(table)
    weights, state = table.pull_states(keys)
    return RowStates(keys=keys, weights=weights, state=state, optimizer=table.spec.optimizer.name)


def block_of(block: DenseTable, start: int = 0, stop: int | None = None) -> BlockState:
    """Returns a copy of the elements `start` to `stop`, exclusive, of a server's piece."""
    piece = block.export(start, stop)
    return BlockState(
        weights=piece.weights,
        element_state=piece.element_state,
        scalars=piece.scalars,
        optimizer=block.spec.optimizer.name,
    )


def check_rows(table: SparseTable, rows: RowStates) -> None:
    """Raises ProtocolError if `write_rows` cannot write these rows."""
    what = f"rows of table {table.spec.name!r}"
    _require_no_statistics(table)
    _require_optimizer(what, rows.optimizer, table.spec.optimizer.name)
    if rows.keys.size:
        expected = ((rows.keys.size, table.spec.dim), (rows.keys.size, table.state_width))
        _require_shapes(what, (rows.weights, rows.state), expected)
    table.require_own(rows.keys)
    require_unique(f"push of {what}", rows.keys, ProtocolError)


def check_block(block: DenseTable, state: BlockState) -> None:
    """Raises ProtocolError if `block.restore` cannot write this state."""
    what = f"dense block {block.spec.name!r}"
    _require_optimizer(what, state.optimizer, block.spec.optimizer.name)
    expected = (block.length,), *block.state_shapes
    _require_shapes(what, (state.weights, state.element_state, state.scalars), expected)


def write_rows(table: SparseTable, rows: RowStates, draw: int) -> None:
    """Overwrites or creates rows that `check_rows` accepted; rounds bfloat16 by `draw`."""
    if not rows.keys.size:
        return
    no_statistics = np.empty((rows.keys.size, 0), np.float32)
    table.write(
        Rows(keys=rows.keys, weights=rows.weights, state=rows.state, statistics=no_statistics),
        draw=draw,
    )


def _require_no_statistics(table: SparseTable) -> None:
    if table.spec.statistics is not None:
        raise ProtocolError(
            f"table {table.spec.name!r} keeps statistics, which a transfer of state does not include: "
            "declare it without statistics, admission and expiry, or push gradients"
        )


def _require_optimizer(what: str, optimizer: str, expected: str) -> None:
    if optimizer != expected:
        raise ProtocolError(
            f"push of {what} has the state of optimizer {optimizer!r}, expected {expected!r}"
        )


def _require_shapes(
    what: str, arrays: tuple[Values, ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    shapes = tuple(each.shape for each in arrays)
    dtypes = {str(each.dtype) for each in arrays}
    if shapes != expected or dtypes != {"float32"}:
        raise ProtocolError(
            f"push of {what} has weights and state of shapes {shapes} and {sorted(dtypes)}, expected "
            f"{expected} and float32"
        )
