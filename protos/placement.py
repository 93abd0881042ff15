"""Placement: key -> shard -> server.

A table has `num_shards` shards, a power of two. The high bits of `mix64(key)` choose the shard (the
low bits are the index's); a shard map says which server has it: shard `s` is at place `s % 1024`, which has
an owner.

    mix64(key) = | shard bits | ............ tag and slot of the index |
    place of a shard:   0  1  2  3  4  5 ...
    its owner:          0  1  0  1  2  1 ...

So a shard is whole on every number of servers: checkpoints are split by shard, and shards move as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import ProtocolError, WrongServerError, counted
from ctr_ps.protos.keys import Keys, mix64, require_uint64
from ctr_ps.protos.runtime.jit import kernel

FIRST_EPOCH = 1  # not 0, which a request without an epoch has

NUM_PLACES = 1024
"""Of shards: as many servers can have some."""
MAX_PLACES = 2**20

ANY_SERVER = -1
"""Of a count of keys that may belong to any."""
NO_SERVER = -2
"""Index of a server that waits to be added."""

STARTED_EMPTY = "started empty, and waits to be added: stop it, and start it with its update log"
"""Of such a server in the place of one of the map, which counts as away."""

Owners = NDArray[np.int32]


def server_name(server: int, num_servers: int) -> str:
    """Returns the name of one of `num_servers`, or of a spare, for messages."""
    return "spare server" if server == NO_SERVER else f"server {server} of {num_servers}"


@kernel
def shard_of(key: np.uint64, num_shards: int) -> np.uint64:
    """Returns the shard of uint64 `key`, in [0, num_shards); `num_shards` is a power of two."""
    # The high 32 bits, scaled: the same as taking the top log2(num_shards) bits.
    return ((mix64(key) >> np.uint64(32)) * np.uint64(num_shards)) >> np.uint64(32)


@kernel
def _count_by_shard(keys: Keys, owners: Owners, server: int, counts: NDArray[np.int64]) -> int:
    """Overwrites `counts` by shard; returns a shard of another server that has keys, or -1."""
    counts[:] = 0
    for key in keys:
        counts[shard_of(key, counts.size)] += 1
    for shard in range(counts.size):
        if server != ANY_SERVER and counts[shard] and owners[shard & (owners.size - 1)] != server:
            return shard
    return -1


@kernel
def _route(
    keys: Keys,
    num_shards: int,
    owners: Owners,
    starts: NDArray[np.int64],
    order: NDArray[np.int32],
) -> None:
    servers = np.empty(keys.size, np.int32)
    mask = np.uint64(owners.size - 1)
    starts[:] = 0
    for i in range(keys.size):
        owner = owners[shard_of(keys[i], num_shards) & mask]
        servers[i] = owner
        starts[owner + 1] += 1
    for server in range(starts.size - 1):
        starts[server + 1] += starts[server]
    next_place = starts[:-1].copy()
    for i in range(keys.size):
        owner = servers[i]
        order[next_place[owner]] = i
        next_place[owner] += 1


@dataclass(frozen=True)
class ShardMap:
    """Placement of shards, pieces of dense blocks and mailboxes on the servers of a cluster.

    `epoch` numbers the maps from 1; requests carry it, and a server refuses another one. `servers` are the
    indices of the servers, ascending, which have these `endpoints`, host:port; none where there is no list
    of servers. `owners` are the servers of the places of shards, a power of two of them.
    """

    epoch: int
    servers: tuple[int, ...]
    owners: tuple[int, ...]
    endpoints: tuple[str, ...] = ()

    @classmethod
    def of(cls, num_servers: int, endpoints: Sequence[str] = ()) -> Self:
        """Returns the first map of a cluster."""
        places = max(NUM_PLACES, 1 << (num_servers - 1).bit_length())
        owners = np.arange(places) % num_servers
        servers = tuple(range(num_servers))
        return cls(FIRST_EPOCH, servers, tuple(owners.tolist()), tuple(endpoints))

    @cached_property
    def _owners(self) -> Owners:
        return np.array(self.owners, np.int32)

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self.servers)

    def endpoint_of(self, server: int) -> str:
        """Returns the endpoint of a server; of one that is not in the map, a name for messages."""
        if server not in self.servers:
            return f"server {server}"
        return self.endpoints[self.servers.index(server)]

    def server_of(self, shard: int) -> int:
        """Returns the server of a shard."""
        return self.owners[shard % len(self.owners)]

    def shards_of(self, server: int, num_shards: int) -> list[int]:
        """Returns the shards of one server, ascending."""
        return np.flatnonzero(np.resize(self._owners, max(0, num_shards)) == server).tolist()

    def piece_of(self, server: int, length: int) -> slice:
        """Returns a server's piece of a dense block; lengths differ by at most one.

        That of a server that is not in the map is empty.
        """
        if server not in self.servers:
            return slice(0, 0)
        number, of = self.servers.index(server), self.num_servers
        return slice(length * number // of, length * (number + 1) // of)

    def server_of_receiver(self, worker: int) -> int:
        """Returns the one server of a worker's messages, which so have one order and one end."""
        return self.servers[worker % self.num_servers]

    def route(self, keys: Keys, num_shards: int) -> list[NDArray[np.int32]]:
        """Returns by index of server the positions of its keys in `keys`, int32, ascending."""
        require_uint64(keys)
        starts = np.empty(self.servers[-1] + 2, np.int64)
        order = np.empty(keys.size, np.int32)
        _route(keys, num_shards, self._owners, starts, order)
        return [order[start:stop] for start, stop in pairwise(starts.tolist())]

    def count_by_shard(self, keys: Keys, num_shards: int, server: int) -> NDArray[np.int64]:
        """Returns the number of `keys` in each shard, int64[num_shards].

        Raises WrongServerError if a key belongs to a shard of another server, ProtocolError if they are not
        uint64.
        """
        require_uint64(keys)
        counts = np.empty(num_shards, np.int64)
        shard = _count_by_shard(keys, self._owners, server, counts)
        if shard >= 0:
            raise WrongServerError(
                f"{server_name(server, self.num_servers)} received {counted(int(counts[shard]), 'key')} "
                f"of shard {shard}, which is on server {self.server_of(shard)}: give client and server "
                "the same list of servers"
            )
        return counts

    def require_valid(self) -> None:
        """Raises ProtocolError unless servers, owners and endpoints fit each other, and server 0 is there."""
        size = len(self.owners)
        if (
            self.servers[:1] != (0,)
            or list(self.servers) != sorted(set(self.servers))
            or self.servers[-1] >= MAX_PLACES
            or len(self.endpoints) != len(self.servers)
            or not NUM_PLACES <= size <= MAX_PLACES
            or size & (size - 1)
            or not set(self.owners) <= set(self.servers)
        ):
            raise ProtocolError(
                f"a shard map has servers {self.servers}, endpoints {self.endpoints} and {size} places, "
                "which do not fit each other"
            )

    def require_epoch(self, epoch: int, server: int) -> None:
        """Raises WrongServerError unless a request to `server` was placed by this map."""
        if epoch != self.epoch:
            raise WrongServerError(
                f"the client's shard map is of epoch {epoch}, but the map of "
                f"{server_name(server, self.num_servers)} is of epoch {self.epoch}: connect again, with the "
                "current list of servers"
            )


ONE_SERVER = ShardMap.of(1)
