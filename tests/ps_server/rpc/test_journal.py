"""A server that keeps an update log: its snapshots, what waits for them, and what it recovers from."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import CheckpointError, LogError, OverloadedError, ProtocolError
from ctr_ps.protos.futures import Future
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.placement import FIRST_EPOCH, NO_SERVER
from ctr_ps.protos.store import (
    InferenceSettings,
    Joined,
    Lease,
    Member,
    Message,
    ReduceOp,
    RowStates,
    SaveRequest,
    StateChunk,
    WorkerLoss,
)
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.coordination.push_ledger import progress_of
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.update_log import UpdateLog
from ctr_ps.ps_server.engine.journal import BACK, BACK_JSON, NEW_JOB, NO_JOURNAL, Journal
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import UpdateJournal, state_records
from ctr_ps.ps_server.settings import LogSync
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.stores import (
    DEEP,
    INCARNATION,
    KEYS,
    TOWER,
    assert_same_parameters,
    declare,
    in_process,
    member,
    push_id,
    train,
    trained_chain,
)
from tests.support.update_logs import LIMIT_S, begun_log, recovered


def test_calls_are_carried_out_while_the_log_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of minutes takes seconds to sync; only what comes meanwhile is synced while calls wait."""
    store = ParameterStore()
    handlers, log = begun_log(tmp_path, store)
    carried_out = threading.Event()
    found: list[bool] = []

    def call() -> None:
        with handlers.engine.journal.written(NEW_JOB, b""):
            carried_out.set()

    thread = threading.Thread(target=call)

    def sync() -> None:
        if not found:
            thread.start()
            found.append(carried_out.wait(LIMIT_S))

    monkeypatch.setattr(log, "sync", sync)
    store.engine.snapshot("token")
    thread.join()
    log.close()

    assert found == [True]
    assert log.num_appended == 1


def test_snapshot_that_is_asked_for_twice_begins_one_segment(tmp_path: Path) -> None:
    """A second one would have pushes that came since, which the checkpoint has not."""
    handlers, log = begun_log(tmp_path, ParameterStore())
    join(handlers, member()).result()
    snapshot = requests.Snapshot(token="token", member=member())

    handlers.start(calls.SNAPSHOT, snapshot).result()
    handlers.start(calls.SNAPSHOT, snapshot).result()

    assert log.segment == 2
    log.close()


@pytest.mark.parametrize("call", [calls.LOAD, calls.SHRINK], ids=["Load", "Shrink"])
def test_snapshot_is_taken_while_a_call_waits_until_it_is_saved(
    call: Call[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call may not keep the journal meanwhile, which the snapshot needs alone."""
    trained_chain(tmp_path / "model", 0)
    requested = {
        "Load": requests.Load(url=f"{tmp_path}/model/0", member=member(), number=1),
        "Shrink": requests.Shrink(member=member(), number=1),
    }
    store = in_process(wait_limit_s=LIMIT_S)
    handlers, log = begun_log(tmp_path / "log", store)
    join(handlers, member()).result()
    waits = threading.Event()
    between_saves = store.engine.snapshots.between_saves

    def tell(what: str) -> AbstractContextManager[None]:
        waits.set()
        return between_saves(what)

    monkeypatch.setattr(store.engine.snapshots, "between_saves", tell)
    thread = threading.Thread(target=lambda: handlers.start(call, requested[call.name]).result())
    drop = store.engine.snapshots._drop

    def start_the_other() -> None:
        """The snapshot has its turn, and not yet the journal."""
        drop()
        thread.start()
        assert waits.wait(LIMIT_S)

    monkeypatch.setattr(store.engine.snapshots, "_drop", start_the_other)
    handlers.start(calls.SNAPSHOT, requests.Snapshot(token="token", member=member())).result()
    with store.engine.snapshots.writing("token"):
        assert thread.is_alive()
    thread.join()
    log.close()

    assert handlers.completed().shrinks[0] or handlers.completed().loads[0]


def test_call_that_fails_for_another_reason_ends_the_recovery(tmp_path: Path) -> None:
    """A server that went on without the checkpoint it had loaded would have fresh rows."""
    handlers, log = begun_log(tmp_path / "log", ParameterStore())
    join(handlers, member()).result()
    load = requests.Load(url=f"{tmp_path}/away", member=member(), number=1)
    with pytest.raises(CheckpointError):
        handlers.start(calls.LOAD, load)
    log.close()

    with pytest.raises(LogError, match=r"cannot replay Load of the update log: .*away"):
        recovered(tmp_path / "log", ParameterStore())


def test_call_of_another_version_ends_the_recovery(tmp_path: Path) -> None:
    _, log = begun_log(tmp_path / "log", ParameterStore())
    log.append("Rename", b"")
    log.close()

    with pytest.raises(LogError, match=r"^the update log has a call 'Rename', which this version"):
        recovered(tmp_path / "log", ParameterStore())


def begin_segment(handlers: Handlers, log: UpdateLog, store: ParameterStore) -> None:
    """Begins a segment, as a snapshot does, of a store whose parameters are fresh."""
    log.begin_segment(state_records(store.engine.state(), handlers.completed(), base=""))


def join(
    handlers: Handlers, who: Member, lease: Lease | None = None, *, only_asks: bool = False
) -> Future[Joined]:
    request = requests.Join(member=who, terms={}, lease=lease, only_asks=only_asks)
    return handlers.start(calls.JOIN, request)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("in_new_segment", [False, True])
def test_load_that_comes_late_does_not_undo_the_training_since(
    is_restarted: bool, in_new_segment: bool, tmp_path: Path
) -> None:
    trained_chain(tmp_path / "model", 0)
    store = in_process()
    handlers, log = begun_log(tmp_path / "log", store)
    join(handlers, member()).result()
    load = requests.Load(url=f"{tmp_path}/model/0", member=member(), number=1)
    handlers.start(calls.LOAD, load).result()
    if in_new_segment:
        begin_segment(handlers, log, store)
    log.close()
    if is_restarted:
        store = in_process()
        handlers = recovered(tmp_path / "log", store)
    else:
        handlers.engine.journal = NO_JOURNAL
    train(store, 5)
    trained = store.digest()

    handlers.start(calls.LOAD, load).result()

    assert store.digest() == trained
    again = replace(load, number=2)
    handlers.start(calls.LOAD, again).result()
    assert store.digest() != trained, "another load"


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ({"server_index": 1, "num_servers": 2}, "server 1 of 2, for 2 workers"),
        ({"num_servers": 3}, "server 0 of 3, for 2 workers"),
        ({"num_servers": 2, "num_workers": 3}, "server 0 of 2, for 3 workers"),
        ({"server_index": NO_SERVER}, "spare server, for 2 workers"),
    ],
)
def test_log_of_another_server_is_refused(
    server: dict[str, int], named: str, tmp_path: Path
) -> None:
    """Nearly all its calls would be refused again, and an empty server would serve."""
    _, log = begun_log(tmp_path, ParameterStore(num_workers=2, num_servers=2))
    log.close()
    other = ParameterStore(**{"num_workers": 2, **server})

    with pytest.raises(
        LogError, match=f"belongs to server 0 of 2, for 2 workers, but this process is {named}: "
    ):
        recovered(tmp_path, other)


@pytest.mark.parametrize("in_new_segment", [False, True])
def test_values_that_were_given_are_there_after_a_restart(
    in_new_segment: bool, tmp_path: Path
) -> None:
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, member()).result()
    spec = replace(TOWER, name="given", values_digest=5)
    values = np.arange(spec.length, dtype=np.float32)
    declaration = requests.CreateDense(spec=spec, values=values)
    handlers.start(calls.CREATE_DENSE, declaration).result()
    if in_new_segment:
        log.begin_segment(state_records(store.engine.state(), handlers.completed(), base=""))
    log.close()

    store = in_process()
    recovered(tmp_path, store)

    out = np.empty(spec.length, np.float32)
    store.pull_dense({"given": out}).result()
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("in_new_segment", [False, True])
@pytest.mark.parametrize("received", [0, 1])
def test_messages_between_workers_are_on_their_way_after_a_restart(
    received: int, in_new_segment: bool, tmp_path: Path
) -> None:
    """A worker that was sent some, another that has ended and left, and messages that come after."""
    store = in_process(num_workers=2)
    handlers, log = begun_log(tmp_path, store)
    for worker in range(2):
        join(handlers, member(worker)).result()

    def post(sender: int, sequence: int, content: bytes | None) -> None:
        message = Message(sender=sender, receiver=1, sequence=sequence, content=content)
        request = requests.Post(exchange="rows", message=message, member=member(sender))
        handlers.start(calls.POST, request).result()

    def take(received: int) -> list[bytes | None]:
        request = requests.Take(exchange="rows", member=member(1), received=received)
        return [each.content for each in handlers.start(calls.TAKE, request).result()]

    for sequence, content in enumerate([b"a", b"b", None]):
        post(0, sequence, content)
    post(1, 0, b"own")
    assert take(received) == [b"a", b"b", b"own"][received:]
    handlers.start(calls.LEAVE, requests.Leave(member=member(0), step=0)).result()
    if in_new_segment:
        begin_segment(handlers, log, store)
    log.close()

    handlers = recovered(tmp_path, in_process(num_workers=2))
    post(1, 0, b"own")  # its answer was lost
    post(1, 1, b"last")

    assert take(received) == [b"a", b"b", b"own", b"last"][received:]
    post(1, 2, None)
    assert take(4) == []


def test_changed_rows_that_are_asked_for_late_are_not_taken() -> None:
    """A delayed copy of a call: nobody reads its answer, and the rows would count as known."""
    store = ParameterStore(num_workers=2)
    store.create_table(replace(DEEP, records_changes=True))
    handlers = Handlers(store.engine)
    join(handlers, member()).result()
    ask = requests.PullChanged(
        tables=["deep"], member=member(), max_rows=100, shard_map_epoch=FIRST_EPOCH, number=1
    )
    handlers.start(calls.PULL_CHANGED, ask).result()
    handlers.start(calls.PULL_CHANGED, replace(ask, number=2)).result()
    grad = SparseGrad(KEYS[:9], np.ones((9, DEEP.dim), np.float32), 1)
    store.push_grad(Gradients({"deep": grad}), push_id(1)).result()

    with pytest.raises(ProtocolError, match="PullChanged 1 of worker 0 arrived after a later one"):
        handlers.start(calls.PULL_CHANGED, ask)

    changed = handlers.start(calls.PULL_CHANGED, replace(ask, number=3)).result()
    assert changed.rows["deep"][0].size == 9


OLD, NEW = Member(0, 5), Member(0, 50)
WAIT = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)


PLACES = {
    "back-before-another-comes": (["silent", "calls", "ask", "join"], OLD),
    "back-while-another-waits": (["ask", "calls", "silent"], OLD),
    "back-when-another-was-told-to-take-it": (["ask", "silent", "calls", "join"], OLD),
    "back-and-lost-again": (["silent", "calls", "ask", "silent", "join"], NEW),
    "back-after-another-came": (["ask", "silent", "join", "calls"], NEW),
    "ends-while-another-waits": (["ask", "ends", "tick", "join"], NEW),
    "waited-for-in-a-segment-before": (["ask", "segment", "silent", "join"], NEW),
    "back-in-a-segment-before": (["silent", "calls", "segment", "join"], OLD),
    "lost-in-a-segment-before": (["silent", "segment", "join"], NEW),
}


@pytest.mark.parametrize("events", PLACES)
def test_place_has_the_same_process_after_a_restart(events: str, tmp_path: Path) -> None:
    """Signs of life decide who gets a place, and most calls that are one are not in the log."""
    happened, holder = PLACES[events]
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, OLD, WAIT).result()
    for event in happened:
        match event:
            case "ask":
                join(handlers, NEW, WAIT, only_asks=True)
            case "join":
                with suppress(ProtocolError):
                    join(handlers, NEW, WAIT)
            case "silent":
                handlers.engine.pass_time(WAIT.seconds)
            case "tick":
                handlers.engine.pass_time(0.25)
            case "ends":
                handlers.start(calls.RENEW, requests.Renew(member=OLD, is_last=True))
            case "segment":
                begin_segment(handlers, log, store)
            case "calls":
                with suppress(ProtocolError):
                    handlers.start(calls.RENEW, requests.Renew(member=OLD))
    log.close()

    for each in (store, recovered_store(tmp_path)):
        each.engine.job.require_place(holder)
        with pytest.raises(ProtocolError, match="another process has taken the place of"):
            each.engine.job.require_place(OLD if holder is NEW else NEW)


def recovered_store(folder: Path, **settings: int) -> ParameterStore:
    store = in_process(**settings)
    recovered(folder, store)
    return store


@pytest.mark.parametrize("in_new_segment", [False, True])
def test_arrival_of_a_replaced_process_does_not_count_after_a_restart(
    in_new_segment: bool, tmp_path: Path
) -> None:
    """The process in its place may not have loaded yet."""
    store = in_process(num_workers=2)
    handlers, log = begun_log(tmp_path, store)
    for each in (OLD, member(1)):
        join(handlers, each, WAIT)
    arrival = requests.Barrier(name="start", member=OLD, step=0, number=1)
    handlers.start(calls.BARRIER, arrival)
    handlers.engine.pass_time(WAIT.seconds)
    join(handlers, NEW, WAIT).result()
    if in_new_segment:
        begin_segment(handlers, log, store)
    log.close()

    store = in_process(num_workers=2)
    handlers = recovered(tmp_path, store)
    other = handlers.start(calls.BARRIER, replace(arrival, member=member(1)))

    assert not other.done()
    handlers.start(calls.BARRIER, replace(arrival, member=NEW)).result()
    assert other.result() == 0


def test_sign_of_life_of_a_process_without_a_place_is_refused_again(tmp_path: Path) -> None:
    handlers, log = begun_log(tmp_path, in_process())
    join(handlers, OLD, WAIT).result()
    log.append(BACK, BACK_JSON.dump_json(NEW))
    log.close()

    recovered_store(tmp_path).engine.job.require_place(OLD)


def test_push_that_was_refused_for_want_of_memory_is_refused_again(tmp_path: Path) -> None:
    settings = {"memory_limit": 1}
    handlers, log = begun_log(tmp_path, in_process(**settings))
    join(handlers, member()).result()
    with pytest.raises(OverloadedError):
        handlers.start(calls.PUSH_GRAD, push_of_all(0))
    log.close()

    store = recovered_store(tmp_path, **settings)

    assert store.status().tables["deep"].rows == 0


def test_logged_call_of_a_lost_process_is_no_sign_of_life(tmp_path: Path) -> None:
    """It may have come before the loss and have been written after it."""
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, OLD, WAIT).result()
    handlers.engine.pass_time(WAIT.seconds)
    advance = requests.Advance(member=OLD, clock=1, at_least=0, after_barrier=0)
    handlers._carry_out(calls.ADVANCE, advance)
    join(handlers, NEW, WAIT).result()
    log.close()

    recovered_store(tmp_path).engine.job.require_place(NEW)


def chunk_of_gradients(chunk: int) -> requests.PushGrad:
    """Returns chunk 0, with a row, or 1, the empty last one."""
    grad = SparseGrad(KEYS[:1], np.ones((1, DEEP.dim), np.float32), 1)
    return requests.PushGrad(
        chunk=PushChunk([("deep", grad)] * (1 - chunk), [], chunk, 2),
        push_id=push_id(sequence=0),
        shard_map_epoch=FIRST_EPOCH,
    )


def test_gradients_that_came_as_bfloat16_are_the_same_after_a_restart(tmp_path: Path) -> None:
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, member()).result()
    values = np.full((1, DEEP.dim), 0.1, np.float32)
    push = requests.PushGrad(
        chunk=PushChunk([("deep", SparseGrad(KEYS[:1], values, 1))], [], bfloat16=True),
        push_id=push_id(sequence=0),
        shard_map_epoch=FIRST_EPOCH,
    )
    payload = calls.PUSH_GRAD.request.encode(push)
    handlers.start(calls.PUSH_GRAD, calls.PUSH_GRAD.request.decode(payload), payload).result()
    log.close()

    assert recovered_store(tmp_path).digest() == store.digest()


def chunk_of_state(chunk: int) -> requests.PushState:
    """As `chunk_of_gradients`."""
    rows = RowStates(
        keys=KEYS[:1],
        weights=np.ones((1, DEEP.dim), np.float32),
        state=np.ones((1, DEEP.dim), np.float32),
        optimizer=DEEP.optimizer.name,
    )
    return requests.PushState(
        chunk=StateChunk([("deep", rows)] * (1 - chunk), [], chunk, 2),
        push_id=push_id(sequence=0),
        shard_map_epoch=FIRST_EPOCH,
    )


@pytest.mark.parametrize("in_new_segment", [False, True])
@pytest.mark.parametrize(
    ("call", "chunk_of"),
    [(calls.PUSH_GRAD, chunk_of_gradients), (calls.PUSH_STATE, chunk_of_state)],
    ids=["gradients", "state"],
)
def test_push_whose_chunks_come_before_and_after_a_restart_is_applied(
    call: Call[Any, Any], chunk_of: Callable[[int], Any], in_new_segment: bool, tmp_path: Path
) -> None:
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, member()).result()
    handlers.start(call, chunk_of(0))
    if in_new_segment:
        begin_segment(handlers, log, store)
    log.close()

    store = in_process()
    answer = recovered(tmp_path, store).start(call, chunk_of(1))

    assert answer.result() == 1
    assert store.status().tables["deep"].rows == 1


@pytest.mark.parametrize("in_new_segment", [False, True])
def test_shrink_that_comes_again_after_a_restart_is_answered_as_before(
    in_new_segment: bool, tmp_path: Path
) -> None:
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, member()).result()
    shrink = requests.Shrink(member=member(), number=1, max_norm=1e9)
    handlers.start(calls.PUSH_GRAD, push_of_all(0)).result()
    shrunk = handlers.start(calls.SHRINK, shrink).result()
    if in_new_segment:
        begin_segment(handlers, log, store)
    handlers.start(calls.PUSH_GRAD, push_of_all(1)).result()
    log.close()

    store = in_process()
    handlers = recovered(tmp_path, store)

    assert handlers.start(calls.SHRINK, shrink).result() == shrunk
    assert store.status().tables["deep"].rows == KEYS.size


def push_of_all(sequence: int) -> requests.PushGrad:
    """Returns a push that gives every key its row."""
    grad = SparseGrad(KEYS, np.ones((KEYS.size, DEEP.dim), np.float32), 1)
    return requests.PushGrad(
        chunk=PushChunk([("deep", grad)], []),
        push_id=push_id(sequence=sequence),
        shard_map_epoch=FIRST_EPOCH,
    )


def test_shrink_of_the_next_job_is_another_one() -> None:
    """Workers of a server that stays number their shrinks from 1 in each job."""
    store = in_process()
    handlers = Handlers(store.engine)
    for job in range(2):
        join(handlers, member()).result()
        handlers.start(calls.PUSH_GRAD, push_of_all(job)).result()
        shrink = requests.Shrink(member=member(), number=1, max_norm=1e9)

        handlers.start(calls.SHRINK, shrink).result()

        assert store.status().tables["deep"].rows == 0
        handlers.start(calls.LEAVE, requests.Leave(member=member(), step=0)).result()
        handlers.engine.begin_job()


def test_run_that_was_resumed_goes_on_at_its_version_after_a_restart(tmp_path: Path) -> None:
    handlers, log = begun_log(tmp_path, in_process())
    join(handlers, member()).result()
    progress = {0: progress_of(push_id(sequence=6))}
    resume = requests.Resume(version=70, batches=90, progress=progress, member=member())
    handlers.start(calls.RESUME, resume).result()
    log.close()

    status = recovered_store(tmp_path).status()

    assert (status.version, status.batches, status.progress) == (70, 90, progress)


def test_nobody_waits_again_for_a_worker_that_was_far_enough_before_a_restart(
    tmp_path: Path,
) -> None:
    handlers, log = begun_log(tmp_path, in_process(num_workers=2))
    for worker in range(2):
        join(handlers, member(worker)).result()
    advance = requests.Advance(member=member(0), clock=7, at_least=0, after_barrier=0)
    handlers.start(calls.ADVANCE, advance).result()
    log.close()

    store = in_process(num_workers=2, wait_limit_s=0.0)
    handlers = recovered(tmp_path, store)
    other = replace(advance, member=member(1), clock=9, at_least=7)

    assert handlers.start(calls.ADVANCE, other).result() == 7


def test_numbers_that_are_infinite_or_none_are_answered_alike_after_a_restart(
    tmp_path: Path,
) -> None:
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, member()).result()
    reduction = requests.AllReduce(
        name="start",
        member=member(),
        values=np.array([-np.inf, np.inf, np.nan, 0.1]),
        op=ReduceOp.MAX,
        step=0,
        number=1,
        remember=True,
    )
    before = handlers.start(calls.ALL_REDUCE, reduction).result()
    begin_segment(handlers, log, store)
    log.close()

    handlers = recovered(tmp_path, in_process())
    after = handlers.start(calls.ALL_REDUCE, reduction).result()

    assert after.version == before.version
    np.testing.assert_array_equal(after.values, before.values)
    np.testing.assert_array_equal(after.values, reduction.values)


def test_jobs_of_a_server_that_stays_are_counted_through_a_restart(tmp_path: Path) -> None:
    """Its clients compare the numbers of all servers."""
    handlers, log = begun_log(tmp_path, in_process())
    join(handlers, member()).result()
    handlers.start(calls.LEAVE, requests.Leave(member=member(), step=0)).result()
    handlers.engine.begin_job()
    log.close()

    store = recovered_store(tmp_path)

    assert store.join(0, INCARNATION, terms={}).result().jobs_before == 1


def test_worker_is_not_lost_where_the_log_cannot_say_so(tmp_path: Path) -> None:
    """Else a restarted server would still have it in its place."""
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, OLD, WAIT).result()
    log.close()

    with pytest.raises(LogError):
        handlers.engine.pass_time(WAIT.seconds)

    assert store.engine.job.admit(OLD), "it is not lost"


def saving_client(folder: Path) -> tuple[ClusterClient, LocalTransport, UpdateLog]:
    """Returns a client of one server that keeps a log."""
    store = in_process()
    transport = LocalTransport([store])
    client = joined_client(transport)
    (handlers,) = transport._handlers
    head = state_records(store.engine.state(), handlers.completed(), base="")
    log = UpdateLog.create(read_log(folder), sync=LogSync.OS, head=head)
    handlers.engine.journal = UpdateJournal(log, handlers.completed, wait_limit_s=LIMIT_S)
    declare(client)
    return client, transport, log


@pytest.mark.parametrize(("is_published", "segments"), [(True, (2, 3)), (False, (1, 2, 3))])
def test_segments_before_a_checkpoint_are_removed_once_it_is_published(
    is_published: bool, segments: tuple[int, ...], tmp_path: Path
) -> None:
    """A save may fail after this server has written its share: then nothing else has its parameters."""
    client, _, log = saving_client(tmp_path / "log")
    train(client, 0)
    client.save(SaveRequest(url=f"{tmp_path}/model/0"))
    if not is_published:
        (tmp_path / "model/0/MANIFEST.json").unlink()

    client.save(SaveRequest(url=f"{tmp_path}/model/1"))
    log.close()

    with closing(read_log(tmp_path / "log")) as saved:
        assert saved.segments == segments


def test_checkpoint_for_inference_is_none_to_recover_from(tmp_path: Path) -> None:
    client, transport, log = saving_client(tmp_path / "log")
    train(client, 0)
    for name in ("first", "second"):
        client.save(SaveRequest(url=f"{tmp_path}/{name}", inference=InferenceSettings()))
    log.close()

    assert_same_parameters(transport.stores[0], recovered_store(tmp_path / "log"))


def test_process_in_the_place_of_a_lost_one_asks_for_changed_rows_from_the_first_on() -> None:
    store = ParameterStore(num_workers=1)
    store.create_table(replace(DEEP, records_changes=True))
    handlers = Handlers(store.engine)
    join(handlers, OLD, WAIT).result()
    ask = requests.PullChanged(
        tables=["deep"], member=OLD, max_rows=100, shard_map_epoch=FIRST_EPOCH, number=5
    )
    handlers.start(calls.PULL_CHANGED, ask).result()
    handlers.engine.pass_time(WAIT.seconds)
    join(handlers, NEW, WAIT).result()

    first = replace(ask, member=NEW, number=1)

    assert handlers.start(calls.PULL_CHANGED, first).result().rows["deep"][0].size == 0


def test_journal_of_a_log_writes_all_that_a_journal_is_told():
    """`Journal` writes nothing: what was not overridden would be lost by a recovery."""
    told = {name for name, of in vars(Journal).items() if callable(of) and name[0] != "_"}
    assert told <= vars(UpdateJournal).keys()
    assert "written" in told
