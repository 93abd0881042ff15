"""Hot keys, estimated from samples of pulls whose shares are known."""

import numpy as np
import pytest

from protos.keys import Keys
from ps_server.rpc.metrics.hot_keys import EVERY, MOST_KEYS, HotKeys

HOT = np.array([3, 5, 2**64 - 1], np.uint64)


def pull_of(rng: np.random.Generator, shares: list[float], num_cold: int) -> Keys:
    """Returns unique keys: each of HOT with its share, and others that hardly come again."""
    hot = HOT[rng.random(HOT.size) < shares]
    cold = rng.integers(10, 2**63, num_cold, np.uint64)
    return rng.permutation(np.concatenate([hot, cold]))


def test_hot_keys_are_found_with_about_their_shares() -> None:
    rng, found = np.random.default_rng(0), HotKeys()
    for _ in range(20_000):
        found.pulled({"t": pull_of(rng, [0.9, 0.5, 0.2], 200)})

    (_, first, share), (_, second, half), *rest = found.hottest(10)

    assert (first, second) == (3, 5)
    assert share == pytest.approx(0.9, abs=0.15)
    assert half == pytest.approx(0.5, abs=0.15)
    assert rest[0][1] == 2**64 - 1
    assert rest[0][2] > 2 * rest[1][2]


def test_keys_that_are_no_longer_hot_are_forgotten() -> None:
    rng, found = np.random.default_rng(0), HotKeys()
    for shares in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]):
        for _ in range(20_000):
            found.pulled({"t": pull_of(rng, shares, 200)})

    (_, first, share), (_, _, next_share) = found.hottest(2)

    assert first == 5
    assert share > 0.8
    assert next_share < 0.2


def test_one_pull_in_so_many_is_looked_at() -> None:
    found = HotKeys()
    keys = np.arange(3, dtype=np.uint64)
    found.pulled({"t": keys})
    for _ in range(EVERY - 1):
        found.pulled({"other": keys})
    assert {table for table, _, _ in found.hottest(10)} == {"t"}

    found.pulled({"other": keys, "empty": keys[:0]})

    assert {table for table, _, _ in found.hottest(10)} == {"t", "other"}


def test_memory_is_bounded() -> None:
    rng, found = np.random.default_rng(0), HotKeys()
    for _ in range(20_000):
        found.pulled({"t": rng.integers(0, 2**63, 64, np.uint64)})

    assert len(found.hottest(10**9)) <= MOST_KEYS
