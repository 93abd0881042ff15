"""What a row counts: how often its key was shown and clicked, and since when it was not.

    statistics = | show: float32 | click: float32 | unseen: float32 | last seen: uint32 |

show        occurrences of the key, each pass worth `decay` of the next
click       those in examples that were clicked, likewise
unseen      passes since the key was last pushed: a shrink adds 1, a push sets it to 0
last seen   when it was last pushed, in seconds since 1970; the bits of a uint32 in a float32 column
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from protos.gradients import Values
from protos.runtime.jit import kernel
from protos.spec import StatisticsSpec
from ps_server.table.memory.intrinsics import Int
from ps_server.table.memory.layout import STATISTICS_WIDTH

SHOW, CLICK, UNSEEN, LAST_SEEN = range(STATISTICS_WIDTH)

Clock = Callable[[], float]
"""Returns seconds since 1970; a table is given one."""

wall_clock: Clock = time.time


def seconds_of(clock: Clock) -> np.uint32:
    """Returns the whole seconds of a clock as a row keeps them."""
    return np.uint32(min(max(0, int(clock())), 2**32 - 1))


def unknown_statistics(num_rows: int, width: int, now: np.uint32) -> Values:
    """Returns the statistics float32[N, width] of rows that come without: nothing counted, seen just now.

    Without the second, a table with a time to live would remove at once what it was loaded with.
    """
    statistics = np.zeros((num_rows, width), np.float32)
    if width:
        statistics.view(np.uint32)[:, LAST_SEEN] = now
    return statistics


@kernel
def count_push(
    slab: Values,
    bits: NDArray[np.uint32],
    first: Int,
    occurrences: np.uint32,
    clicks: np.uint32,
    now: np.uint32,
) -> None:
    """Adds a push to a row's statistics.

    Args:
        slab: float32[n], rows of all shards.
        bits: uint32[n], the same memory.
        first: Where in it the row's statistics begin.
        occurrences: Of the row's key.
        clicks: Those that were clicked.
        now: The time.
    """
    slab[first + SHOW] += np.float32(occurrences)
    slab[first + CLICK] += np.float32(clicks)
    slab[first + UNSEEN] = np.float32(0.0)
    bits[first + LAST_SEEN] = now


def scores_of(statistics: Values, spec: StatisticsSpec) -> NDArray[np.float64]:
    """Returns what rows with `statistics` float32[N, 4] are worth, float64[N]: `score_of`, more exactly."""
    with np.errstate(invalid="ignore"):  # what is no number gives a score that is none
        show, click = statistics[:, [SHOW, CLICK]].T.astype(np.float64)
        scores: NDArray[np.float64] = spec.nonclk_coeff * (show - click) + spec.click_coeff * click
    return scores


@kernel
def score_of(
    nonclk_coeff: np.float32, click_coeff: np.float32, show: np.float32, click: np.float32
) -> np.float32:
    """Returns what shows and clicks are worth."""
    return nonclk_coeff * (show - click) + click_coeff * click
