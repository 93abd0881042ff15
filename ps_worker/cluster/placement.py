"""The shard map by which a client's calls are placed, and calls that are started again by a newer one.

    call --placed by the map--> servers --WrongServerError--> ask the first server for its map --> call again

The first server decides how a move of shards ends. A server that was not told, since the driver of the move
is gone, is told by the client that meets it.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ctr_ps.protos.errors import CtrPsError, MovingError, TransportError, WrongServerError
from ctr_ps.protos.futures import Combined, Future
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store.moves import MapState
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_worker.cluster.routing import Routing
from ctr_ps.ps_worker.cluster.transport import Transport

T = TypeVar("T")

ASK_S = 2.0
MOVE_LIMIT_S = 60.0
"""A move that is held for longer is not waited for."""


class Placement:
    """The routing of a client's calls by the newest shard map that it knows. Thread-safe."""

    def __init__(self, transport: Transport, *, chunk_bytes: int) -> None:
        """Places calls by the map that `transport` has."""
        self.routing = Routing(transport.shard_map, chunk_bytes)
        self._transport = transport
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """The epoch of the map."""
        return self.routing.shard_map.epoch

    def placed(self, start: Callable[[Routing], Future[T]]) -> Future[T]:
        """Starts a call by the map; again by a newer one if servers have moved shards meanwhile."""
        routing = self.routing
        future = start(routing)

        def result() -> T:
            nonlocal routing, future
            until = None  # as long as it is not known how a move ends
            while True:
                try:
                    return future.result()
                except TransportError as error:
                    newer = self._without_lost(routing, error)
                    routing, future = newer, start(newer)
                except WrongServerError as error:
                    now = time.monotonic()
                    until = now + MOVE_LIMIT_S if until is None else until
                    if now > until:
                        raise
                    newer = self.newer(routing, error)
                    until = until if newer is routing else None
                    routing, future = newer, start(newer)

        return Combined(result)

    def _without_lost(self, routing: Routing, error: TransportError) -> Routing:
        """Returns the routing by a newer map: a server may have left while a call waited for it.

        Raises `error` if there is none.
        """
        self._ask_first()
        if self.epoch <= routing.shard_map.epoch:
            raise error
        return self.routing

    def newer(self, routing: Routing, error: WrongServerError) -> Routing:
        """Returns the routing by a newer map than that of `routing`, with which a call met `error`.

        Raises `error` if there is none. Where a move has not ended, the same, to try once more.
        """
        epoch = routing.shard_map.epoch
        if self.epoch > epoch:
            return self.routing
        # The first server alone, if it knows: others may be away, and a renewal cannot wait for them.
        self._ask_first()
        if self.epoch <= epoch and self._takes(settle(self._transport, at_least=epoch + 1)):
            settle(self._transport, at_least=self.epoch)  # those added may not know either
        if self.epoch > epoch:
            return self.routing
        if isinstance(error, MovingError):
            return routing
        raise error

    def _ask_first(self) -> None:
        """Takes the map of the first server, if it answers soon, and that is newer."""
        try:
            newest = self._transport.call(0, calls.GET_MAP, None, ready_s=ASK_S).result().shard_map
        except CtrPsError:
            return
        before = self.routing.shard_map
        if newest.epoch > before.epoch:
            end = requests.EndMove(token="", is_committed=True, epoch=newest.epoch)
            for server in before.servers:
                # Nobody calls it any more, and its driver may be gone.
                if before.endpoint_of(server) not in newest.endpoints:
                    self._transport.call(server, calls.END_MOVE, end, ready_s=ASK_S)
            self._takes(newest)

    def _takes(self, shard_map: ShardMap) -> bool:
        """Places calls by a map from now on, if it is newer than the known one; returns whether it is."""
        with self._lock:
            if shard_map.epoch <= self.epoch:
                return False
            self._transport.use(shard_map)
            self.routing = replace(self.routing, shard_map=shard_map)
            return True


def settle(
    transport: Transport, *, at_least: float = math.inf, ready_s: float | None = None
) -> ShardMap:
    """Asks all servers for their maps, and returns that of the first one, once it has no doubt.

    While that is away, one of an epoch `at_least` so new is enough from any, as the first has decided it.
    Those that wait for the end of a move that is known so are told. Another than the first one that does
    not answer soon is left out: its callers ask again. For the first one see `Transport.call`.
    """
    _, *others = transport.shard_map.servers
    asked = [
        (server, transport.call(server, calls.GET_MAP, None, ready_s=ASK_S)) for server in others
    ]
    states = {}
    for server, answer in asked:
        with suppress(CtrPsError):
            states[server] = answer.result()
    newest = max(states.values(), key=lambda each: each.shard_map.epoch, default=None)
    is_enough = newest is not None and newest.shard_map.epoch >= at_least
    try:
        # After the others: a move of theirs that it does not know by now was never committed.
        ready_s = ASK_S if is_enough else ready_s
        newest = transport.call(0, calls.GET_MAP, None, ready_s=ready_s).result()
    except TransportError:
        if newest is None or not is_enough:
            raise
    ends = [
        transport.call(server, calls.END_MOVE, end, ready_s=ASK_S)
        for server, state in states.items()
        if (end := end_of(state, newest)) is not None
    ]
    for ended in ends:
        with suppress(CtrPsError):  # restarted since, or away: its callers ask again
            ended.result()
    return newest.shard_map


def end_of(state: MapState, known: MapState) -> requests.EndMove | None:
    """Returns what a server is told of its move, None if it may be under way still."""
    # No other move could begin with a server that takes part in this one: a later map came by it.
    is_past = state.server is not None and known.shard_map.epoch > state.shard_map.epoch
    is_committed = is_past or state.move == known.last_move
    if not state.move or state.move == known.move or not (is_committed or known.server == 0):
        return None
    return requests.EndMove(token=state.move, is_committed=is_committed)


def shard_map_of(transport: Transport) -> ShardMap:
    """Returns the map of the first server."""
    return transport.call(0, calls.GET_MAP, None).result().shard_map
