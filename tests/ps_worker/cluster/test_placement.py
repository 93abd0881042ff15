"""How a client finds the newest map, and what servers are told that do not know how a move ended."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ctr_ps.protos.errors import MovingError, TransportError, WrongServerError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store.moves import MapState
from ctr_ps.protos.wire.calls import END_MOVE, GET_MAP, Call
from ctr_ps.protos.wire.requests import EndMove
from ctr_ps.ps_worker.cluster import placement as placing
from ctr_ps.ps_worker.cluster.placement import ASK_S, MOVE_LIMIT_S, Placement, settle

BEFORE = ShardMap.of(2, ("a:1", "b:1"))
AFTER = replace(BEFORE, epoch=2)
THREE = replace(ShardMap.of(4, ("a:1", "b:1", "c:1", "d:1")), epoch=2)
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


class Away(Decided):
    """That of a server which is away."""

    def result(self) -> Any:
        raise TransportError("no answer")


class Servers:
    """Server 1 waits for the end of a move; the first `ends_it` as server 1 is asked, or has none."""

    def __init__(self, *, ends_it: bool) -> None:
        self.shard_map = BEFORE
        self._ends_it = ends_it
        self.first = STATE
        self.states: list[MapState] = []  # of the others, while the first is away
        self.told: list[tuple[int, EndMove]] = []

    def use(self, shard_map: ShardMap) -> None:
        assert shard_map.epoch > self.shard_map.epoch
        self.shard_map = shard_map

    def call(
        self, server: int, call: Call[Any, Any], argument: Any, *, ready_s: float | None = None
    ) -> Decided:
        if call is END_MOVE:
            self.told.append((server, argument))
            return Decided(None)
        assert call is GET_MAP
        if self.states:
            return Decided(self.states[server - 1]) if server else Away(None)
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


def test_a_server_that_was_drained_two_moves_ago_is_told_so() -> None:
    """The move after that one did not need it."""
    servers = Servers(ends_it=False)
    servers.first = replace(STATE, shard_map=replace(AFTER, epoch=3), last_move="Y")

    assert settle(servers).epoch == 3
    assert servers.told == [(1, EndMove(token="X", is_committed=True))]


def test_a_map_that_another_server_has_is_known_while_the_first_is_away() -> None:
    """A worker's renewals go on, and it is not lost."""
    servers = Servers(ends_it=False)
    placement = Placement(servers, chunk_bytes=100)
    servers.states = [
        replace(STATE, server=1, shard_map=THREE, last_move="X"),
        replace(STATE, server=2, move="X"),
        replace(STATE, server=None, move="Y"),  # waits to be added
    ]

    newer = placement.newer(placement.routing, WrongServerError("of epoch 2"))

    assert newer.shard_map == THREE
    assert servers.told == [(2, EndMove(token="X", is_committed=True))]


def test_an_old_map_of_another_server_does_not_count_while_the_first_is_away() -> None:
    """The first one may have ended the move: a caller waits for it, and is not refused."""
    servers = Servers(ends_it=False)
    placement = Placement(servers, chunk_bytes=100)
    servers.states = [replace(STATE, server=1, move="X")]

    with pytest.raises(TransportError):
        placement.newer(placement.routing, WrongServerError("of epoch 2"))

    assert (placement.epoch, servers.told) == (1, [])


def test_of_two_newer_maps_the_newest_is_used_in_the_end() -> None:
    """Whoever knows the older one may be late."""
    servers = Servers(ends_it=False)
    placement = Placement(servers, chunk_bytes=100)
    is_late, goes_on, use = threading.Event(), threading.Event(), servers.use

    def use_late(shard_map: ShardMap) -> None:
        if shard_map.epoch == 2:
            is_late.set()
            goes_on.wait(30)
        use(shard_map)

    servers.use = use_late
    older = threading.Thread(target=placement._takes, args=(AFTER,), daemon=True)
    older.start()
    assert is_late.wait(30)
    newer = threading.Thread(target=placement._takes, args=(replace(BEFORE, epoch=3),), daemon=True)
    newer.start()
    newer.join(0.1)  # it waits for the other one
    goes_on.set()
    older.join(30)
    newer.join(30)
    assert (placement.epoch, servers.shard_map.epoch) == (3, 3)


def test_a_call_does_not_wait_for_another_one_that_asks_for_the_newer_map() -> None:
    servers = Servers(ends_it=True)
    placement = Placement(servers, chunk_bytes=100)
    routing, asks, goes_on = placement.routing, threading.Event(), threading.Event()

    class Late(Decided):
        def result(self) -> Any:
            asks.set()
            assert goes_on.wait(30)
            return super().result()

    call = servers.call

    def first_is_away(server: int, *args: Any, **of: Any) -> Decided:
        if server == 0 and not asks.is_set():
            return Late(call(server, *args, **of).result())
        return call(server, *args, **of)

    servers.call = first_is_away
    error = WrongServerError("of epoch 2")
    epochs: list[int] = []

    def follow() -> None:
        epochs.append(placement.newer(routing, error).shard_map.epoch)

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(2)]
    threads[0].start()
    assert asks.wait(30)
    threads[1].start()
    threads[1].join(30)
    assert epochs == [2]
    goes_on.set()
    threads[0].join(30)
    assert epochs == [2, 2]


MOVED = ShardMap(2, (0, 2), tuple([0, 2] * 512), ("a:1", "c:1"))


class Gone:
    """Server 1 is away."""

    def __init__(self, first: ShardMap) -> None:
        self.shard_map = BEFORE
        self.called: list[tuple[int, Any]] = []
        self._first = first

    def call(
        self, server: int, call: Call[Any, Any], argument: Any, *, ready_s: float | None = None
    ) -> Decided:
        self.called.append((server, argument))
        if server == 0:
            return Decided(replace(STATE, shard_map=self._first, last_move="X"))
        assert ready_s == ASK_S, "it is waited for as for one that is started again"
        return Away(None)

    def use(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map


def test_no_other_server_is_waited_for_where_the_first_has_a_newer_map() -> None:
    """They may be away for longer than a lease, which a renewal is to keep; one that has left is told."""
    transport = Gone(MOVED)
    placement = Placement(transport, chunk_bytes=1)
    assert placement.newer(placement.routing, WrongServerError("")).shard_map is MOVED
    assert transport.called == [(0, None), (1, EndMove(token="", is_committed=True, epoch=2))]


def test_of_two_callers_that_ask_the_first_server_at_once_both_follow() -> None:
    """One takes the map; the other does not take that for no newer one, nor waits for who is away."""
    transport, both_ask = Gone(MOVED), threading.Barrier(2)
    call = transport.call

    def at_once(server: int, *args: Any, **options: Any) -> Decided:
        answer = call(server, *args, **options)
        if server == 0:
            both_ask.wait(30)
        return answer

    transport.call = at_once
    placement = Placement(transport, chunk_bytes=1)
    answers: list[int] = []

    def follow() -> None:
        placed = placement.placed(
            lambda routing: Away(None) if routing.shard_map is BEFORE else Decided(1)
        )
        answers.append(placed.result())

    threads = [threading.Thread(target=follow, daemon=True) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert answers == [1, 1]
    assert [server for server, argument in transport.called if argument is None] == [0, 0]


def test_a_server_that_is_away_during_a_move_is_not_waited_for() -> None:
    placement = Placement(Gone(BEFORE), chunk_bytes=1)
    routing = placement.routing
    assert placement.newer(routing, MovingError("")) is routing
    with pytest.raises(WrongServerError, match="another"):
        placement.newer(routing, WrongServerError("another"))


@pytest.mark.parametrize("has_newer", [True, False])
def test_a_call_waits_for_each_move_as_long_again(
    monkeypatch: pytest.MonkeyPatch, has_newer: bool
) -> None:
    placement = Placement(Servers(ends_it=False), chunk_bytes=1)
    old, tries = placement.routing, iter(range(1, 5))
    new = replace(old, shard_map=AFTER) if has_newer else old
    newer = iter([old, new, new, new])
    monkeypatch.setattr(placement, "newer", lambda *_: next(newer))

    class Moving:
        def result(self) -> str:
            if (number := next(tries, None)) is None:
                return "answer"
            now = 0.6 * MOVE_LIMIT_S * number
            monkeypatch.setattr(placing, "time", SimpleNamespace(monotonic=lambda: now))
            raise MovingError("")

    placed = placement.placed(lambda _: Moving())
    if has_newer:
        assert placed.result() == "answer"
    else:
        with pytest.raises(MovingError):
            placed.result()


def test_a_call_to_a_server_that_is_away_raises_that_unless_there_is_a_newer_map() -> None:
    with pytest.raises(TransportError, match="no answer"):
        Placement(Gone(BEFORE), chunk_bytes=1).placed(lambda _: Away(None)).result()
