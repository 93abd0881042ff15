"""Shards come out in order, and never many at once."""

import threading
from contextlib import closing

import pytest

from ps_server.checkpoint.files.encoding import encoded_in_order

LIMIT_S = 10.0


def test_results_come_in_the_order_of_the_shards() -> None:
    """Also when a later one is ready first."""
    is_second_done = threading.Event()

    def encode(shard: int) -> int:
        if shard == 0:
            assert is_second_done.wait(LIMIT_S)
        if shard == 1:
            is_second_done.set()
        return 10 * shard

    assert list(encoded_in_order(encode, range(5), encoders=2)) == [0, 10, 20, 30, 40]


def test_no_more_than_one_shard_beside_those_in_the_making_is_begun() -> None:
    begun: list[int] = []
    may_end = threading.Semaphore(0)

    def encode(shard: int) -> int:
        begun.append(shard)
        assert may_end.acquire(timeout=LIMIT_S)
        return shard

    with closing(encoded_in_order(encode, range(100), encoders=3)) as encoded:
        may_end.release(100)
        for number, _ in enumerate(encoded):
            assert len(begun) <= number + 4
    assert begun == sorted(begun)
    assert len(begun) == 100


def test_error_of_one_shard_ends_it() -> None:
    begun: list[int] = []

    def encode(shard: int) -> int:
        begun.append(shard)
        if shard == 3:
            raise KeyError(shard)
        return shard

    encoded = encoded_in_order(encode, range(100), encoders=2)
    with pytest.raises(KeyError):
        list(encoded)

    assert len(begun) <= 6


def test_who_stops_early_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    encoded = encoded_in_order(lambda shard: shard, range(100), encoders=2)
    next(encoded)

    encoded.close()

    assert threading.active_count() == before


def test_no_shards_are_nothing() -> None:
    assert list(encoded_in_order(lambda shard: shard, [])) == []
