"""Placement: key -> shard -> server.

A table has `num_shards` shards, a power of two. The high bits of `mix64(key)` choose the shard (the
low bits are the index's); a shard map says which server has it: shard `s` lives on server `s % num_servers`.

    mix64(key) = | shard bits | ............ tag and slot of the index |

Routing by remainder keeps a shard whole on every number of servers, so checkpoints are split by shard.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import WrongServerError, counted
from ctr_ps.protos.keys import Keys, mix64, require_uint64
from ctr_ps.protos.runtime.jit import kernel

FIRST_EPOCH = 1  # not 0, which a request without an epoch has


@kernel
def shard_of(key: np.uint64, num_shards: int) -> np.uint64:
    """Returns the shard of uint64 `key`, in [0, num_shards); `num_shards` is a power of two."""
    # The high 32 bits, scaled: the same as taking the top log2(num_shards) bits.
    return ((mix64(key) >> np.uint64(32)) * np.uint64(num_shards)) >> np.uint64(32)


@kernel
def _count_by_shard(keys: Keys, num_servers: int, server: int, counts: NDArray[np.int64]) -> int:
    """Overwrites `counts` by shard; returns a shard of another server that has keys, or -1."""
    counts[:] = 0
    for key in keys:
        counts[shard_of(key, counts.size)] += 1
    for shard in range(counts.size):
        if counts[shard] and shard % num_servers != server:
            return shard
    return -1


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


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Placement of shards, pieces of dense blocks and mailboxes on the servers of a cluster.

    `epoch` numbers the maps from 1. Pulls and pushes carry it, and a server refuses another one.
    """

    epoch: int
    num_servers: int

    @classmethod
    def of(cls, num_servers: int) -> Self:
        """Returns the first map of a cluster."""
        return cls(FIRST_EPOCH, num_servers)

    @property
    def servers(self) -> range:
        """Indices of the servers."""
        return range(self.num_servers)

    def server_of(self, shard: int) -> int:
        """Returns the server of a shard."""
        return shard % self.num_servers

    def shards_of(self, server: int, num_shards: int) -> range:
        """Returns the shards of one server, ascending."""
        return range(server, num_shards, self.num_servers)

    def piece_of(self, server: int, length: int) -> slice:
        """Returns a server's piece of a dense block; lengths differ by at most one."""
        return slice(length * server // self.num_servers, length * (server + 1) // self.num_servers)

    def server_of_receiver(self, worker: int) -> int:
        """Returns the one server of a worker's messages, which so have one order and one end."""
        return worker % self.num_servers

    def route(self, keys: Keys, num_shards: int) -> list[NDArray[np.int32]]:
        """Returns for each server the positions of its keys in `keys`, int32, ascending."""
        require_uint64(keys)
        starts = np.empty(self.num_servers + 1, np.int64)
        order = np.empty(keys.size, np.int32)
        _route(keys, num_shards, self.num_servers, starts, order)
        return [order[starts[server] : starts[server + 1]] for server in self.servers]

    def count_by_shard(self, keys: Keys, num_shards: int, server: int) -> NDArray[np.int64]:
        """Returns the number of `keys` in each shard, int64[num_shards].

        Raises WrongServerError if a key belongs to a shard of another server, ProtocolError if they are not
        uint64.
        """
        require_uint64(keys)
        counts = np.empty(num_shards, np.int64)
        shard = _count_by_shard(keys, self.num_servers, server, counts)
        if shard >= 0:
            raise WrongServerError(
                f"server {server} of {self.num_servers} received {counted(int(counts[shard]), 'key')} "
                f"of shard {shard}, which is on server {self.server_of(shard)}: give client and server "
                "the same list of servers"
            )
        return counts

    def require_epoch(self, epoch: int, server: int) -> None:
        """Raises WrongServerError unless a request to `server` was placed by this map."""
        if epoch != self.epoch:
            raise WrongServerError(
                f"the client's shard map is of epoch {epoch}, but the map of server {server} of "
                f"{self.num_servers} is of epoch {self.epoch}: connect again, with the current list of "
                "servers"
            )


ONE_SERVER = ShardMap.of(1)
