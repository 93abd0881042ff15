"""Eviction: a shard that has reached the table's limit loses 1 of 16 of its rows, to make room for new ones.

A shard's limit is its part of the table's, rounded up. Evicted are the rows that were last seen longest ago,
or those with the lowest score; among equals those with the smallest scrambled keys. So the choice depends on
the pushes to the shard, and not on the number of servers.
"""

from bisect import bisect_left
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import ExpirySpec, StatisticsSpec, TableSpec
from ctr_ps.ps_server.optimizers.registry import initial_state
from ctr_ps.ps_server.table.feature_life.admission import counter_bytes_of_shard
from ctr_ps.ps_server.table.memory.hash_index import INITIAL_SLOTS, MAX_LOAD_PERCENT, TableArrays
from ctr_ps.ps_server.table.memory.layout import RowLayout
from ctr_ps.ps_server.table.rows.regions import NO_LIMIT, SLOT_BYTES, VALUE_BYTES, RowRegions
from ctr_ps.ps_server.table.rows.statistics import CLICK, LAST_SEEN, SHOW, score_of

EVICTED_SHARE = 16
"""An eviction removes one row in this number: it costs a pass over the shard."""

CANDIDATES_SHARE = 4
"""One byte in this number of a table's `max_bytes` is for candidates, if they are counted exactly."""

CANDIDATE = RowLayout(dim=0, state_width=0, has_statistics=True)

_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)


def max_rows_of_shard(spec: TableSpec) -> int:
    """Returns a shard's limit of rows; raises SpecError if it leaves no room for a row in each shard."""
    expiry = spec.expiry
    if expiry is None:
        return NO_LIMIT
    rows = _max_rows(spec, expiry)
    if not rows or not max_candidates_of_shard(spec):
        raise SpecError(
            f"table {spec.name!r} has max_bytes {expiry.max_bytes}, which leaves no room for a row in each "
            f"of its {spec.num_shards} shards{_beside_candidates(spec)}: set {_fewest_bytes(spec, expiry)} "
            f"or more"
        )
    return rows


def _max_rows(spec: TableSpec, expiry: ExpirySpec) -> int:
    limits = [NO_LIMIT]
    if expiry.max_rows:
        limits.append(-(-expiry.max_rows // spec.num_shards))
    if expiry.max_bytes:
        layout = RowLayout(spec.dim, initial_state(spec.optimizer, spec.dim).size, True)
        share = _bytes_of_shard(spec) - _candidate_bytes_of_shard(spec)
        limits.append(_rows_within(share, VALUE_BYTES * layout.stride))
    return min(limits)


def _fewest_bytes(spec: TableSpec, expiry: ExpirySpec) -> int:
    """Returns the least `max_bytes` with room for a row and, if counted, a candidate in each shard."""

    def has_room(max_bytes: int) -> bool:
        enough = replace(expiry, max_bytes=max_bytes)
        larger = replace(spec, expiry=enough)
        return bool(_max_rows(larger, enough) and max_candidates_of_shard(larger))

    return bisect_left(range(2**62), True, lo=expiry.max_bytes, key=has_room)


def max_candidates_of_shard(spec: TableSpec) -> int:
    """Returns a shard's limit of candidates."""
    if spec.expiry is None or not spec.expiry.max_bytes:
        return NO_LIMIT
    if spec.admission is None or spec.admission.table or spec.admission.counter != "exact":
        return NO_LIMIT
    return _rows_within(_candidate_bytes_of_shard(spec), VALUE_BYTES * CANDIDATE.stride)


def _bytes_of_shard(spec: TableSpec) -> int:
    return -(-(spec.expiry.max_bytes if spec.expiry else 0) // spec.num_shards)


def _candidate_bytes_of_shard(spec: TableSpec) -> int:
    admission = spec.admission
    if admission is None or admission.table:
        return 0
    if admission.counter == "bloom":
        return counter_bytes_of_shard(admission, spec.num_shards)
    return _bytes_of_shard(spec) // CANDIDATES_SHARE


def _beside_candidates(spec: TableSpec) -> str:
    count_bytes = spec.num_shards * _candidate_bytes_of_shard(spec)
    return f", beside {count_bytes} bytes for keys without one" if count_bytes else ""


def _rows_within(size_bytes: int, row_bytes: int) -> int:
    most, slots = 0, INITIAL_SLOTS
    while SLOT_BYTES * slots < size_bytes:
        fitting = (size_bytes - SLOT_BYTES * slots) // row_bytes
        most = max(most, min(fitting, MAX_LOAD_PERCENT * slots // 100))
        slots *= 2
    return most


def evict_rows(regions: RowRegions, shard: int, spec: TableSpec) -> int:
    """Removes one of 16 rows of a shard, which must be locked and not empty; returns their number."""
    count = -(-int(regions.num_rows[shard]) // EVICTED_SHARE)
    regions.remove_rows(shard, _least(regions, shard, spec, count))
    return count


def _least(regions: RowRegions, shard: int, spec: TableSpec, count: int) -> NDArray[np.uint8]:
    rows = regions.rows_of(shard)
    worth = np.empty(rows.stop - rows.start)
    if spec.expiry is not None and spec.expiry.evict == "score":
        statistics = spec.statistics or StatisticsSpec()
        nonclk_coeff = np.float32(statistics.nonclk_coeff)
        click_coeff = np.float32(statistics.click_coeff)
        _score_rows(regions.arrays, rows.start, nonclk_coeff, click_coeff, worth)
    else:
        _date_rows(regions.arrays, rows.start, worth)
    limit = np.partition(worth, count - 1)[count - 1]
    to_remove = np.asarray(worth < limit, np.uint8)
    equals = np.flatnonzero(worth == limit)
    scrambled = regions.arrays.keys[rows, 0][equals] * _SCRAMBLE
    to_remove[equals[np.argsort(scrambled)[: count - np.count_nonzero(to_remove)]]] = 1
    return to_remove


@kernel
def _score_rows(
    table: TableArrays,
    first_row: int,
    nonclk_coeff: np.float32,
    click_coeff: np.float32,
    out: NDArray[np.float64],
) -> None:
    for i in range(out.size):
        row, column = first_row + i, table.statistics_column
        show, click = table.slab[row, column + SHOW], table.slab[row, column + CLICK]
        out[i] = score_of(nonclk_coeff, click_coeff, show, click)


@kernel
def _date_rows(table: TableArrays, first_row: int, out: NDArray[np.float64]) -> None:
    bits = table.slab.view(np.uint32)
    for i in range(out.size):
        out[i] = np.float64(bits[first_row + i, table.statistics_column + LAST_SEEN])
