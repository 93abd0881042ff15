"""Rows of a pass on the host: pulled from the store, kept from the pass before, pushed back.

values float32[R, D + K] = | weights: D | optimizer state: K |      keys uint64[R], ascending
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.chunking import VALUE_BYTES
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import RowStates, StateTransfer

PART_BYTES = 2**28
"""Rows that a call to the store transfers: a server holds a push until all of it has come."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of one table: keys uint64[R], ascending, and values float32[R, D + K]."""

    keys: Keys
    values: Values

    def take(self, where: NDArray[np.int64]) -> "PassRows":
        """Returns a copy of some rows, in their order."""
        return PassRows(self.keys[where], self.values[where])

    def states(self, spec: TableSpec) -> RowStates:
        """Returns a copy as the store takes it."""
        return RowStates(
            keys=self.keys,
            weights=np.ascontiguousarray(self.values[:, : spec.dim]),
            state=np.ascontiguousarray(self.values[:, spec.dim :]),
            optimizer=spec.optimizer.name,
        )


def places_in(sorted_keys: Keys, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns where in `sorted_keys` each key is, int64[N], and whether it is there, bool[N]."""
    places = np.searchsorted(sorted_keys, keys)
    places[places == sorted_keys.size] = 0
    if not sorted_keys.size:
        return places, np.zeros(keys.size, np.bool_)
    return places, sorted_keys[places] == keys


def pull_rows(
    store: StateTransfer,
    spec: TableSpec,
    keys: Keys,
    width: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> PassRows:
    """Reads rows from the store, part by part.

    Args:
        store: Where they are.
        spec: Of the table.
        keys: uint64[R], ascending.
        width: D + K.
        is_stopped: Whether to give up between two parts; then the rest of the rows are undefined.
    """
    values = np.empty((keys.size, width), np.float32)
    for part in parts(keys.size, width):
        if is_stopped():
            break
        rows = store.pull_state({spec.name: keys[part]}, []).result().rows[spec.name]
        values[part, : spec.dim] = rows.weights
        values[part, spec.dim :] = rows.state
    return PassRows(keys, values)


def parts(num_rows: int, width: int) -> Iterator[slice]:
    """Yields stretches of rows of about `PART_BYTES`."""
    step = max(1, PART_BYTES // (VALUE_BYTES * width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def merged(keys: Keys, sources: Sequence[PassRows]) -> PassRows:
    """Returns the rows of `keys` uint64[R], ascending, each of which is in one of `sources`."""
    values = np.empty((keys.size, sources[0].values.shape[1]), np.float32)
    for source in sources:
        places, is_there = places_in(source.keys, keys)
        values[is_there] = source.values[places[is_there]]
    return PassRows(keys, values)


def unique_of(columns: Sequence[Keys]) -> Keys:
    """Returns the keys of all columns, ascending and each once."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *columns]))


def new_keys(keys: Mapping[str, Keys], known: Mapping[str, Keys]) -> dict[str, Keys]:
    """Returns by table the keys that are not among the known ones, all ascending."""
    return {
        table: column[~places_in(known[table], column)[1]] if table in known else column
        for table, column in keys.items()
    }
