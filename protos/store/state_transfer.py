"""State transfer: parameters with their optimizer state, which train elsewhere for a time and come back.

    pull_state --> train on a device, with the same optimizers --> push_state

So a step needs no call to a store. Nobody else may train the same rows and blocks meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ctr_ps.protos.errors import GradientError
from ctr_ps.protos.futures import Future
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store.parameters import PushId, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStates:
    """Rows of one table.

    Attributes:
        keys: uint64[N], unique.
        weights: float32[N, D].
        state: float32[N, K], optimizer state.
        optimizer: Whose state that is.
    """

    keys: Keys
    weights: Values
    state: Values
    optimizer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """A dense block, or a stretch of it.

    Attributes:
        weights: float32[p].
        element_state: float32[J, p], optimizer state of each element.
        scalars: float32[s], optimizer state of the whole block.
        optimizer: Whose state that is.
    """

    weights: Values
    element_state: Values
    scalars: Values
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
        """Reads rows and blocks. A key without a row reads as a new row would be; none is created.

        Args:
            keys: For each table uint64[N], unique.
            blocks: Names of dense blocks, whole.

        Raises:
            UnknownTableError: If a table or block does not exist.
            ProtocolError: If a table keeps statistics.
        """
        ...

    def push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        """Overwrites rows and blocks. A key without a row gets one.

        It counts as any push on arrival: applied once, and advancing the version and the worker's progress as
        its push id says. Each server checks its part as a whole before it changes anything.

        Args:
            state: Whole rows, and whole blocks.
            push_id: Identity of the push.

        Returns:
            The version at the time of the answer.

        Raises:
            UnknownTableError: If a table or block does not exist.
            ProtocolError: If shapes do not fit, the state is of another optimizer, a table keeps statistics,
                or another process has the worker's place.
            GradientError: If a value is infinite or not a number.
            OverloadedError: If it would create rows while tables are over the memory limit.
        """
        ...


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
    "has a value that is infinite or not a number; nothing was written, lower the learning rate or check the "
    "input's scaling"
)
