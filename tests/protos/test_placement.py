"""Keys to shards to servers, and dense blocks to pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError, WrongServerError
from ctr_ps.protos.keys import mix64
from ctr_ps.protos.placement import FIRST_EPOCH, NO_SERVER, ONE_SERVER, ShardMap, shard_of
from tests.reference import partition as reference

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=60)
NUM_SHARDS = st.sampled_from([1, 2, 64, 4096])
NUM_SERVERS = st.integers(1, 9)


def test_hash_equals_the_first_outputs_of_splitmix64() -> None:
    """Of the generator started at 0, as published with it."""
    states = [np.uint64(n * 0x9E3779B97F4A7C15 & reference.MASK) for n in (1, 2, 3)]

    outputs = [int(mix64(state)) for state in states]

    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(key=st.integers(0, 2**64 - 1))
def test_hash_can_be_undone(key: int) -> None:
    """So no two keys share one: collisions in tag and slot are all there can be."""
    assert reference.unmix64(int(mix64(np.uint64(key)))) == key


@given(key=st.integers(0, 2**64 - 1), num_shards=NUM_SHARDS)
def test_shard_is_the_high_bits_of_the_hash(key: int, num_shards: int) -> None:
    shard = int(shard_of(np.uint64(key), num_shards))

    assert shard == reference.shard_of(key, num_shards)
    assert 0 <= shard < num_shards


@given(keys=KEYS, num_shards=NUM_SHARDS)
def test_counts_agree_with_the_shard_of_each_key(keys: list[int], num_shards: int) -> None:
    counts = ONE_SERVER.count_by_shard(np.array(keys, np.uint64), num_shards, 0)

    shards = [reference.shard_of(key, num_shards) for key in keys]
    assert counts.tolist() == np.bincount(np.array(shards, int), minlength=num_shards).tolist()


@given(keys=KEYS, num_shards=NUM_SHARDS, num_servers=NUM_SERVERS)
def test_each_position_is_routed_once_to_the_owner_of_its_key(
    keys: list[int], num_shards: int, num_servers: int
) -> None:
    routes = ShardMap.of(num_servers).route(np.array(keys, np.uint64), num_shards)

    expected: list[list[int]] = [[] for _ in range(num_servers)]
    for position, key in enumerate(keys):
        expected[reference.server_of(key, num_shards, num_servers)].append(position)
    assert [positions.tolist() for positions in routes] == expected


def test_key_of_another_server_is_refused_by_shard_and_owner() -> None:
    key = np.array([reference.unmix64(5 << 58)], np.uint64)  # shard 5 of 64, on server 2 of 3

    with pytest.raises(
        WrongServerError, match=r"server 1 of 3 received 1 key of shard 5.*server 2"
    ):
        ShardMap.of(3).count_by_shard(key, 64, 1)


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint32"])
def test_keys_of_another_type_are_refused(dtype: str) -> None:
    """A signed shift scrambles differently, so they would land in another shard."""
    keys = np.array([1, 2, 3], dtype)

    with pytest.raises(ProtocolError, match=f"{dtype}.*uint64"):
        ONE_SERVER.count_by_shard(keys, 64, 0)
    with pytest.raises(ProtocolError, match=f"{dtype}.*uint64"):
        ShardMap.of(2).route(keys, 64)


@given(num_shards=NUM_SHARDS, num_servers=NUM_SERVERS)
def test_servers_share_the_shards(num_shards: int, num_servers: int) -> None:
    shard_map = ShardMap.of(num_servers)
    held = [shard_map.shards_of(server, num_shards) for server in shard_map.servers]

    assert sorted(shard for shards in held for shard in shards) == list(range(num_shards))
    assert all(
        shard_map.server_of(shard) == server == shard % 1024 % num_servers
        for server in shard_map.servers
        for shard in held[server]
    )


@given(length=st.integers(0, 10**12), num_servers=st.integers(1, 100))
def test_pieces_cover_a_block_evenly(length: int, num_servers: int) -> None:
    shard_map = ShardMap.of(num_servers)
    pieces = [shard_map.piece_of(server, length) for server in shard_map.servers]

    bounds = [piece.start for piece in pieces] + [length]
    assert [piece.stop for piece in pieces] == bounds[1:]
    assert bounds[0] == 0
    lengths = np.diff(bounds)
    assert lengths.min() >= 0
    assert lengths.max() - lengths.min() <= 1


def test_request_that_another_map_placed_is_refused_with_both_epochs() -> None:
    shard_map = ShardMap.of(3)

    shard_map.require_epoch(FIRST_EPOCH, server=1)
    for epoch in (0, FIRST_EPOCH + 1):
        with pytest.raises(
            WrongServerError,
            match=rf"of epoch {epoch}, but the map of server 1 of 3 is of epoch {FIRST_EPOCH}: connect",
        ):
            shard_map.require_epoch(epoch, server=1)
    with pytest.raises(WrongServerError, match="the map of spare server is of epoch"):
        shard_map.require_epoch(0, NO_SERVER)
