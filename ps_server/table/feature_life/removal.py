"""Removal of rows: at a shrink those that expired, and in a full shard those that others evict.

A shrink ends a pass. Each row is aged first, then checked:

    show, click = decay * show, decay * click                          unseen = unseen + 1
    score = nonclk_coeff * (show - click) + click_coeff * click

    removed:  score < delete_threshold   or   unseen > max_unseen   or   last seen < now - ttl_s

The formulas are those of CtrCommonAccessor in PaddlePaddle's parameter server, where a pass is a day; the
time to live is from DeepRec and TFRA. A shrink can also remove rows with a small norm.

A shard that has reached the table's limit loses 1 of 16 of its rows, to make room for new ones. Its limit is
its part of the table's, rounded up. Evicted are the rows that were last seen longest ago, or those with the
lowest score; among equals those with the smallest scrambled keys. So the choice depends on the pushes to the
shard, and not on the number of servers.
"""

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import ExpirySpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Shrunk
from ctr_ps.ps_server.table.feature_life.admission import counter_bytes_of_shard
from ctr_ps.ps_server.table.memory.bfloat16 import widened
from ctr_ps.ps_server.table.memory.hash_index import (
    INITIAL_SLOTS,
    KEY_COLUMNS,
    MAX_LOAD_PERCENT,
    STATISTICS_WIDTH,
    RowLayout,
    TableArrays,
    bfloat16_of,
)
from ctr_ps.ps_server.table.memory.intrinsics import Int
from ctr_ps.ps_server.table.rows.regions import (
    NO_LIMIT,
    SLOT_BYTES,
    VALUE_BYTES,
    RowRegions,
    layout_of,
)
from ctr_ps.ps_server.table.rows.statistics import (
    CLICK,
    LAST_SEEN,
    SHOW,
    UNSEEN,
    Coefficients,
    coefficients_of,
    score_of,
    scores_of,
)

EVICTED_SHARE = 16  # an eviction removes one row in this number: it costs a pass over the shard

CANDIDATES_SHARE = 4
"""One byte in this number of a table's `max_bytes` is for candidates, if they are counted exactly."""

CANDIDATE = RowLayout(dim=0, state_width=0, statistics_width=STATISTICS_WIDTH)

_SCRAMBLE = np.uint64(0x9E3779B97F4A7C15)


class ExpiryRule(NamedTuple):
    """The rules of a shrink, as kernels see them."""

    decay: np.float32  # factor of shows and clicks
    coefficients: Coefficients  # of the score
    delete_threshold: np.float32  # rows with a lower score are removed; -inf: none
    max_unseen: float  # rows unseen for more passes are removed; inf: none
    seen_since: float  # rows last seen before are removed, in seconds since 1970; -inf: none
    max_norm: float  # rows whose weights have an L2 norm of at most this are removed; -1: none
    is_dry_run: bool  # whether to leave statistics as they are


def expiry_rule(
    spec: TableSpec, *, now: int, max_norm: float | None, is_dry_run: bool
) -> ExpiryRule:
    """Returns the rules of a shrink of a table at time `now`, in seconds since 1970."""
    statistics, expiry = spec.statistics or StatisticsSpec(), spec.expiry
    return ExpiryRule(
        decay=np.float32(statistics.decay),
        coefficients=coefficients_of(spec.statistics),
        delete_threshold=np.float32((expiry and expiry.delete_threshold) or -math.inf),
        max_unseen=float((expiry and expiry.max_unseen) or math.inf),
        seen_since=now - expiry.ttl_s if expiry and expiry.ttl_s else -math.inf,
        max_norm=-1.0 if max_norm is None else float(max_norm),
        is_dry_run=is_dry_run,
    )


def shrink_shard(regions: RowRegions, shard: int, dim: int, rule: ExpiryRule) -> Shrunk:
    """Ages the rows of a shard, which must be locked, and removes expired ones."""
    to_remove = np.empty(int(regions.num_rows[shard]), np.uint8)
    count = _age_rows(regions.arrays, shard, dim, rule, to_remove)
    shrunk = Shrunk(
        rows=count,
        size_bytes=regions.freed_bytes(shard, count),
        left_rows=to_remove.size - count,
    )
    if not rule.is_dry_run:
        regions.remove_rows(shard, to_remove)
        regions.mark_for_move(shard)  # all of them have aged
    return shrunk


@kernel
def _has_expired(
    rule: ExpiryRule, show: np.float32, click: np.float32, unseen: np.float32, last_seen: np.uint32
) -> bool:
    score = score_of(rule.coefficients, show, click)
    is_unseen = unseen > rule.max_unseen or np.float64(last_seen) < rule.seen_since
    return bool(score < rule.delete_threshold or is_unseen)


@kernel
def _norm_of(table: TableArrays, row: Int, dim: int) -> float:
    squares = 0.0
    for j in range(dim):
        if table.is_bfloat16:
            weight = widened(bfloat16_of(table, row, dim)[j])
        else:
            weight = table.slab[row, KEY_COLUMNS + j]
        squares += np.float64(weight) * np.float64(weight)
    return math.sqrt(squares)


@kernel
def _age_rows(
    table: TableArrays, shard: Int, dim: int, rule: ExpiryRule, to_remove: NDArray[np.uint8]
) -> int:
    """Ages a shard's rows, unless in a dry run; marks expired ones in `to_remove`, returns their number."""
    slab = table.slab.reshape(-1)
    bits = slab.view(np.uint32)
    count = 0
    for row_in_shard in range(table.num_rows[shard]):
        row = shard * table.region_rows + row_in_shard
        expired = rule.max_norm >= 0.0 and _norm_of(table, row, dim) <= rule.max_norm
        if table.statistics_column:
            first = row * table.slab.shape[1] + table.statistics_column
            show, click = slab[first + SHOW] * rule.decay, slab[first + CLICK] * rule.decay
            unseen = slab[first + UNSEEN] + np.float32(1.0)
            expired = expired or _has_expired(rule, show, click, unseen, bits[first + LAST_SEEN])
            if not rule.is_dry_run:
                slab[first + SHOW], slab[first + CLICK] = show, click
                slab[first + UNSEEN] = unseen
        to_remove[row_in_shard] = expired
        count += expired
    return count


def max_rows_of_shard(spec: TableSpec) -> int:
    """Returns a shard's limit of rows; raises SpecError if it leaves no room for a row in each shard."""
    expiry = spec.expiry
    if expiry is None:
        return NO_LIMIT
    rows = _max_rows(spec, expiry)
    if not rows or not max_candidates_of_shard(spec):
        count_bytes = spec.num_shards * _candidate_bytes_of_shard(spec)
        beside = f" beside {count_bytes} bytes of counts" if count_bytes else ""
        raise SpecError(
            f"table {spec.name!r} has max_bytes {expiry.max_bytes}, too few for one row in each of its "
            f"{spec.num_shards} shards{beside}: set at least {_fewest_bytes(spec, expiry)}"
        )
    return rows


def _max_rows(spec: TableSpec, expiry: ExpirySpec) -> int:
    limits = [NO_LIMIT]
    if expiry.max_rows:
        limits.append(-(-expiry.max_rows // spec.num_shards))
    if expiry.max_bytes:
        share = _bytes_of_shard(spec) - _candidate_bytes_of_shard(spec)
        limits.append(_rows_within(share, VALUE_BYTES * layout_of(spec).stride))
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


def _rows_within(size_bytes: int, row_bytes: int) -> int:
    most, slots = 0, INITIAL_SLOTS
    while SLOT_BYTES * slots < size_bytes:
        fitting = (size_bytes - SLOT_BYTES * slots) // row_bytes
        most = max(most, min(fitting, MAX_LOAD_PERCENT * slots // 100))
        slots *= 2
    return most


def drop_all(regions: RowRegions, shard: int) -> None:
    """Removes all rows of a shard, which must be locked."""
    regions.remove_rows(shard, np.ones(int(regions.num_rows[shard]), np.uint8))


def evict_rows(regions: RowRegions, shard: int, spec: TableSpec) -> int:
    """Removes one of 16 rows of a shard, which must be locked and not empty; returns their number."""
    count = -(-int(regions.num_rows[shard]) // EVICTED_SHARE)
    rows = regions.rows_of(shard)
    statistics = regions.arrays.slab[rows, regions.layout.statistics]
    worth: NDArray[Any] = statistics.view(np.uint32)[:, LAST_SEEN]
    if spec.expiry is not None and spec.expiry.evict == "score":
        worth = scores_of(statistics, spec.statistics or StatisticsSpec(), np.float32)
    limit = np.partition(worth, count - 1)[count - 1]
    to_remove = np.asarray(worth < limit, np.uint8)
    equals = np.flatnonzero(worth == limit)
    scrambled = regions.arrays.keys[rows, 0][equals] * _SCRAMBLE
    to_remove[equals[np.argsort(scrambled)[: count - np.count_nonzero(to_remove)]]] = 1
    regions.remove_rows(shard, to_remove)
    return count
