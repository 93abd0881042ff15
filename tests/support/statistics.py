"""What rows have counted, read straight from the tables of this process."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ps_server.store import ParameterStore
from ps_server.table.sparse_table import SparseTable
from ps_server.table.statistics import CLICK, LAST_SEEN, SHOW, UNSEEN


class Counted(NamedTuple):
    """Statistics of one row."""

    show: float
    click: float
    unseen: float
    last_seen: int


def counted_by(table: SparseTable) -> dict[int, Counted]:
    """Returns what the rows of a table have counted, by key."""
    arrays, columns = table._arrays, table.layout.statistics
    found = {}
    for shard in table.shards:
        first = shard * arrays.region_rows
        for row in range(first, first + int(arrays.num_rows[shard])):
            numbers = arrays.slab[row, columns]
            found[int(arrays.keys[row, 0])] = Counted(
                show=float(numbers[SHOW]),
                click=float(numbers[CLICK]),
                unseen=float(numbers[UNSEEN]),
                last_seen=int(numbers.view(np.uint32)[LAST_SEEN]),
            )
    return found


def counted_on(stores: Iterable[ParameterStore], table: str) -> dict[int, Counted]:
    """Returns what the rows of a table have counted on all servers."""
    return {
        key: counted
        for store in stores
        for key, counted in counted_by(store._tables[table]).items()
    }
