"""Plans of moves: the shard map that a cluster should have next, with as few moves as balance needs.

places by weight:  server 0 | 9 8 7 |   added: | |    -->   | 9 8 |   | 7 |
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.placement import NUM_PLACES, ShardMap

FEWEST = 1e-3
"""Weight of a place without rows: its shards may get some."""

ENOUGH = 1.1
"""A place goes from one server to another if these differ by so many times its weight."""

LEAST_GAIN = 0.01
"""Places that together have less of a server's share stay."""

STRIDE = 633
"""Among places alike, every third or so is taken: shards are at the first ones, 16 of a table or 1,024."""


def with_server(shard_map: ShardMap, endpoint: str, rows: Sequence[int]) -> ShardMap:
    """Returns the map with one server more, which gets its share; `rows` are those of each place.

    Raises UsageError if the server is in the map, or the cluster has as many as it can have.
    """
    new = _free_index(shard_map, endpoint)
    return balanced(_with(shard_map, {**endpoints_of(shard_map), new: endpoint}), rows)


def without_server(shard_map: ShardMap, server: int, rows: Sequence[int]) -> ShardMap:
    """Returns the map without a server; raises UsageError if it is the first, or not in the map."""
    _require_movable(shard_map, server)
    others = {each: of for each, of in endpoints_of(shard_map).items() if each != server}
    return balanced(_with(shard_map, others), rows)


def with_another(shard_map: ShardMap, server: int, endpoint: str) -> ShardMap:
    """Returns the map with another server in the place of one; raises as the two above."""
    _require_movable(shard_map, server)
    new = _free_index(shard_map, endpoint)
    endpoints = {**endpoints_of(shard_map), new: endpoint}
    del endpoints[server]
    owners = tuple(new if each == server else each for each in shard_map.owners)
    return replace(_with(shard_map, endpoints), epoch=shard_map.epoch + 1, owners=owners)


def balanced(shard_map: ShardMap, rows: Sequence[int]) -> ShardMap:
    """Returns a map of the next epoch with the same servers, whose weights differ by about one place at most.

    Places of servers that are not in the map are given away first, the heaviest first. Others stay where
    they would not help: one whose weight is most of the difference, and those that have almost none.
    """
    weights = np.maximum(np.array(rows, float), FEWEST)
    owners = np.array(shard_map.owners)
    servers = list(shard_map.servers)
    loads = {server: float(weights[owners == server].sum()) for server in servers}
    homeless = np.flatnonzero(~np.isin(owners, servers))
    for place in homeless[np.argsort(-weights[homeless], kind="stable")]:
        lightest = min(servers, key=loads.__getitem__)
        owners[place] = lightest
        loads[lightest] += weights[place]
    least = LEAST_GAIN * weights.sum() / len(servers)
    while True:
        heaviest, lightest = (
            max(servers, key=loads.__getitem__),
            min(servers, key=loads.__getitem__),
        )
        places = np.flatnonzero(owners == heaviest)
        fitting = places[ENOUGH * weights[places] <= loads[heaviest] - loads[lightest]]
        # The place that leaves the two most alike.
        gap = (loads[heaviest] - loads[lightest]) / 2
        if weights[fitting].sum() <= least or len(places) == 1:
            break
        off = np.abs(weights[fitting] - gap)
        alike = fitting[off == off.min()]
        place = alike[np.argmin(alike * STRIDE % NUM_PLACES)]
        if weights[place] <= FEWEST and gap <= FEWEST:
            break
        owners[place] = lightest
        loads[heaviest] -= weights[place]
        loads[lightest] += weights[place]
    return ShardMap(
        shard_map.epoch + 1, shard_map.servers, tuple(owners.tolist()), shard_map.endpoints
    )


def num_moved(before: ShardMap, after: ShardMap, rows: Sequence[int]) -> int:
    """Returns the rows whose server changes."""
    return sum(
        count
        for count, old, new in zip(rows, before.owners, after.owners, strict=True)
        if old != new
    )


def endpoints_of(shard_map: ShardMap) -> dict[int, str]:
    """Returns the endpoints of a map that has them, by server."""
    return dict(zip(shard_map.servers, shard_map.endpoints, strict=True))


def index_of(shard_map: ShardMap, server: str) -> int:
    """Returns the index of a server, given that or its endpoint; raises UsageError if it is neither."""
    indices = {endpoint: index for index, endpoint in endpoints_of(shard_map).items()}
    if server not in indices and not server.isdecimal():
        raise UsageError(f"{server} is not in the cluster, only {', '.join(indices)}")
    return indices[server] if server in indices else int(server)


def _free_index(shard_map: ShardMap, endpoint: str) -> int:
    """Returns the index of a server that is added; raises UsageError if it cannot be."""
    if endpoint in shard_map.endpoints:
        raise UsageError(f"{endpoint} is in the cluster already")
    if shard_map.num_servers == NUM_PLACES:
        raise UsageError(f"the cluster has {NUM_PLACES} servers, which is the most")
    return next(each for each in range(NUM_PLACES) if each not in shard_map.servers)


def _with(shard_map: ShardMap, endpoints: dict[int, str]) -> ShardMap:
    """Returns a map of these servers, not yet balanced."""
    servers = tuple(sorted(endpoints))
    return ShardMap(
        shard_map.epoch, servers, shard_map.owners, tuple(endpoints[each] for each in servers)
    )


def _require_movable(shard_map: ShardMap, server: int) -> None:
    if server == 0:
        raise UsageError(
            "server 0 keeps the shard map, so it cannot be drained or replaced by a move: restart it in "
            "place, with its update log"
        )
    if server not in shard_map.servers:
        raise UsageError(f"there is no server {server}, only {list(shard_map.servers)}")
