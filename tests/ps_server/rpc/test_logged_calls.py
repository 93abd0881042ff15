"""Which calls the update log has: each that changes a server, seen by what a recovery makes of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import LogError, OverloadedError, ProtocolError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.placement import FIRST_EPOCH, NO_SERVER, ShardMap, shard_of
from ctr_ps.protos.spec import AdmissionSpec, StatisticsSpec
from ctr_ps.protos.store import BlockState, Message, ReduceOp, RowStates, StateChunk
from ctr_ps.protos.store.moves import Cut, Moved, MovedCounters, MovedRows, Phase
from ctr_ps.protos.store.state_transfer import stretch_of
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import CALLS, Call
from ctr_ps.protos.wire.security.access import Access
from ctr_ps.ps_server.coordination.push_ledger import progress_of
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import state_records
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import DEEP, KEYS, TOWER, in_process, member, push_id, trained_chain
from tests.support.update_logs import begun_log, recovered

Calls = Sequence[tuple[Call[Any, Any], Any]]

GRADIENTS = SparseGrad(KEYS, np.ones((KEYS.size, DEEP.dim), np.float32), 1)
ROWS = RowStates(
    keys=KEYS[:1],
    weights=np.ones((1, DEEP.dim), np.float32),
    state=np.ones((1, DEEP.dim), np.float32),
    optimizer=DEEP.optimizer.name,
)
PUSH = (
    calls.PUSH_GRAD,
    requests.PushGrad(
        chunk=PushChunk([("deep", GRADIENTS)], []),
        push_id=push_id(sequence=0),
        shard_map_epoch=FIRST_EPOCH,
    ),
)
POST = (
    calls.POST,
    requests.Post(
        exchange="rows",
        message=Message(sender=0, receiver=1, sequence=0, content=b"a"),
        member=member(0),
    ),
)

FILTERED = AdmissionSpec(threshold=3, counter="bloom", expected_keys=200)
ADAM = optimizer_of(TOWER.optimizer)
CLOSE = (
    calls.HOLD_MOVE,
    requests.HoldMove(token="m", number=1, phase=Phase.CLOSE, cut=Cut()),
)
NEXT_MAP = replace(ShardMap.of(1, ("ps-0:1",)), epoch=FIRST_EPOCH + 1)
PIECE = BlockState(
    weights=np.full(TOWER.length, 0.5, np.float32),
    element_state=np.ones((ADAM.num_slots, TOWER.length), np.float32),
    scalars=np.array(ADAM.initial_scalars, np.float32),
    optimizer=TOWER.optimizer.name,
)


def move(_: Path) -> Calls:
    """To a map with the same server, whose piece of the block is another."""
    piece = Moved(blocks=[("tower", 0, PIECE)])
    return [
        PUSH,
        (calls.BEGIN_MOVE, requests.BeginMove(token="m", shard_map=NEXT_MAP)),
        (calls.PUT_MOVED, requests.PutMoved(token="m", number=1, moved=piece)),
        CLOSE,
        (calls.PREPARE_MOVE, requests.PrepareMove(token="m", server=0, progress={})),
        (calls.END_MOVE, requests.EndMove(token="m", is_committed=True)),
    ]


CHANGES: dict[str, Callable[[Path], Calls]] = {
    "Join": lambda _: [(calls.JOIN, requests.Join(member=member(1), terms={}))],
    "CreateTable": lambda _: [
        (calls.CREATE_TABLE, requests.CreateTable(spec=replace(DEEP, name="more")))
    ],
    "CreateDense": lambda _: [
        (calls.CREATE_DENSE, requests.CreateDense(spec=replace(TOWER, name="more"), values=None))
    ],
    "PushGrad": lambda _: [PUSH],
    "PushState": lambda _: [
        (
            calls.PUSH_STATE,
            requests.PushState(
                chunk=StateChunk([("deep", ROWS)], []),
                push_id=push_id(sequence=0),
                shard_map_epoch=FIRST_EPOCH,
            ),
        )
    ],
    "Post": lambda _: [POST],
    "Take": lambda _: [
        POST,
        (calls.TAKE, requests.Take(exchange="rows", member=member(1), received=1)),
    ],
    "Barrier": lambda _: [
        (calls.BARRIER, requests.Barrier(name="start", member=member(), step=0, number=1))
    ],
    "AllReduce": lambda _: [
        (
            calls.ALL_REDUCE,
            requests.AllReduce(
                name="sum",
                member=member(),
                values=np.ones(1),
                op=ReduceOp.SUM,
                step=0,
                number=1,
            ),
        )
    ],
    "Advance": lambda _: [
        (calls.ADVANCE, requests.Advance(member=member(), clock=7, at_least=0, after_barrier=0))
    ],
    "TakeFile": lambda _: [
        (
            calls.TAKE_FILE,
            requests.TakeFile(member=member(), pass_number=1, num_files=3, received=0),
        )
    ],
    "Leave": lambda _: [(calls.LEAVE, requests.Leave(member=member(), step=0))],
    "Load": lambda folder: [
        (calls.LOAD, requests.Load(url=f"{folder}/model/0", member=member(), number=1))
    ],
    "Resume": lambda _: [
        (
            calls.RESUME,
            requests.Resume(
                version=70,
                batches=90,
                progress={0: progress_of(push_id(sequence=6))},
                member=member(),
            ),
        )
    ],
    "Shrink": lambda _: [
        PUSH,
        (calls.SHRINK, requests.Shrink(member=member(), number=1, max_norm=1e9)),
    ],
    "BeginMove": move,
    "PutMoved": move,
    "PrepareMove": move,
    "EndMove": move,
}
"""Calls that change a server of two workers, of which the last or one of a move is named; given a folder."""

NOT_LOGGED = {
    "Renew": "that a process keeps its place has a record of its own",
    "PullChanged": "of a server that was restarted it is unknown what changed, and all rows are fetched",
    "PullState": "it reads",
    "PushPull": "its parts are logged",
    "WaitVersion": "it reads",
    "Abort": "the job ends, and its log",
    "CheckFolder": "it reads",
    "Snapshot": "a segment begins with it",
    "Save": "it has a record of its own",
    "TakeMoved": "it reads",
    "HoldMove": "a server that was restarted holds no move but one that is prepared",
    "GetJobState": "it reads",
}
"""Calls that need more than a reader's access, and why no log has them."""


State = tuple[list[Record], str]


def state_of(store: ParameterStore, handlers: Handlers) -> State:
    """Returns all that a server knows, as a segment begins with it, and the digest of what it holds."""
    return state_records(store.engine.state(), handlers.completed(), base=""), store.digest()


def before_and_after_a_restart(name: str, folder: Path) -> tuple[State, State]:
    """Carries out a call of CHANGES, and those before it, on a server with a log, and recovers another."""
    trained_chain(folder / "model", 0)
    store = in_process(num_workers=2)
    handlers, log = begun_log(folder / "log", store)
    for worker in range(1 if name == "Join" else 2):
        handlers.start(calls.JOIN, requests.Join(member=member(worker), terms={}))
    for call, argument in CHANGES[name](folder):
        handlers.start(call, argument)
    log.close()
    again = in_process(num_workers=2)
    return state_of(store, handlers), state_of(again, recovered(folder / "log", again))


@contextmanager
def not_logged(name: str) -> Iterator[None]:
    object.__setattr__(CALLS[name], "is_logged", False)
    try:
        yield
    finally:
        object.__setattr__(CALLS[name], "is_logged", True)


@pytest.mark.parametrize("name", CHANGES)
def test_logged_call_is_carried_out_again(name: str, tmp_path: Path) -> None:
    before, after = before_and_after_a_restart(name, tmp_path)

    assert after == before


@pytest.mark.parametrize("name", CHANGES)
def test_recovery_would_lose_each_logged_call_if_it_were_not(name: str, tmp_path: Path) -> None:
    with not_logged(name):
        try:
            before, after = before_and_after_a_restart(name, tmp_path)
        except LogError:  # a call after it cannot be carried out
            return

    assert after != before


def rows_of_width(weights: int) -> MovedRows:
    state = np.ones((1, DEEP.dim), np.float32)
    arrays = {"weights": np.ones((1, weights), np.float32), "statistics": state[:, :0]}
    return MovedRows(table="deep", keys=KEYS[:1], state=state, removed=KEYS[:0], **arrays)


UNFIT = {
    "width": Moved(rows=[rows_of_width(DEEP.dim + 1)]),
    "counters": Moved(counters=[MovedCounters("counted", 2, np.zeros(1, np.uint8), 0)]),
    "shard": Moved(counters=[MovedCounters("counted", 2**31, np.zeros(1, np.uint8), 0)]),
    "nothing": Moved(),
    "short": Moved(blocks=[("tower", 0, stretch_of(PIECE, 0, 3))]),
}


def prepare_with(moved: Moved, handlers: Handlers) -> None:
    handlers.start(calls.PUT_MOVED, requests.PutMoved(token="m", number=1, moved=moved))
    handlers.start(*CLOSE)
    handlers.start(calls.PREPARE_MOVE, requests.PrepareMove(token="m", server=0, progress={}))


@pytest.mark.parametrize("name", UNFIT)
def test_move_that_does_not_fit_is_refused_and_refused_again(name: str, tmp_path: Path) -> None:
    """One that a recovery cannot refuse ends it, and the log is of no use any more."""
    counted = replace(DEEP, name="counted", statistics=StatisticsSpec(), admission=FILTERED)
    store = in_process(num_workers=2)
    handlers, log = begun_log(tmp_path / "log", store)
    handlers.start(calls.JOIN, requests.Join(member=member(), terms={}))
    handlers.start(calls.CREATE_TABLE, requests.CreateTable(spec=counted))
    before = state_of(store, handlers)
    handlers.start(calls.BEGIN_MOVE, requests.BeginMove(token="m", shard_map=NEXT_MAP))
    with pytest.raises(ProtocolError):
        prepare_with(UNFIT[name], handlers)
    log.close()

    again = in_process(num_workers=2)
    assert state_of(again, recovered(tmp_path / "log", again)) == before


@pytest.mark.parametrize("is_prepared", [False, True])
def test_server_that_was_restarted_goes_on_with_a_move_only_if_prepared(
    is_prepared: bool, tmp_path: Path
) -> None:
    """Nothing has waited there, so it may have pushes that are not in the cut."""
    handlers, log = begun_log(tmp_path, in_process(num_workers=2))
    _, begin, put, close, prepare, _ = move(tmp_path)
    for each in (begin, put, *([close, prepare] if is_prepared else [])):
        handlers.start(*each)
    log.close()

    again = recovered(tmp_path, in_process(num_workers=2))
    again.moves.recovered()

    if is_prepared:
        again.start(*prepare)
        return
    for phase in (Phase.HOLD, Phase.DRAIN, Phase.CLOSE):
        with pytest.raises(ProtocolError, match="was restarted"):
            again.start(
                calls.HOLD_MOVE, requests.HoldMove(token="m", number=1, phase=phase, cut=Cut())
            )
    with pytest.raises(ProtocolError, match="was restarted"):
        again.start(*prepare)


def test_recovery_puts_what_a_full_server_took(tmp_path: Path) -> None:
    """Whatever its limit is: else rows of a move that has ended would be missing."""

    def puts(memory_limit: int | None) -> ParameterStore:
        return in_process(server_index=NO_SERVER, memory_limit=memory_limit)

    store = puts(None)
    handlers, log = begun_log(tmp_path / "log", store)
    handlers.start(calls.BEGIN_MOVE, requests.BeginMove(token="m", shard_map=NEXT_MAP))
    put = requests.PutMoved(token="m", number=1, moved=Moved(rows=[rows_of_width(DEEP.dim)]))
    handlers.start(calls.PUT_MOVED, put)
    log.close()
    full = puts(1)
    with pytest.raises(OverloadedError, match="memory limit of 1"):
        recovered(tmp_path / "log", full).start(calls.PUT_MOVED, put)

    for each in (store, full):
        shard = int(shard_of(KEYS[0], DEEP.num_shards))
        assert each.engine.parameters.table("deep").export_shard(shard).keys.size == 1


def test_every_call_that_changes_a_server_is_logged() -> None:
    assert {name for name, call in CALLS.items() if call.is_logged} == CHANGES.keys()
    others = {
        name for name, call in CALLS.items() if not (call.is_logged or call.access is Access.READER)
    }
    assert others == NOT_LOGGED.keys()
