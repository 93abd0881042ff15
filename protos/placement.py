"""Where a key lives: key -> shard -> server.

A table has `num_shards` shards, a power of two. The high bits of `mix64(key)` choose the shard (the
low bits are the index's); shard `s` lives on server `s % num_servers`.

    mix64(key) = | shard bits | ............ tag and slot of the index |

Routing by remainder keeps a shard whole on every number of servers, so checkpoints are cut by shard.
"""

import numpy as np
from numpy.typing import NDArray

from protos.errors import WrongServerError
from protos.keys import Keys, mix64, require_uint64
from protos.runtime.jit import kernel


@kernel
def shard_of(key: np.uint64, num_shards: int) -> np.uint64:
    """Returns the shard of uint64 `key`, in [0, num_shards); `num_shards` is a power of two."""
    # The high 32 bits, scaled: the same as taking the top log2(num_shards) bits.
    return ((mix64(key) >> np.uint64(32)) * np.uint64(num_shards)) >> np.uint64(32)


def shards_of_server(num_shards: int, server_index: int, num_servers: int) -> range:
    """Returns the shards that live on one server, ascending."""
    return range(server_index, num_shards, num_servers)


@kernel
def _count_by_shard(keys: Keys, num_shards: int, counts: NDArray[np.int64]) -> None:
    counts[:] = 0
    for key in keys:
        counts[shard_of(key, num_shards)] += 1


def count_by_shard(
    keys: Keys, num_shards: int, server_index: int, num_servers: int
) -> NDArray[np.int64]:
    """Returns how many of `keys` fall into each shard.

    Args:
        keys: uint64[N].
        num_shards: Shards of the table.
        server_index: The server that was asked.
        num_servers: Servers of the cluster.

    Returns:
        int64[num_shards].

    Raises:
        WrongServerError: If a key belongs to a shard of another server.
        ProtocolError: If keys are not uint64.
    """
    require_uint64(keys)
    counts = np.empty(num_shards, np.int64)
    _count_by_shard(keys, num_shards, counts)
    if num_servers > 1:
        strangers = np.flatnonzero(counts)
        strangers = strangers[strangers % num_servers != server_index]
        if strangers.size:
            shard = int(strangers[0])
            raise WrongServerError(
                f"server {server_index} of {num_servers} was sent {counts[shard]} keys of shard "
                f"{shard}, which lives on server {shard % num_servers}: client and server must "
                f"agree on the list of servers"
            )
    return counts


@kernel
def _route(
    keys: Keys,
    num_shards: int,
    num_servers: int,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
) -> None:
    owners = np.empty(keys.size, np.int32)
    starts[:] = 0
    for i in range(keys.size):
        owner = np.int32(shard_of(keys[i], num_shards) % np.uint64(num_servers))
        owners[i] = owner
        starts[owner + 1] += 1
    for server in range(num_servers):
        starts[server + 1] += starts[server]
    next_place = starts[:-1].copy()
    for i in range(keys.size):
        owner = owners[i]
        order[next_place[owner]] = i
        next_place[owner] += 1


def route(keys: Keys, num_shards: int, num_servers: int) -> list[NDArray[np.int32]]:
    """Returns, for each server, the positions of its keys in `keys`, ascending.

    Args:
        keys: uint64[N].
        num_shards: Shards of the table.
        num_servers: Servers of the cluster.

    Returns:
        One int32 array a server; together they hold each position once.

    Raises:
        ProtocolError: If keys are not uint64.
    """
    require_uint64(keys)
    starts = np.empty(num_servers + 1, np.int64)
    order = np.empty(keys.size, np.int32)
    _route(keys, num_shards, num_servers, starts, order)
    return [order[starts[server] : starts[server + 1]] for server in range(num_servers)]


def piece_of_server(length: int, server_index: int, num_servers: int) -> slice:
    """Returns the part of a dense block of `length` that lives on one server.

    The block is cut evenly: pieces differ in length by at most one.
    """
    return slice(length * server_index // num_servers, length * (server_index + 1) // num_servers)
