"""Estimates of how often keys occurred: never too low, and seldom too high."""

import math

import numpy as np
import pytest

from ctr_ps.protos.keys import Keys, mix64
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.feature_life.admission import (
    CountingBloomFilter,
    FilterArrays,
    FilterSettings,
    estimate,
    filter_shape,
    raise_to,
)

NUM_SHARDS = 4


def filter_of(
    expected_keys: int, rate: float = 0.01, max_count: int = 3, shards: range = range(NUM_SHARDS)
) -> CountingBloomFilter:
    settings = FilterSettings(expected_keys, rate, max_count)
    return CountingBloomFilter(settings, num_shards=NUM_SHARDS, shards=shards)


@kernel
def add(filter_: FilterArrays, keys: Keys, num_shards: int, count: int) -> None:
    for key in keys:
        shard, hashed = np.int64(shard_of(key, num_shards)), mix64(key)
        sum_ = min(estimate(filter_, shard, hashed) + count, np.int64(filter_.limit))
        raise_to(filter_, shard, hashed, sum_)


@kernel
def estimates(filter_: FilterArrays, keys: Keys, num_shards: int) -> np.ndarray:
    out = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        out[i] = estimate(filter_, np.int64(shard_of(keys[i], num_shards)), mix64(keys[i]))
    return out


def random_keys(count: int, seed: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


@pytest.mark.parametrize("rate", [0.1, 0.01, 0.001])
def test_rate_of_false_positives_is_what_was_asked_for(rate: float) -> None:
    filter_ = filter_of(50_000, rate)
    add(filter_.arrays, random_keys(50_000, seed=0), NUM_SHARDS, 1)

    strangers = estimates(filter_.arrays, random_keys(200_000, seed=1), NUM_SHARDS)

    # Of 200,000 trials at a rate of 0.001 the standard deviation is 7 % of the mean.
    assert 0.6 * rate < np.mean(strangers > 0) < 1.4 * rate


def test_estimates_are_never_below_the_truth_and_seldom_above() -> None:
    filter_ = filter_of(20_000, max_count=300)
    keys = random_keys(20_000, seed=0)
    occurrences = np.random.default_rng(1).integers(1, 6, keys.size)
    for round_ in range(1, 6):
        add(filter_.arrays, keys[occurrences >= round_], NUM_SHARDS, 1)

    found = estimates(filter_.arrays, keys, NUM_SHARDS)

    assert np.all(found >= occurrences)
    assert np.mean(found > occurrences) < 0.02


def test_keys_that_disturb_each_other_are_raised_no_further_than_needed() -> None:
    """Conservative update: in a filter far too small, few keys that occurred once count three."""
    filter_ = filter_of(1000)
    keys = random_keys(3000, seed=0)
    add(filter_.arrays, keys, NUM_SHARDS, 1)

    found = estimates(filter_.arrays, keys, NUM_SHARDS)

    assert np.mean(found >= 3) < 0.05


def test_memory_is_what_the_formula_says() -> None:
    filter_ = filter_of(40_000, 0.01)

    num_counters = math.ceil(10_000 * -math.log(0.01) / math.log(2) ** 2)

    assert filter_shape(10_000, 0.01) == (num_counters, 7)
    assert filter_.arrays.counters.shape == (NUM_SHARDS, num_counters)
    assert filter_.size_bytes == NUM_SHARDS * num_counters


def test_server_counts_the_memory_of_its_own_shards() -> None:
    assert 2 * filter_of(1000, shards=range(1, 4, 2)).size_bytes == filter_of(1000).size_bytes


@pytest.mark.parametrize(("max_count", "limit"), [(255, 255), (256, 65535)])
def test_counters_are_as_wide_as_counts_need_and_saturate(max_count: int, limit: int) -> None:
    filter_ = filter_of(10, max_count=max_count)
    keys = random_keys(3, seed=0)

    for _ in range(3):
        add(filter_.arrays, keys, NUM_SHARDS, 30_000)
        assert estimates(filter_.arrays, keys, NUM_SHARDS).tolist() == [min(30_000, limit)] * 3
        limit_next = min(60_000, limit)
        add(filter_.arrays, keys, NUM_SHARDS, 30_000)
        assert estimates(filter_.arrays, keys, NUM_SHARDS).tolist() == [limit_next] * 3
        add(filter_.arrays, keys, NUM_SHARDS, 30_000)
        assert estimates(filter_.arrays, keys, NUM_SHARDS).tolist() == [limit] * 3
        filter_.arrays.counters[:] = 0


def test_decay_keeps_the_mean_and_is_the_same_everywhere() -> None:
    one, other = filter_of(100_000), filter_of(100_000)
    for each in (one, other):
        each.arrays.counters[:] = 10
        for _ in range(5):
            for shard in range(NUM_SHARDS):
                each.decay(shard, 0.9)

    counters = one.arrays.counters
    np.testing.assert_array_equal(counters, other.arrays.counters)
    assert counters.mean() == pytest.approx(10 * 0.9**5, rel=0.01)
    assert counters.std() > 0.5


def test_counts_of_one_are_forgotten_at_last() -> None:
    filter_ = filter_of(1000)
    filter_.arrays.counters[0] = 1
    for _ in range(100):
        filter_.decay(0, 0.9)

    assert not filter_.arrays.counters.any()
