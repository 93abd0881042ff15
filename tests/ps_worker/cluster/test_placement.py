"""What servers are told that do not know how a move ended, when the first one decides it meanwhile."""

from dataclasses import replace
from typing import Any

from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store.moves import MapState
from ctr_ps.protos.wire.calls import END_MOVE, GET_MAP, Call
from ctr_ps.protos.wire.requests import EndMove
from ctr_ps.ps_worker.cluster.placement import settle

BEFORE = ShardMap.of(2, ("a:1", "b:1"))
AFTER = replace(BEFORE, epoch=2)
STATE = MapState(
    shard_map=BEFORE,
    server=0,
    members="1 worker",
    move="",
    last_move="",
    tables=(),
    blocks=(),
    rows=(),
)


class Decided:
    """An answer, as of the moment of the call."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def result(self) -> Any:
        return self._answer


class Servers:
    """Server 1 waits for the end of a move; the first `ends_it` as server 1 is asked, or has none."""

    shard_map = BEFORE

    def __init__(self, *, ends_it: bool) -> None:
        self._ends_it = ends_it
        self.first = STATE
        self.told: list[tuple[int, EndMove]] = []

    def call(
        self, server: int, call: Call[Any, Any], argument: Any, *, ready_s: float | None = None
    ) -> Decided:
        if call is END_MOVE:
            self.told.append((server, argument))
            return Decided(None)
        assert call is GET_MAP
        if server == 0:
            return Decided(self.first)
        if self._ends_it:
            self.first = replace(STATE, shard_map=AFTER, last_move="X")
        return Decided(replace(STATE, server=1, move="X"))


def test_a_move_that_is_committed_while_servers_are_asked_is_committed_on_all() -> None:
    servers = Servers(ends_it=True)

    assert settle(servers).epoch == 2
    assert servers.told == [(1, EndMove(token="X", is_committed=True))]


def test_a_move_that_the_first_server_does_not_know_is_ended_by_the_old_map() -> None:
    servers = Servers(ends_it=False)

    assert settle(servers).epoch == 1
    assert servers.told == [(1, EndMove(token="X", is_committed=False))]
