"""Statistics of rows, read straight from the tables of this process."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.feature_life.candidates import ExactCandidates
from ctr_ps.ps_server.table.rows.regions import RowRegions
from ctr_ps.ps_server.table.rows.statistics import CLICK, LAST_SEEN, SHOW, UNSEEN
from ctr_ps.ps_server.table.sparse_table import SparseTable


class Counted(NamedTuple):
    show: float
    click: float
    unseen: float
    last_seen: int


def counted_by(table: SparseTable) -> dict[int, Counted]:
    """Returns the statistics of a table's rows, by key."""
    return _counted(table._regions)


def candidates_of(table: SparseTable) -> dict[int, Counted]:
    """Returns the statistics of a table's candidates, by key."""
    assert isinstance(table._candidates, ExactCandidates)
    return _counted(table._candidates.regions)


def _counted(regions: RowRegions) -> dict[int, Counted]:
    arrays, columns = regions.arrays, regions.layout.statistics
    found = {}
    for shard in range(arrays.num_shards):
        rows = regions.rows_of(shard)
        for key, row in zip(arrays.keys[rows, 0], arrays.slab[rows], strict=True):
            numbers = row[columns]
            found[int(key)] = Counted(
                show=float(numbers[SHOW]),
                click=float(numbers[CLICK]),
                unseen=float(numbers[UNSEEN]),
                last_seen=int(numbers.view(np.uint32)[LAST_SEEN]),
            )
    return found


def counted_on(stores: Iterable[ParameterStore], table: str) -> dict[int, Counted]:
    """Returns the statistics of a table's rows on all servers."""
    return {
        key: counted
        for store in stores
        for key, counted in counted_by(store.engine.parameters.table(table)).items()
    }
