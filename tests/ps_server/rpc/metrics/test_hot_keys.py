"""Hot keys, by pulls in which the shares of keys are known."""

import numpy as np
import pytest

from ctr_ps.protos.keys import Keys
from ctr_ps.ps_server.rpc.metrics.hot_keys import EVERY, MOST_CANDIDATES, HotKeys

HOT = np.array([3, 5, 2**64 - 1], np.uint64)


def pulls_of(shares: list[float], num_cold: int, number: int, seed: int = 0) -> list[Keys]:
    """Returns pulls of unique keys: each of HOT in its share of them, and others that hardly come again."""
    rng = np.random.default_rng(seed)
    pulls = []
    for _ in range(number):
        hot = HOT[rng.random(HOT.size) < shares]
        pulls.append(
            rng.permutation(np.concatenate([hot, rng.integers(10, 2**63, num_cold, np.uint64)]))
        )
    return pulls


def told(found: HotKeys, pulls: list[Keys], times: int) -> None:
    """Has each of some pulls looked at, so many times, and those in between not."""
    for number in range(times):
        found._until_next = 0
        found.pulled({"t": pulls[number % len(pulls)]})


@pytest.mark.parametrize("num_cold", [50, 200, 5_000, 20_000])
def test_hot_keys_are_found_with_their_shares_among_few_and_many(num_cold: int) -> None:
    found = HotKeys()
    told(found, pulls_of([1.0, 0.5, 0.25], num_cold, 60), 60)
    told(
        found, pulls_of([1.0, 0.5, 0.25], num_cold, 400 if num_cold < 5_000 else 60, seed=1), 1_500
    )

    shares = {key: share for _, key, share in found.hottest(10)}

    assert shares[3] == pytest.approx(1.0, abs=0.05)
    assert max(shares, key=lambda key: shares[key]) == 3
    if num_cold < 5_000:  # pulls that come again make their cold keys warm
        assert [*shares][:3] == HOT.tolist()
        assert shares[5] == pytest.approx(0.5, abs=0.1)
        assert shares[2**64 - 1] == pytest.approx(0.25, abs=0.1)


def test_hottest_keys_are_those_of_all_tables() -> None:
    found, keys = HotKeys(), np.arange(3, dtype=np.uint64)
    for number in range(10):
        found._until_next = 0
        found.pulled({"half": keys if number % 2 else keys + 4, "each": keys})

    assert [table for table, _, _ in found.hottest(3)] == ["each"] * 3


def test_cold_keys_are_not_shown() -> None:
    found = HotKeys()

    told(found, pulls_of([0, 0, 0], 5_000, 50), 50)

    assert found.hottest(10) == []


def test_keys_that_are_no_longer_hot_are_overtaken() -> None:
    found = HotKeys()
    told(found, pulls_of([1.0, 0.0, 0.0], 200, 200), 200)
    told(found, pulls_of([0.0, 1.0, 0.0], 200, 1_000, seed=1), 1_000)

    (_, first, share), *rest = found.hottest(10)

    assert (first, share > 0.9) == (5, True)
    assert {key: share for _, key, share in rest}.get(3, 0.0) < 0.2


def test_one_pull_in_so_many_is_looked_at_and_fewer_of_large_ones() -> None:
    found, keys = HotKeys(), np.arange(3, dtype=np.uint64)
    for number in range(3 * EVERY):
        found.pulled({"first" if number % EVERY == 0 else "between": keys})
    assert {table for table, _, _ in found.hottest(10)} == {"first"}

    found = HotKeys()
    found.pulled({"large": np.arange(20_000, dtype=np.uint64), "empty": keys[:0]})

    assert found._until_next == 10 * EVERY - 1


def test_memory_is_bounded() -> None:
    found = HotKeys()

    told(found, pulls_of([0, 0, 0], 1_000, 100), 300)

    assert found._tables["t"][0].size <= MOST_CANDIDATES
