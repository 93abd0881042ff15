"""Moves of shards whose calls come late or again, between servers that restart, load and shrink meanwhile."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import (
    AbortedError,
    CheckpointError,
    CtrPsError,
    ProtocolError,
    RecoveringError,
    TransportError,
    WaitTimeoutError,
    WrongServerError,
)
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.placement import NO_SERVER, ShardMap
from ctr_ps.protos.spec import ExpirySpec, StatisticsSpec
from ctr_ps.protos.store import Lease, Member, Message, SaveRequest, WorkerLoss
from ctr_ps.protos.store.moves import Cut, LogRecord, Moved, Phase, SeenPushes
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.moves import HELD_S, SILENT_S
from ctr_ps.ps_worker.cluster.placement import ASK_S, settle
from ctr_ps.ps_worker.extras.moves import move as moving
from ctr_ps.ps_worker.extras.moves.move import Move, states_of, weights_of
from ctr_ps.ps_worker.extras.moves.plan import with_server, without_server
from tests.support.local_transport import Answer
from tests.support.moving import (
    KEYS,
    SPARE,
    SPEC,
    MovingServers,
    MovingTransport,
    moving_servers,
    ones,
)
from tests.support.stores import INCARNATION, push_id

EXPIRING = replace(SPEC, statistics=StatisticsSpec(), expiry=ExpirySpec(max_unseen=1))


@pytest.fixture
def servers(tmp_path: Path):
    with moving_servers(tmp_path) as found:
        yield found


def before_prepare(move: Move, do: Callable[[], Any]) -> Move:
    prepare = move._prepare

    def both() -> None:
        do()
        prepare()

    move._prepare = both
    return move


def maps(servers: MovingServers) -> list[tuple[int, str]]:
    states = [servers.transport.call(each, calls.GET_MAP, None).result() for each in (0, 1)]
    return [(each.shard_map.epoch, each.last_move) for each in states]


def begun(servers: MovingServers, server: int) -> Callable[..., Any]:
    """Begins an exchange of all shards on one server; returns what calls its HoldMove."""
    move, numbers = servers.exchange(), itertools.count(1)
    begin = requests.BeginMove(token=move.token, shard_map=move._after)
    servers.transport.call(server, calls.BEGIN_MOVE, begin).result()

    def hold(phase: Phase, cut: Cut | None = None, number: int | None = None) -> Any:
        held = requests.HoldMove(
            token=move.token, number=number or next(numbers), phase=phase, cut=cut or Cut()
        )
        return servers.handlers[servers.endpoints[server]].moves.hold_move(held)

    return hold


def test_a_server_that_restarts_after_its_rows_were_taken_does_not_prepare(servers):
    servers.begin()
    servers.push(0)

    def restart() -> None:
        servers.restart("s1:1", 1)
        assert servers.push_parts(push_id(sequence=1)) == [False, True]  # nothing holds it there

    with pytest.raises(ProtocolError, match="the server was restarted"):
        before_prepare(servers.exchange(), restart).run()
    servers.push(1)
    assert servers.weights() == {2.0: KEYS.size}


def test_an_added_server_that_is_started_empty_counts_as_one_that_is_away(servers, caplog):
    """Its callers try again until it is started with its log."""
    servers.begin()
    servers.push(0)
    transport = MovingTransport(servers)
    states = states_of(transport)
    Move(transport, states, with_server(transport.shard_map, SPARE, weights_of(states))).run()
    added = servers.handlers[SPARE]
    servers.handlers[SPARE] = Handlers(servers._store(NO_SERVER).engine)
    for _ in range(2):
        with pytest.raises(RecoveringError, match=r"this server started empty, .* with its update"):
            servers.push(1)
    assert caplog.text.count("workers of a cluster call, but this server started empty") == 1

    servers.handlers[SPARE] = added
    servers.push(1)
    assert servers.weights() == {2.0: KEYS.size}


@pytest.mark.parametrize("phase", [Phase.RELEASE, Phase.HOLD])
def test_a_hold_that_comes_late_changes_nothing(servers, phase: Phase):
    servers.begin()
    servers.push(0)
    move = servers.exchange()

    def hold_late() -> None:
        late = requests.HoldMove(token=move.token, number=1, phase=phase, cut=Cut())
        with pytest.raises(ProtocolError, match="came late"):
            servers.transport.call(1, calls.HOLD_MOVE, late).result()
        assert servers.push_parts(push_id(sequence=1)) == [False, False]

    before_prepare(move, hold_late).run()
    servers.push(1)
    assert servers.weights() == {2.0: KEYS.size}


def test_a_hold_is_answered_again_where_its_answer_was_lost(servers):
    servers.begin()
    hold = begun(servers, 1)
    assert hold(Phase.HOLD, number=1).result() == hold(Phase.HOLD, number=1).result()


def test_a_server_that_has_prepared_keeps_its_promise_when_it_is_restarted(servers):
    servers.begin()
    servers.push(0)
    move = servers.exchange()
    prepare = move._prepare

    def restart() -> None:
        prepare()
        servers.restart("s1:1", 1)
        late = requests.HoldMove(token=move.token, number=9, phase=Phase.RELEASE, cut=Cut())
        with pytest.raises(ProtocolError, match="is prepared"):
            servers.transport.call(1, calls.HOLD_MOVE, late).result()
        assert servers.push_parts(push_id(sequence=1)) == [False, False]

    move._prepare = restart
    move.run()
    servers.push(1)
    assert servers.weights() == {2.0: KEYS.size}


def test_a_part_that_comes_again_late_puts_nothing(servers):
    """A later one has newer rows."""
    servers.begin()
    servers.push(0)
    move, parts = servers.exchange(), []

    def note(endpoint: str, call: Call[Any, Any], argument: Any) -> None:
        if call is calls.PUT_MOVED:
            parts.append((int(endpoint[1]), argument))

    def again() -> None:
        for server, part in parts[:2]:
            servers.transport.call(server, calls.PUT_MOVED, part).result()

    copy = move._copy
    move._copy = lambda: (copy(), servers.push(1))
    move._transport.before = note
    before_prepare(move, again).run()
    assert len(parts) > 2
    assert servers.weights() == {2.0: KEYS.size}


def test_no_move_begins_in_a_job_that_has_ended_by_an_error(servers):
    servers.begin()
    servers.client.abort(0, "the disk is full")
    with pytest.raises(AbortedError, match="the disk is full"):
        begun(servers, 1)


@pytest.mark.parametrize(
    ("call", "argument", "why"),
    [
        (
            calls.BEGIN_MOVE,
            lambda of: requests.BeginMove(token="m", shard_map=replace(of, epoch=3)),
            "leads to epoch 3, but the map of server 1 is of epoch 1",
        ),
        (calls.GET_JOB_STATE, lambda _: requests.GetJobState(token="m"), "close it first"),
        (
            calls.PUT_MOVED,
            lambda _: requests.PutMoved(token="m", number=2, moved=Moved()),
            "part 2 of a move came, expected 1",
        ),
    ],
    ids=["an epoch between", "job that changes", "a part between"],
)
def test_a_call_before_its_time_is_refused(servers, call, argument, why: str):
    servers.begin()
    shard_map = servers.transport.shard_map
    if call is not calls.BEGIN_MOVE:
        begin = requests.BeginMove(token="m", shard_map=replace(shard_map, epoch=2))
        servers.transport.call(1, calls.BEGIN_MOVE, begin).result()
    with pytest.raises(ProtocolError, match=why):
        servers.transport.call(1, call, argument(shard_map)).result()


def test_an_end_by_who_saw_the_beginning_is_of_a_move_that_has_ended(servers):
    """It comes late, when its server is prepared."""
    servers.begin()
    servers.push(0)
    delayed = []

    class Watcher(MovingTransport):
        def call(self, server, call, argument, **options):
            if call is not calls.END_MOVE:
                return super().call(server, call, argument, **options)
            delayed.append((server, argument))
            return Answer(lambda: None)

    class Slow(MovingTransport):
        """The first server's answers come last."""

        def call(self, server, call, argument, **options):
            if server != 0 or call is not calls.BEGIN_MOVE:
                answer = super().call(server, call, argument, **options)
                settle(Watcher(servers))
                return answer
            called = super().call
            return Answer(lambda: called(server, call, argument).result())

    move = servers.exchange()
    move._transport = Slow(servers)

    def end_late() -> None:
        for server, end in delayed:
            servers.transport.call(server, calls.END_MOVE, end).result()

    before_prepare(move, end_late).run()
    assert maps(servers) == [(2, move.token)] * 2
    assert servers.weights() == {1.0: KEYS.size}


def test_a_beginning_that_comes_late_begins_nothing(servers):
    servers.begin()
    move = servers.exchange()
    begin = requests.BeginMove(token=move.token, shard_map=move._after)
    before_prepare(move, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        move.run()
    with pytest.raises(ProtocolError, match="has ended"):
        servers.transport.call(0, calls.BEGIN_MOVE, begin).result()


def test_the_log_has_ends_in_the_order_in_which_they_were_carried_out(servers):
    """A clock that ends the move, and the commit, come together."""
    servers.begin()
    servers.push(0)
    handlers, move = servers.handlers["s0:1"], servers.exchange()
    carry_out = handlers._carry_out
    is_committing, clocks = threading.Event(), []

    def slowly(call: Any, argument: Any, *payload: Any) -> Any:
        if call is calls.END_MOVE and argument.is_committed:
            is_committing.set()
            clocks[0].join(0.2)  # it has had the time to come between
        return carry_out(call, argument, *payload)

    def pass_time() -> None:
        is_committing.wait()
        handlers.pass_time(0.5)

    def meet() -> None:
        handlers.moves._move.held_s = 9.9
        handlers._carry_out = slowly
        clocks.append(threading.Thread(target=pass_time))
        clocks[0].start()

    prepare = move._prepare
    move._prepare = lambda: (prepare(), meet())
    move.run()
    clocks[0].join()
    expected = maps(servers)
    servers.restart("s0:1", 0)
    assert maps(servers) == expected == [(2, move.token)] * 2


def test_a_clock_that_meets_the_commit_ends_nothing(servers):
    servers.begin()
    servers.exchange().run()
    servers.handlers["s0:1"].pass_time(100.0)
    assert servers.weights() == {0.0: KEYS.size}


def test_a_clock_ends_what_was_prepared_on_the_first_server_alone(servers, caplog):
    """It decides; others have promised, and are told."""
    servers.begin()
    move = servers.exchange()

    def driver_dies(_endpoint, call, _argument) -> None:
        if call is calls.END_MOVE:
            raise KeyboardInterrupt

    move._transport.before = driver_dies
    with pytest.raises(KeyboardInterrupt):
        move.run()
    for endpoint in servers.endpoints:
        servers.handlers[endpoint].pass_time(100.0)

    states = [servers.transport.call(each, calls.GET_MAP, None).result() for each in (0, 1)]
    assert [state.move for state in states] == ["", move.token]
    assert "ps-cluster s0:1,s1:1 status tells it" in caplog.text
    assert settle(servers.transport).epoch == 1
    servers.push(0)
    assert servers.weights() == {1.0: KEYS.size}


def test_time_for_which_a_move_held_calls_before_does_not_count(servers):
    """A save that waits between has them go on."""
    servers.begin()
    hold, moves = begun(servers, 1), servers.handlers["s1:1"].moves
    for phase in (Phase.HOLD, Phase.RELEASE, Phase.HOLD):
        hold(phase)
        moves.pass_time(0.9 * HELD_S, is_silent=False)
        assert moves.overdue() is None
    moves.pass_time(0.2 * HELD_S, is_silent=False)
    assert not moves.overdue().is_committed


def test_a_driver_is_not_silent_while_its_call_is_carried_out(servers):
    servers.begin()
    begun(servers, 1)
    moves = servers.handlers["s1:1"].moves
    moves.pass_time(1.1 * SILENT_S, is_silent=False)
    assert moves.overdue() is None
    moves.pass_time(1.1 * SILENT_S, is_silent=True)
    assert not moves.overdue().is_committed


@pytest.mark.parametrize("phase", [Phase.DRAIN, Phase.CLOSE])
def test_time_for_which_all_wait_for_a_step_does_not_count(servers, phase: Phase):
    servers.begin()
    servers.client.push_grad(ones(), push_id(sequence=0), at=0).result()
    hold, moves = begun(servers, 1), servers.handlers["s1:1"].moves
    hold(phase)
    moves.pass_time(1.1 * HELD_S, is_silent=False)
    assert (moves.overdue() is None) == (phase is Phase.DRAIN)


@pytest.mark.parametrize("by", ["Shrink", "a move that was ended"])
def test_who_waits_for_pushes_that_cannot_come_is_told_so_at_once(servers, by: str):
    servers.begin()
    hold, moves = begun(servers, 1), servers.handlers["s1:1"].moves
    hold(Phase.HOLD)
    lacks_one = Cut(seen={0: SeenPushes(incarnation=INCARNATION, pushes=1)})
    drained = hold(Phase.DRAIN, lacks_one)
    if by == "Shrink":
        assert moves.enter(calls.SHRINK, None) is not None
    else:
        moves.end_move(requests.EndMove(token=moves.get_map().move, is_committed=False))
    with pytest.raises(ProtocolError, match=f"a worker waits for {by}"):
        drained.result(timeout=0)
    if by == "Shrink":  # it has been carried out once the driver holds again
        hold(Phase.RELEASE)
        hold(Phase.HOLD)
        assert hold(Phase.DRAIN).result() == Cut()


@pytest.mark.parametrize("next_phase", [Phase.DRAIN, Phase.RELEASE, None])
def test_a_push_that_waits_comes_again_as_soon_as_it_may_go_on(servers, next_phase):
    servers.begin()
    hold, moves = begun(servers, 1), servers.handlers["s1:1"].moves
    hold(Phase.HOLD)
    routing = servers.client._routing
    chunk = routing.split_push(ones(), bfloat16=False)[1][0]
    push = servers.client._push_request(routing, chunk, push_id(sequence=0), None)
    waits = moves.enter(calls.PUSH_GRAD, push)
    if next_phase is not None:
        hold(next_phase)
    else:
        moves.end_move(requests.EndMove(token=moves.get_map().move, is_committed=False))
    waits.result(timeout=0)


@pytest.mark.parametrize("name", ["Snapshot", "Shrink"])
def test_no_server_holds_while_a_call_that_has_come_before_would_wait_for_the_move(
    servers, tmp_path: Path, monkeypatch, name: str
):
    """Else the move waits for the call, and the call for the move."""
    servers.begin()
    hold, engine = begun(servers, 1), servers.handlers["s1:1"].engine
    has_come, goes_on = threading.Event(), threading.Event()
    of_snapshot, of_shrink = engine.parameters.prepare_snapshot, engine.snapshots.between_saves

    def late(do: Callable[..., Any]) -> Callable[..., Any]:
        def comes_late(*arguments: Any) -> Any:
            has_come.set()
            assert goes_on.wait(10.0)
            return do(*arguments)

        return comes_late

    monkeypatch.setattr(engine.parameters, "prepare_snapshot", late(of_snapshot))
    monkeypatch.setattr(engine.snapshots, "between_saves", late(of_shrink))
    save = partial(servers.client.save, SaveRequest(url=str(tmp_path / "model")))
    caller = threading.Thread(target=save if name == "Snapshot" else servers.client.shrink)
    caller.start()
    assert has_come.wait(10.0)
    try:
        with pytest.raises(WaitTimeoutError, match=f"a {name.lower()} is under way"):
            hold(Phase.HOLD)
        hold(Phase.RELEASE)
    finally:
        goes_on.set()
        caller.join()
    assert isinstance(hold(Phase.HOLD), Answered)
    assert (tmp_path / "model").exists() == (name == "Snapshot")


def test_no_server_closes_while_messages_are_exchanged(tmp_path: Path):
    with moving_servers(tmp_path, num_workers=2) as servers:
        servers.begin()
        rows = Message(sender=0, receiver=1, sequence=0, content=b"rows")
        servers.client.post("shuffle", rows).result()
        hold = begun(servers, 1)
        with pytest.raises(ProtocolError, match="an exchange of messages is under way"):
            hold(Phase.CLOSE)


def test_a_server_that_restarts_while_it_holds_goes_on_with_no_move(servers):
    servers.begin()
    hold = begun(servers, 1)
    hold(Phase.HOLD)
    servers.restart("s1:1", 1)
    with pytest.raises(ProtocolError, match="the server was restarted"):
        hold(Phase.DRAIN)
    hold(Phase.RELEASE)


def test_a_move_begins_once_what_another_took_away_is_removed(servers):
    """Else that would remove what comes back."""
    servers.begin()
    parameters, goes_on = servers.handlers["s1:1"].engine.parameters, threading.Event()
    drop = parameters.drop_others
    parameters.drop_others = lambda: (goes_on.wait(30), drop())
    servers.exchange().run()
    moves, after = servers.handlers["s1:1"].moves, replace(servers.transport.shard_map, epoch=3)
    begin = requests.BeginMove(token="next", shard_map=after)
    begins = threading.Thread(target=lambda: moves.begin_move(begin))
    begins.start()
    begins.join(0.1)
    was_early = moves.is_under_way
    goes_on.set()
    begins.join(30)
    assert (was_early, moves.is_under_way) == (False, True)


def test_a_part_fits_a_message_and_is_given_again_where_its_answer_was_lost(servers, monkeypatch):
    monkeypatch.setattr("ctr_ps.ps_server.rpc.moves.CHUNK_BYTES", 1000)
    servers.begin()
    servers.push(0)
    move = servers.exchange()
    begin = requests.BeginMove(token=move.token, shard_map=move._after)
    servers.transport.call(1, calls.BEGIN_MOVE, begin).result()
    take = requests.TakeMoved(
        token=move.token, number=1, server=0, max_bytes=10_000, with_counts=False
    )
    first, again = (servers.transport.call(1, calls.TAKE_MOVED, take).result() for _ in range(2))
    assert 0 < first.moved.num_bytes <= 1000
    assert not first.is_all
    assert first.moved.rows[0].keys.tolist() == again.moved.rows[0].keys.tolist()


def test_time_passes_while_a_call_is_carried_out(servers):
    servers.begin()
    begun = requests.BeginMove(token="m", shard_map=servers.exchange()._after)
    servers.transport.call(0, calls.BEGIN_MOVE, begun).result()
    hold = requests.HoldMove(token="m", number=1, phase=Phase.HOLD, cut=Cut())
    servers.transport.call(0, calls.HOLD_MOVE, hold).result()
    handlers = servers.handlers["s0:1"]
    passing = threading.Thread(target=lambda: handlers.pass_time(HELD_S))
    with handlers.moves.working:
        passing.start()
        passing.join(5.0)
        assert not passing.is_alive()
        assert handlers.moves.is_under_way
    handlers.pass_time(0.0)
    assert not handlers.moves.is_under_way


def test_a_load_that_has_not_come_to_all_servers_ends_the_move(servers, tmp_path: Path):
    servers.begin()
    servers.push(0)
    servers.client.save(SaveRequest(url=str(tmp_path / "model")))
    servers.push(1)
    ended = straddle(servers, "Load", lambda: servers.client.load(str(tmp_path / "model")))
    assert "was ended" in str(ended)
    assert servers.weights() == {1.0: KEYS.size}


@pytest.mark.parametrize("name", ["Load", "Shrink"])
def test_a_call_that_failed_on_one_server_and_was_given_again_keeps_no_shards_from_moving(
    servers, tmp_path: Path, monkeypatch, name: str
):
    monkeypatch.setattr(moving, "HOLD_S", 0.0)
    servers.begin()
    servers.push(0)
    servers.client.save(SaveRequest(url=str(tmp_path / "model")))
    load = partial(servers.client.load, str(tmp_path / "model"))
    call = load if name == "Load" else servers.client.shrink

    def fail(endpoint: str, call: Any, argument: Any) -> None:
        if call.name == name and endpoint == "s1:1":
            raise CheckpointError("the storage is away")

    servers.transport.before = fail
    with pytest.raises(CheckpointError):
        call()
    with pytest.raises(ProtocolError, match="has not come to all servers"):
        servers.exchange().run()
    servers.transport.before = lambda *_: None
    call()
    servers.exchange().run()
    assert [epoch for epoch, _ in maps(servers)] == [2, 2]


def test_a_shrink_that_has_not_come_to_all_servers_is_waited_for(servers):
    servers.begin(EXPIRING)
    counts = np.tile(np.array([[1, 0]], np.uint32), (KEYS.size, 1))
    grad = SparseGrad(KEYS, np.ones((KEYS.size, 1), np.float32), 1, counts)
    servers.client.push_grad(
        Gradients(sparse={SPEC.name: grad}, dense={}), push_id(sequence=0)
    ).result()
    servers.client.shrink()
    assert straddle(servers, "Shrink", servers.client.shrink) is None
    assert servers.client.status().tables[SPEC.name].rows == 0


def straddle(servers: MovingServers, name: str, call_all: Callable[[], Any]) -> CtrPsError | None:
    """Calls all servers, the second one while shards move; returns what the move fails with."""
    has_begun, is_let_go, failed = threading.Event(), threading.Event(), []
    move = servers.exchange()
    hold_at = move._hold_at

    def hold(phase: Phase, *cut: Any) -> Any:
        held = hold_at(phase, *cut)
        if phase is Phase.RELEASE:
            is_let_go.set()
            caller.join()
        return held

    def run() -> None:
        try:
            move.run()
        except CtrPsError as error:
            failed.append(error)
        is_let_go.set()

    def look(endpoint: str, call: Any, argument: Any) -> None:
        if call.name == name and endpoint == "s1:1" and not has_begun.is_set():
            has_begun.set()
            moving.start()
            assert is_let_go.wait(10.0)

    move._hold_at = hold
    servers.transport.before = look
    moving, caller = threading.Thread(target=run), threading.Thread(target=call_all)
    caller.start()
    caller.join()
    moving.join()
    return failed[0] if failed else None


def test_a_load_ends_a_move_that_copies(servers, tmp_path: Path):
    servers.begin()
    few = SparseGrad(KEYS[:100], np.ones((100, 1), np.float32), 1)
    servers.client.push_grad(
        Gradients(sparse={SPEC.name: few}, dense={}), push_id(sequence=0)
    ).result()
    servers.client.save(SaveRequest(url=str(tmp_path / "model")))
    expected = servers.client.digest()
    servers.push(1)
    transport = MovingTransport(servers)
    states = states_of(transport)
    move = Move(transport, states, with_server(transport.shard_map, SPARE, weights_of(states)))
    hold = move._hold
    move._hold = lambda: (servers.client.load(str(tmp_path / "model")), hold())
    with pytest.raises(ProtocolError, match="was ended"):
        move.run()
    assert servers.client.digest() == expected
    assert servers.client.status().tables[SPEC.name].rows == 100


def test_pushes_of_a_worker_that_the_job_goes_on_without_are_not_waited_for(tmp_path: Path):
    lease = Lease(seconds=10.0, on_worker_loss=WorkerLoss.CONTINUE)
    with moving_servers(tmp_path, num_workers=2) as servers:
        servers.begin(lease=lease)
        routing = servers.client._routing
        chunk = routing.split_push(ones(), bfloat16=False)[1][0]
        push = servers.client._push_request(routing, chunk, push_id(worker=1, sequence=0), None)
        servers.transport.call(1, calls.PUSH_GRAD, push).result()
        for endpoint in servers.endpoints:
            engine = servers.handlers[endpoint].engine
            for _ in range(8):
                engine.job.admit(Member(0, INCARNATION), None)  # a sign of life
                engine.pass_time(2.0)
            assert engine.job.state().members.left == [1]
        servers.exchange().run()
        assert sum(servers.weights().values()) == KEYS.size


def test_pushes_of_a_process_that_takes_a_place_while_servers_hold_are_not_lost(tmp_path: Path):
    """One says that it knows the process before, another that the newer one has pushed."""
    lease = Lease(seconds=10.0, on_worker_loss=WorkerLoss.WAIT)
    with moving_servers(tmp_path) as servers:
        servers.begin(lease=lease)
        servers.push(0)
        servers.push(1)
        newer = replace(push_id(sequence=0), incarnation=INCARNATION + 1)
        told: list[Answer[Cut]] = []

        def replace_worker() -> None:
            for endpoint in servers.endpoints:
                for _ in range(8):
                    servers.handlers[endpoint].engine.pass_time(2.0)
            servers.client.join(0, newer.incarnation, terms={}, lease=lease).result()
            assert servers.push_parts(newer) == [True, False]

        class Slow(MovingTransport):
            """Server 1 holds first, and its answer comes last."""

            def call(self, server, call, argument, **options):
                if call is not calls.HOLD_MOVE or len(told) > 1:
                    return super().call(server, call, argument, **options)
                if argument.phase is Phase.HOLD and server == 0:
                    told.append(super().call(1, call, argument))
                    told[0].result()
                    replace_worker()
                if argument.phase is Phase.RELEASE and server == 1:
                    released = super().call(server, call, argument)
                    told.append(released)
                    assert servers.push_parts(newer)[1]
                    return released
                is_held = argument.phase is Phase.HOLD and server == 1
                return told[0] if is_held else super().call(server, call, argument, **options)

        move = servers.exchange()
        move._transport = Slow(servers)
        move.run()
        servers.client._placement.newer(servers.client._routing, WrongServerError(""))
        servers.push_parts(newer)
        assert servers.weights() == {3.0: KEYS.size}


def test_a_save_in_a_move_is_no_base_of_a_segment_that_began_before_a_restart(
    tmp_path: Path,
) -> None:
    """A snapshot is asked for again after a restart, and no segment begins with it during a move."""
    with moving_servers(tmp_path) as servers:
        servers.begin()
        servers.push(0)

        def restart(endpoint: str, call: Call[Any, Any], argument: Any) -> None:
            if call is not calls.SNAPSHOT or endpoint != "s1:1":
                return
            servers.transport.before = lambda *_: None
            servers.restart("s0:1", 0)
            servers.push(1)
            after = replace(servers.transport.shard_map, epoch=2)
            begin = requests.BeginMove(token="move", shard_map=after)
            servers.transport.call(0, calls.BEGIN_MOVE, begin).result()
            servers.transport.call(0, calls.SNAPSHOT, argument).result()

        servers.transport.before = restart
        servers.client.save(SaveRequest(url=str(tmp_path / "model")))
        servers.restart("s0:1", 0)
        assert servers.weights() == {2.0: KEYS.size}


@pytest.mark.parametrize("next_moves", [0, 1, 2])
def test_a_server_that_was_drained_while_it_was_away_is_told_by_who_follows(
    tmp_path: Path, next_moves: int
) -> None:
    """Even after further moves, whose last one may give its index to another."""
    with moving_servers(tmp_path) as servers:
        servers.begin()
        servers.push(0)

        def move(plan: Callable[..., ShardMap], what: Any, before: Any = lambda *_: None) -> None:
            transport = MovingTransport(servers, before)
            transport.shard_map = ShardMap.of(1, ("s0:1",))  # it knows the first server only
            transport.use(settle(transport))
            states = states_of(transport)
            Move(transport, states, plan(transport.shard_map, what, weights_of(states))).run()

        def away(endpoint: str, call: Call[Any, Any], _: Any) -> None:
            if endpoint == "s1:1" and call is calls.END_MOVE:
                raise TransportError("away")

        move(without_server, 1, away)
        if next_moves:
            move(with_server, SPARE)
        if next_moves > 1:
            move(without_server, 1)
        drained = servers.handlers["s1:1"].moves
        assert drained.is_under_way
        servers.push(1)
        assert not drained.is_under_way
        assert servers.weights() == {2.0: KEYS.size}


@pytest.mark.parametrize(
    ("endpoint", "epoch"), [("s1:1", 1), (SPARE, 2)], ids=["before it", "of another cluster"]
)
def test_a_map_to_which_a_move_has_not_led_does_not_tell_its_end(servers, endpoint, epoch):
    servers.begin()
    transport = MovingTransport(servers)
    states = states_of(transport)
    move = Move(transport, states, with_server(transport.shard_map, SPARE, weights_of(states)))

    def meet() -> None:
        moves = servers.handlers[endpoint].moves
        moves.end_move(requests.EndMove(token="", is_committed=True, epoch=epoch))
        assert moves.is_under_way

    prepare = move._prepare
    move._prepare = lambda: (prepare(), meet())
    move.run()
    assert servers.handlers[endpoint].engine.shard_map.epoch == 2


@pytest.mark.parametrize(
    "records",
    [
        [LogRecord(kind="state", payload=b"{}")],
        [LogRecord(kind="EndMove", payload=b"")],
        [],
    ],
    ids=["no state", "another call", "none"],
)
def test_a_server_takes_over_no_job_that_it_cannot_read(servers, records):
    servers.begin()
    transport = MovingTransport(servers)
    states = states_of(transport)
    move = Move(transport, states, with_server(transport.shard_map, SPARE, weights_of(states)))

    def prepare(endpoint: str, call: Any, argument: Any) -> None:
        if call is calls.PREPARE_MOVE and endpoint == SPARE:
            object.__setattr__(argument, "records", records)

    transport.before = prepare
    with pytest.raises(ProtocolError, match="the state of a job"):
        move.run()
    assert servers.handlers[SPARE].moves.get_map().server is None
    servers.push(0)
    assert servers.weights() == {1.0: KEYS.size}

    transport.before = lambda *_: None  # it can be added by another move
    states = states_of(transport)
    Move(transport, states, with_server(transport.shard_map, SPARE, weights_of(states))).run()
    servers.push(1)
    assert servers.weights() == {2.0: KEYS.size}


def test_all_other_servers_are_told_of_the_end_though_one_is_away(servers):
    servers.begin()

    class Lazy(MovingTransport):
        """Sends a call, as it does again, when its answer is asked for."""

        def call(self, server, call, argument, **options):
            called = super().call
            if call is not calls.END_MOVE:
                return called(server, call, argument, **options)
            return Answer(lambda: called(server, call, argument, **options).result())

    def away(endpoint: str, call: Call[Any, Any], _: Any) -> None:
        if endpoint == "s1:1" and call is calls.END_MOVE:
            raise TransportError("away")

    transport = Lazy(servers, away)
    states = states_of(transport)
    Move(transport, states, with_server(transport.shard_map, SPARE, weights_of(states))).run()
    assert not servers.handlers[SPARE].moves.is_under_way


def test_a_server_prepares_no_other_ones_shards(servers):
    servers.begin()
    servers.push(0)
    move = servers.exchange()

    def swap(endpoint: str, call: Any, argument: Any) -> None:
        if call is calls.PREPARE_MOVE and endpoint == "s1:1":
            object.__setattr__(argument, "server", 0)

    move._transport.before = swap
    with pytest.raises(ProtocolError, match="but this is server 1"):
        move.run()
    assert servers.weights() == {1.0: KEYS.size}


def test_a_server_that_was_away_at_the_end_is_told_by_who_calls_it(servers):
    """First it refuses its caller, who has asked for the newer map already."""
    servers.begin()
    servers.push(0)
    move = servers.exchange()
    is_away = True

    def go_away(endpoint: str, call: Any, argument: Any) -> None:
        if is_away and endpoint == "s1:1" and call is calls.END_MOVE:
            raise TransportError("away")

    move._transport.before = servers.transport.before = go_away
    move.run()
    assert (
        servers.client._placement.newer(
            servers.client._routing, WrongServerError("")
        ).shard_map.epoch
        == 2
    )
    assert [epoch for epoch, _ in maps(servers)] == [2, 1]
    is_away = False
    assert servers.weights() == {1.0: KEYS.size}  # reads do not wait for the end of a move
    assert [epoch for epoch, _ in maps(servers)] == [2, 2]


@pytest.mark.parametrize(
    ("interrupted", "is_committed"),
    [(("PrepareMove", "s1:1"), False), (("EndMove", "s1:1"), True)],
    ids=["before the commit point", "after it"],
)
def test_a_move_that_is_interrupted_says_how_it_ended(
    servers: MovingServers, interrupted: tuple[str, str], is_committed: bool
) -> None:
    servers.begin()
    move, ready_s = servers.exchange(), {}

    class Interrupted(MovingTransport):
        def call(self, server, call, argument, **options):
            endpoint = self.shard_map.endpoint_of(server)
            if not ready_s and (call.name, endpoint) == interrupted:
                ready_s[server] = None
                raise KeyboardInterrupt
            ready_s.update({server: options.get("ready_s")} if ready_s else {})
            return super().call(server, call, argument, **options)

    move._transport = Interrupted(servers)
    with pytest.raises(KeyboardInterrupt):
        move.run()

    assert move.is_committed is is_committed
    # Who is away, as others may be, is not waited for.
    assert ready_s[1] == (None if is_committed else ASK_S)
    assert servers.handlers["s0:1"].engine.shard_map.epoch == 1 + is_committed


@pytest.mark.parametrize("step", [None, 0], ids=["on arrival", "in steps"])
def test_calls_wait_from_the_hold_on_but_for_a_step_all_wait_anyway(servers, step):
    servers.begin()
    servers.client.push_grad(ones(), push_id(sequence=0), at=step).result()
    move, since = servers.exchange(), []
    hold_at = move._hold_at
    move._hold_at = lambda *phase: (since.append(move._held_at), hold_at(*phase))[1]
    move.run()
    at_hold, at_drain, at_close = since
    assert at_hold == at_drain
    assert (at_hold == at_close) == (step is None)


def test_rows_that_come_after_the_plan_are_copied_while_all_train(servers: MovingServers) -> None:
    servers.begin()
    move, sequence = servers.exchange(), iter(range(100))
    held: list[int] = []

    def train(_: str, call: calls.Call[Any, Any], argument: Any) -> None:
        if call.name == "BeginMove" and not held:
            held.append(0)
            for start in range(0, 300_000, 50_000):
                keys = np.arange(start, start + 50_000, dtype=np.uint64)
                grad = SparseGrad(keys, np.ones((keys.size, 1), np.float32), 1)
                gradients = Gradients(sparse={SPEC.name: grad}, dense={})
                servers.client.push_grad(gradients, push_id(sequence=next(sequence))).result()
        if call.name == "HoldMove":
            move._transport.before = lambda *_: held.append(move.progress.copied_rows)

    move._transport.before = train
    move.run()

    assert held[1] == 300_000
