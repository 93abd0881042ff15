"""Expiry: a shrink ends a pass, ages all rows and removes those that expired by the table's rules.

Each row is aged first, then checked:

    show, click = decay * show, decay * click                          unseen = unseen + 1
    score = nonclk_coeff * (show - click) + click_coeff * click

    removed:  score < delete_threshold   or   unseen > max_unseen   or   last seen < now - ttl_s

The formulas are those of CtrCommonAccessor in PaddlePaddle's parameter server, where a pass is a day; the
time to live is from DeepRec and TFRA. A shrink can also remove rows with a small norm.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import StatisticsSpec, TableSpec
from ctr_ps.protos.store import Shrunk
from ctr_ps.ps_server.table.memory.hash_index import TableArrays
from ctr_ps.ps_server.table.memory.intrinsics import Int
from ctr_ps.ps_server.table.memory.layout import KEY_COLUMNS
from ctr_ps.ps_server.table.rows.regions import RowRegions
from ctr_ps.ps_server.table.rows.statistics import CLICK, LAST_SEEN, SHOW, UNSEEN, score_of


class ExpiryRule(NamedTuple):
    """The rules of a shrink, as kernels see them.

    Attributes:
        decay: Factor of shows and clicks.
        nonclk_coeff: Weight of a show without a click in the score.
        click_coeff: Weight of a click in the score.
        delete_threshold: Rows with a lower score are removed; -inf: none.
        max_unseen: Rows unseen for more passes are removed; inf: none.
        seen_since: Rows last seen before are removed, in seconds since 1970; -inf: none.
        max_norm: Rows whose weights have an L2 norm of at most this are removed; -1: none.
        is_dry_run: Whether to leave statistics as they are.
    """

    decay: np.float32
    nonclk_coeff: np.float32
    click_coeff: np.float32
    delete_threshold: np.float32
    max_unseen: float
    seen_since: float
    max_norm: float
    is_dry_run: bool


def expiry_rule(
    spec: TableSpec, *, now: int, max_norm: float | None, is_dry_run: bool
) -> ExpiryRule:
    """Returns the rules of a shrink of a table at time `now`, in seconds since 1970."""
    statistics, expiry = spec.statistics or StatisticsSpec(), spec.expiry
    return ExpiryRule(
        decay=np.float32(statistics.decay),
        nonclk_coeff=np.float32(statistics.nonclk_coeff),
        click_coeff=np.float32(statistics.click_coeff),
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
    return shrunk


@kernel
def _has_expired(
    rule: ExpiryRule, show: np.float32, click: np.float32, unseen: np.float32, last_seen: np.uint32
) -> bool:
    score = score_of(rule.nonclk_coeff, rule.click_coeff, show, click)
    is_unseen = unseen > rule.max_unseen or np.float64(last_seen) < rule.seen_since
    return bool(score < rule.delete_threshold or is_unseen)


@kernel
def _norm_of(table: TableArrays, row: Int, dim: int) -> float:
    squares = 0.0
    for j in range(dim):
        weight = np.float64(table.slab[row, KEY_COLUMNS + j])
        squares += weight * weight
    return math.sqrt(squares)


@kernel
def _age_rows(
    table: TableArrays, shard: Int, dim: int, rule: ExpiryRule, to_remove: NDArray[np.uint8]
) -> int:
    """Ages a shard's rows in place, unless in a dry run, and marks expired ones with 1 in `to_remove`.

    Returns their number. `to_remove` is uint8[rows of the shard].
    """
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
