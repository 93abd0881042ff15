"""Statistics of a row: shows and clicks of its key, and when it was last seen.

    statistics = | show: float32 | click: float32 | unseen: float32 | last seen: uint32 |

show        occurrences of the key, multiplied by `decay` at the end of each pass
click       occurrences in clicked examples, likewise
unseen      passes since the key was last pushed: a shrink adds 1, a push sets it to 0
last seen   time of the last push, in seconds since 1970; the bits of a uint32 in a float32 column
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.ps_server.table.memory.hash_index import STATISTICS_WIDTH
from ctr_ps.ps_server.table.memory.intrinsics import Int

SHOW, CLICK, UNSEEN, LAST_SEEN = range(STATISTICS_WIDTH)

Clock = Callable[[], float]
"""Returns seconds since 1970."""

wall_clock: Clock = time.time


def seconds_of(clock: Clock) -> np.uint32:
    """Returns the whole seconds of a clock, as rows store them."""
    return np.uint32(min(max(0, int(clock())), 2**32 - 1))


def unknown_statistics(num_rows: int, width: int, now: np.uint32) -> Values:
    """Returns statistics float32[N, width] for rows loaded without: no shows or clicks, last seen now.

    Last seen at 0, a table with a time to live would remove at once all rows that it loaded.
    """
    statistics = np.zeros((num_rows, width), np.float32)
    if width:
        statistics.view(np.uint32)[:, LAST_SEEN] = now
    return statistics


class Coefficients(NamedTuple):
    """Weights in a score, as kernels see them: of a show without a click, and of a click."""

    nonclk_coeff: np.float32
    click_coeff: np.float32


def coefficients_of(spec: StatisticsSpec | None) -> Coefficients:
    """Returns the weights in the scores of a table; None: the usual ones."""
    spec = spec or StatisticsSpec()
    return Coefficients(np.float32(spec.nonclk_coeff), np.float32(spec.click_coeff))


@kernel
def count_push(
    slab: Values,
    bits: NDArray[np.uint32],
    first: Int,
    occurrences: np.uint32,
    clicks: np.uint32,
    now: np.uint32,
) -> None:
    """Adds a push to a row's statistics, at `first` of the slab; `bits` uint32[n] is the same memory."""
    slab[first + SHOW] += np.float32(occurrences)
    slab[first + CLICK] += np.float32(clicks)
    slab[first + UNSEEN] = np.float32(0.0)
    bits[first + LAST_SEEN] = now


def scores_of(
    statistics: Values, spec: StatisticsSpec, dtype: type[np.float32 | np.float64] = np.float64
) -> NDArray[Any]:
    """Returns the scores, `dtype`[N], of rows with `statistics` float32[N, 4]: `score_of` in that dtype."""
    with np.errstate(invalid="ignore"):  # NaN in statistics gives a score of NaN
        show, click = statistics[:, [SHOW, CLICK]].T.astype(dtype)
        scores: NDArray[Any] = (
            dtype(spec.nonclk_coeff) * (show - click) + dtype(spec.click_coeff) * click
        )
    return scores


@kernel
def score_of(coefficients: Coefficients, show: np.float32, click: np.float32) -> np.float32:
    """Returns the score of a key with these shows and clicks."""
    return coefficients.nonclk_coeff * (show - click) + coefficients.click_coeff * click
