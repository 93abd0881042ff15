"""How the client cuts, routes and puts together; that it is a store is tests/contract's business."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import (
    AbortedError,
    JobError,
    MovingError,
    PlaceLostError,
    ProtocolError,
    SpecConflictError,
    SpecError,
    TransportError,
    UnknownTableError,
    WrongServerError,
)
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES, MAX_NUMBERS_BYTES
from ctr_ps.protos.placement import FIRST_EPOCH, ShardMap
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import (
    RESTART,
    Joined,
    Lease,
    Member,
    Message,
    Missing,
    Pulled,
    ReduceOp,
    WorkerLoss,
)
from ctr_ps.protos.wire.calls import PUSH_PULL
from ctr_ps.protos.wire.requests import Advance, PushGrad
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster import placement
from ctr_ps.ps_worker.cluster.client import ClusterClient
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.stores import INCARNATION, declare, member, push_id, trained_chain

SGD = OptimizerSpec(name="sgd", params={"learning_rate": 0.1})
KEYS = np.arange(1000, dtype=np.uint64)
PUSH_ID = push_id(sequence=0)


POINTS = {
    "fresh": ([(0, 0), (0, 0)], True),
    "joined-around-a-resume": ([(0, 0), (0, 70)], True),
    "died-at-the-first-barrier": ([(1, 70), (0, 70)], True),
    "died-at-a-barrier": ([(3, 90), (2, 88)], True),
    "one-went-on-from-a-log": ([(1, 70), (0, 0)], False),
    "one-went-on-from-an-old-log": ([(0, 0), (5, 70)], False),
    "one-passed-more": ([(5, 90), (3, 90)], False),
}
"""What servers say of barriers passed and versions, and whether that is one job."""


@pytest.mark.parametrize("case", POINTS)
def test_process_joins_one_job(case):
    told, is_one_job = POINTS[case]
    transport = transport_to(2)
    transport.answers["Join"] = lambda server: Joined(
        barriers_passed=told[server][0], version=told[server][1]
    )
    client = ClusterClient(transport)

    joined = client.join(0, INCARNATION, terms={})

    if is_one_job:
        assert joined.result().barriers_passed == max(passed for passed, _ in told)
        assert joined.result().version == min(version for _, version in told)
        return
    with pytest.raises(ProtocolError, match=r"ps-0:1 barrier \d, .* update log of another job"):
        joined.result()
    with pytest.raises(ProtocolError, match="no worker has joined"):
        client.shrink()


WAIT = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)
FIRST, SECOND = 5, 50
"""Two processes in one place, by incarnation."""


def test_process_that_is_alive_for_one_server_keeps_its_place_on_all() -> None:
    """It was cut off from server 0 for longer than its lease, when a second one was started."""
    transport, first, second = two_processes()
    transport.stores[0].engine.lose([0])
    joining = second.join(0, SECOND, terms={}, lease=WAIT)

    first.renew(0)
    for store in transport.stores:
        assert not store.engine.job.pass_time(0.25)

    with pytest.raises(
        ProtocolError,
        match=r"another process, which is alive, has joined as .*: two processes have",
    ):
        joining.result()
    for store in transport.stores:
        store.engine.job.require_place(Member(0, FIRST))
        assert not store.status().lost


def test_place_that_is_lost_on_all_servers_is_taken_on_all() -> None:
    transport, first, second = two_processes()
    for store in transport.stores:
        store.engine.lose([0])

    second.join(0, SECOND, terms={}, lease=WAIT).result()

    for store in transport.stores:
        store.engine.job.require_place(Member(0, SECOND))
    with pytest.raises(PlaceLostError, match="another process has taken the place of"):
        first.renew(0)


def test_a_process_in_a_lost_ones_place_begins_again_at_the_newest_restart() -> None:
    transport, first, second = two_processes()
    names = ["start", "pass", RESTART, "pass", "pass", RESTART, "pass"]
    for name in names[:5]:
        first.barrier(name, 0, step=0).result()
    transport.calls.clear()
    first.barrier(RESTART, 0, step=0).result()
    (*_, (_, _, request)) = transport.calls
    transport.stores[0].engine.lose([0])
    transport.stores[1].engine.lose([0])

    joined = second.join(0, SECOND, terms={}, lease=WAIT).result()
    transport.calls.clear()
    for name in ("start", *names[5:]):
        second.barrier(name, 0, step=0).result()

    assert (request.number, joined.restart, joined.barriers_passed) == (6, 6, 6)
    told = [(each.name, each.number) for server, _, each in transport.calls if server == 1]
    assert told == [("start", 1), (RESTART, 6), ("pass", 7)]


def test_a_process_goes_on_where_the_server_that_knows_numbers_is() -> None:
    """The other one has passed a barrier more, whose numbers nobody knows."""
    transport = transport_to(2)
    told = [Joined(barriers_passed=9, restart=6), Joined(barriers_passed=10, restart=10)]
    transport.answers["Join"] = told.__getitem__

    joined = ClusterClient(transport).join(0, INCARNATION, terms={}).result()

    assert (joined.barriers_passed, joined.restart) == (9, 6)


def test_a_process_that_begins_at_a_restart_numbers_its_shrinks_as_the_lost_one() -> None:
    """Which has shrunk before it, too: a shrink of another number would be done once more."""
    transport, first, second = two_processes()
    first.barrier("start", 0, step=0).result()
    first.shrink()
    first.barrier("pass", 0, step=0).result()
    for _ in range(2):
        first.shrink()
    first.barrier(RESTART, 0, step=0).result()
    transport.calls.clear()
    first.shrink()
    first.shrink()
    done = [each.number for _, _, each in transport.calls]
    for store in transport.stores:
        store.engine.lose([0])

    second.join(0, SECOND, terms={}, lease=WAIT).result()
    for name in ("start", RESTART):
        second.barrier(name, 0, step=0).result()
    transport.calls.clear()
    second.shrink()
    second.shrink()

    assert [each.number for _, _, each in transport.calls] == done
    assert len({*done}) == 2


def test_place_that_is_taken_on_some_servers_is_given_back() -> None:
    """The process before is back on server 1, between the question and the answer."""
    transport, _, second = two_processes()
    for store in transport.stores:
        store.engine.lose([0])
    joining = second.join(0, SECOND, terms={}, lease=WAIT)
    with transport.stores[1].engine.calling(Member(0, FIRST)):
        pass

    with pytest.raises(ProtocolError, match="another process, which is alive"):
        joining.result()

    assert transport.stores[0].engine.job.pass_time(0.25) == [0], "its lease is over"
    transport.stores[1].engine.job.require_place(Member(0, FIRST))


def test_of_two_processes_that_come_for_a_free_place_one_has_it_on_all_servers() -> None:
    transport = transport_to(3, joins=False)
    joining = [
        ClusterClient(transport).join(0, each, terms={}, lease=WAIT) for each in (FIRST, SECOND)
    ]

    joining[0].result()

    with pytest.raises(ProtocolError, match="another process, which is alive"):
        joining[1].result()
    for store in transport.stores:
        store.engine.job.require_place(Member(0, FIRST))


def test_process_that_one_server_refuses_for_its_job_tells_the_others() -> None:
    """They would wait for workers that find the other server's job at its end."""
    transport = transport_to(3, joins=False)
    transport.stores[1].abort(0, "the disk is gone")

    with pytest.raises(AbortedError, match="the disk is gone"):
        ClusterClient(transport).join(0, FIRST, terms={}, lease=WAIT).result()

    for store in transport.stores:
        with pytest.raises(AbortedError, match="the disk is gone"):
            store.wait_version(1)


def test_process_that_is_refused_for_its_settings_does_not_say_that_others_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Servers have ended the job by themselves, or it goes on without this process."""
    client = ClusterClient(transport_to(3, joins=False))
    client.join(0, FIRST, terms={"files": "a"}, lease=WAIT).result()

    with pytest.raises(JobError, match="files = b"):
        client.join(0, FIRST, terms={"files": "b"}, lease=WAIT).result()

    assert "could not be told" not in caplog.text


@pytest.mark.parametrize("on_worker_loss", WorkerLoss)
def test_process_that_does_not_reach_a_server_is_waited_for_only_where_another_may_come(
    on_worker_loss: WorkerLoss,
) -> None:
    transport = transport_to(2, joins=False)
    lease = Lease(seconds=3.0, on_worker_loss=on_worker_loss)

    def joined(server: int) -> Joined:
        if server == 1:
            raise TransportError("ps-1:1 is away")
        return transport.stores[0].join(0, FIRST, terms={}, lease=lease).result()

    transport.answers["Join"] = joined
    with pytest.raises(TransportError, match="ps-1:1 is away"):
        ClusterClient(transport).join(0, FIRST, terms={}, lease=lease).result()

    is_over = "Abort" in [name for _, name, _ in transport.calls]
    assert is_over == (on_worker_loss is not WorkerLoss.WAIT)


def two_processes() -> tuple[LocalTransport, ClusterClient, ClusterClient]:
    """Returns servers, the client of a process that has joined, and that of another."""
    transport = transport_to(2, joins=False)
    first, second = ClusterClient(transport), ClusterClient(transport)
    first.join(0, FIRST, terms={}, lease=WAIT).result()
    return transport, first, second


def transport_to(num_servers: int, *, joins: bool = True, **settings: bool) -> LocalTransport:
    return LocalTransport(
        [
            ParameterStore(
                server_index=index, num_servers=num_servers, wait_limit_s=0.0, **settings
            )
            for index in range(num_servers)
        ],
        joins=joins,
    )


def client_of(transport: LocalTransport, **settings: int) -> ClusterClient:
    client = joined_client(transport, **settings)
    client.create_table(
        TableSpec(name="t", dim=3, initializer=InitializerSpec(scale=0.1), optimizer=SGD)
    )
    for name, length in [("a", 10), ("b", 7), ("c", 100)]:
        segment = DenseSegment(length=length, initializer=InitializerSpec(scale=0.1))
        client.create_dense(DenseSpec(name=name, segments=(segment,), optimizer=SGD))
    transport.calls.clear()
    return client


def gradients() -> Gradients:
    return Gradients(
        {"t": SparseGrad(KEYS, np.ones((KEYS.size, 3), np.float32), 1)},
        {"c": DenseGrad(np.ones(100, np.float32), 1)},
    )


class Away:
    """The answer of a server that is away, and to which the call is sent again and again."""

    def __init__(self, waited: list[float]) -> None:
        self.error: Exception | None = None
        self._waited = waited

    def wait(self, seconds: float) -> bool:
        self._waited.append(seconds)
        return self.error is not None

    def when_failed(self, tell: object) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.error = error

    def result(self) -> None:
        assert self.error is not None
        raise self.error


def test_renewal_reaches_servers_while_another_one_is_away(monkeypatch):
    """They are to hear of the worker in time for its lease; the one that is away has one call under way."""
    transport = transport_to(2)
    client = ClusterClient(transport)
    lease = Lease(seconds=6.0, on_worker_loss=WorkerLoss.FAIL)
    client.join(0, INCARNATION, terms={}, lease=lease).result()
    transport.calls.clear()
    waited: list[float] = []
    away, call = Away(waited), transport.call
    monkeypatch.setattr(
        transport,
        "call",
        lambda server, *args, **of: call(server, *args, **of) if server else away,
    )

    client.renew(0)
    client.renew(0)

    assert [(server, name) for server, name, _ in transport.calls] == [(1, "Renew")] * 2
    assert max(waited) <= lease.renewal_s == 2.0
    away.fail(TransportError("tried 60 times in 30 s"))
    with pytest.raises(TransportError, match="tried 60 times"):
        client.renew(0)


def test_call_that_waited_longer_than_any_move_is_made_again_by_the_newer_map(monkeypatch):
    monkeypatch.setattr(placement, "MOVE_LIMIT_S", 0.0)
    transport = transport_to(2)
    client = client_of(transport)
    waited = [WrongServerError("of epoch 1")]

    def answer(server: int) -> Pulled:
        if waited:
            raise waited.pop()
        return Pulled({"t": np.zeros((1, 3), np.float32)}, 3)

    transport.answers["PullSparse"] = answer
    pending = client.pull_sparse({"t": KEYS[:1]}, missing=Missing.INITIAL)
    for store in transport.stores:
        store.engine.shard_map = replace(store.engine.shard_map, epoch=FIRST_EPOCH + 1)

    assert pending.result().version == 3


def test_move_that_does_not_end_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(placement, "MOVE_LIMIT_S", 0.0)
    transport = transport_to(2)
    client = client_of(transport)

    def under_way(server: int) -> Pulled:
        raise MovingError("under way")

    transport.answers["PullSparse"] = under_way

    with pytest.raises(MovingError, match="under way"):
        client.pull_sparse({"t": KEYS[:1]}, missing=Missing.INITIAL).result()


def test_renewals_go_on_by_a_newer_map_that_all_servers_have():
    """Each of them refuses the first, which is sent again at once, to all."""
    transport = transport_to(3)
    client = joined_client(transport)
    for store in transport.stores:
        store.engine.shard_map = replace(store.engine.shard_map, epoch=FIRST_EPOCH + 1)

    for _ in range(2):
        client.renew(0)

    renewals = [argument for _, name, argument in transport.calls if name == "Renew"]
    assert [each.shard_map_epoch for each in renewals] == [1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_the_end_of_a_lease_that_an_older_map_has_placed_is_told_by_the_newer_one():
    transport = transport_to(2)
    client = joined_client(transport)
    for store in transport.stores:
        store.engine.shard_map = replace(store.engine.shard_map, epoch=FIRST_EPOCH + 1)

    client.renew(0, is_last=True)

    renewals = [argument for _, name, argument in transport.calls if name == "Renew"]
    assert [each.shard_map_epoch for each in renewals] == [1, 1, 2, 2]


@pytest.mark.parametrize("refusing", [0, 1])
def test_refused_renewal_is_told_though_another_server_is_away(refusing, monkeypatch):
    transport = transport_to(2)
    client = joined_client(transport)

    def answer(server: int) -> None:
        raise ProtocolError("and the other workers continued without it")

    transport.answers["Renew"] = answer
    away, call = Away([]), transport.call
    monkeypatch.setattr(
        transport,
        "call",
        lambda server, *args, **of: call(server, *args, **of) if server == refusing else away,
    )
    with pytest.raises(ProtocolError, match="and the other workers continued without it"):
        client.renew(0)


@pytest.mark.parametrize("have_logs", [(True, True), (True, False), (False, False)])
def test_servers_come_back_if_all_keep_a_log(have_logs: tuple[bool, bool]) -> None:
    transport = transport_to(2)
    transport.answers["Join"] = lambda server: Joined(has_update_log=have_logs[server])

    joined = ClusterClient(transport).join(0, INCARNATION, terms={}).result()

    assert transport.servers_recover == joined.has_update_log == all(have_logs)


def test_pull_is_one_call_to_each_server_that_has_a_key():
    transport = transport_to(4)
    client = client_of(transport)

    client.pull_sparse({"t": KEYS[:1]}, missing=Missing.ZEROS).result()
    assert len(transport.calls) == 1
    transport.calls.clear()
    client.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result()

    assert [server for server, *_ in transport.calls] == [0, 1, 2, 3]
    asked = np.concatenate([pull.keys["t"] for _, _, pull in transport.calls])
    np.testing.assert_array_equal(np.sort(asked), KEYS)


@pytest.mark.parametrize(("chunk_bytes", "fitting"), [(10, 1), (200, 10), (1_000_000, 500)])
def test_changed_rows_are_asked_for_as_many_as_fit_a_message(chunk_bytes, fitting):
    """A key and its row have 8 + 3 * 4 bytes."""
    transport = transport_to(2)
    client = client_of(transport, chunk_bytes=chunk_bytes)
    recording = client_spec("recording", dim=3)
    narrow = client_spec("narrow", dim=1)
    client.create_table(recording)
    client.create_table(narrow)
    transport.calls.clear()

    client.pull_changed(["narrow", "recording"], 0, max_rows=500).result()

    asked = [(server, name, pull.max_rows) for server, name, pull in transport.calls]
    assert asked == [(0, "PullChanged", fitting), (1, "PullChanged", fitting)]


def client_spec(name: str, dim: int) -> TableSpec:
    return TableSpec(
        name=name, dim=dim, initializer=InitializerSpec(), optimizer=SGD, records_changes=True
    )


def test_pull_of_no_keys_asks_one_server_for_the_version():
    transport = transport_to(4)
    client = client_of(transport)
    none = np.empty(0, np.uint64)

    assert client.pull_sparse({"t": none}, missing=Missing.ZEROS).result().version == 0

    assert [server for server, *_ in transport.calls] == [0]


def test_version_of_a_pull_is_the_smallest_of_those_asked():
    transport = transport_to(4)
    client = client_of(transport)
    for server, batches in enumerate((9, 4, 6, 5)):
        transport.stores[server].push_grad(Gradients(), replace(PUSH_ID, batches=batches))

    assert client.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result().version == 4
    on_first = KEYS[ShardMap.of(4).route(KEYS, 64)[0]]
    assert client.pull_sparse({"t": on_first}, missing=Missing.ZEROS).result().version == 9


def test_numbers_are_brought_to_the_first_server_alone():
    transport = transport_to(3)
    client = client_of(transport)

    reduced = client.all_reduce("sum", 0, np.array([1.0, 2.0]), ReduceOp.SUM, step=0).result()

    assert reduced.values.tolist() == [1.0, 2.0]
    assert [(server, name) for server, name, _ in transport.calls] == [
        (0, "AllReduce"),
        (1, "Barrier"),
        (2, "Barrier"),
    ]


def test_clocks_are_kept_by_the_first_server_alone():
    transport = transport_to(3)
    client = client_of(transport)

    client.barrier("start", 0, step=0).result()
    transport.calls.clear()

    assert client.advance(0, 5, at_least=-3).result() == 5

    request = Advance(member=member(0), clock=5, at_least=0, after_barrier=1, shard_map_epoch=1)
    assert transport.calls == [(0, "Advance", request)]


def test_all_messages_for_a_worker_go_to_one_server():
    stores = [
        ParameterStore(num_workers=4, server_index=server, num_servers=3) for server in range(3)
    ]
    transport = LocalTransport(stores)
    client = joined_client(transport)

    for receiver in range(4):
        message = Message(sender=1, receiver=receiver, sequence=0, content=b"a")
        client.post("exchange", message).result()
        client.take("exchange", receiver, received=0).result()

    assert [(server, call) for server, call, _ in transport.calls] == [
        (server, call) for server in (0, 1, 2, 0) for call in ("Post", "Take")
    ]


def test_message_too_large_for_a_message_is_refused_before_it_is_sent():
    transport = transport_to(1)
    message = Message(sender=0, receiver=0, sequence=0, content=bytes(MAX_MESSAGE_BYTES))

    with pytest.raises(ProtocolError, match="a message has 16777216 bytes, more than the"):
        client_of(transport).post("exchange", message)

    assert not transport.calls


@pytest.mark.parametrize("on_worker_loss", [WorkerLoss.WAIT, WorkerLoss.CONTINUE])
def test_lost_worker_may_have_reached_some_servers_only(on_worker_loss):
    """In asynchronous training, where a barrier says step 0, versions only count what came."""
    transport = transport_to(2)
    client = ClusterClient(transport)
    lease = Lease(seconds=6.0, on_worker_loss=on_worker_loss)
    client.join(0, INCARNATION, terms={}, lease=lease).result()
    transport.stores[1].push_grad(Gradients(), PUSH_ID)

    assert client.barrier("pass", 0, step=0).result() == 1
    reduced = client.all_reduce("sum", 0, np.ones(1), ReduceOp.SUM, step=0).result()
    assert (reduced.values.tolist(), reduced.version) == ([1.0], 1)
    with pytest.raises(ProtocolError, match=r"different versions \[0, 1\]"):
        client.barrier("end", 0, step=1).result()


def test_pull_that_waits_for_a_version_asks_every_server():
    transport = transport_to(4)
    client = client_of(transport)

    client.pull_sparse({"t": KEYS[:1]}, missing=Missing.ZEROS, at=0).result()

    assert [server for server, *_ in transport.calls] == [0, 1, 2, 3]


def test_push_reaches_every_server_even_if_empty():
    """Each counts the examples, and the parts of a synchronous step."""
    transport = transport_to(3)
    client = client_of(transport)

    client.push_grad(Gradients(), PUSH_ID, at=0).result()

    push = PushGrad(
        chunk=PushChunk([], [], 0, 1), push_id=PUSH_ID, at=0, shard_map_epoch=FIRST_EPOCH
    )
    assert transport.calls == [(server, "PushGrad", push) for server in range(3)]
    assert client.status().version == 1


def test_push_that_nobody_waited_for_still_raises_when_asked():
    def answer(server: int) -> int:
        if server:
            raise TransportError("ps-1:1 went away")
        return 0

    transport = transport_to(2)
    client = client_of(transport)
    transport.answers["PushGrad"] = answer

    future = client.push_grad(gradients(), PUSH_ID)
    client.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result()

    for _ in range(2):
        with pytest.raises(TransportError, match="went away"):
            future.result()


def test_spec_that_a_server_refused_is_not_declared():
    transport = transport_to(2)
    client = client_of(transport)
    transport.stores[1].create_table(
        TableSpec(name="u", dim=5, initializer=InitializerSpec(), optimizer=SGD)
    )

    with pytest.raises(SpecConflictError, match="dim is 5, not 4"):
        client.create_table(
            TableSpec(name="u", dim=4, initializer=InitializerSpec(), optimizer=SGD)
        )

    with pytest.raises(UnknownTableError):
        client.pull_sparse({"u": KEYS}, missing=Missing.ZEROS)


def test_servers_at_different_versions_after_a_barrier_are_an_error():
    transport = transport_to(2)
    client = client_of(transport)
    transport.stores[1].push_grad(Gradients(), PUSH_ID, at=0)

    with pytest.raises(ProtocolError, match=r"different versions \[0, 1\]"):
        client.barrier("end", 0, step=0).result()


@pytest.mark.parametrize(("num_servers", "is_possible"), [(1, False), (2, True)])
def test_dense_block_whose_pieces_exceed_a_message_is_refused(num_servers, is_possible):
    client = client_of(transport_to(num_servers))
    segment = DenseSegment(length=MAX_MESSAGE_BYTES // 4, initializer=InitializerSpec())
    spec = DenseSpec(name="huge", segments=(segment,), optimizer=SGD)

    if is_possible:
        client.create_dense(spec)
    else:
        with pytest.raises(
            SpecError, match=r"'huge' has 4194304 elements, .* on each of 1 servers"
        ):
            client.create_dense(spec)


def test_client_closes_its_transport():
    transport = transport_to(1)

    with client_of(transport):
        assert not transport.is_closed

    assert transport.is_closed


def test_server_that_was_restarted_does_not_know_the_worker() -> None:
    transport = transport_to(2)
    client = client_of(transport)
    restarted = ParameterStore(server_index=1, num_servers=2)
    for spec in client._routing.tables.values():
        restarted.create_table(spec)
    transport._handlers[1] = Handlers(restarted.engine)

    with pytest.raises(ProtocolError, match="worker 0 has not joined this job: if this server"):
        client.push_grad(gradients(), PUSH_ID).result()


def test_servers_of_different_pasts_do_not_serve_one_job() -> None:
    transport = transport_to(2)
    transport.stores[0].engine.begin_job()

    with pytest.raises(ProtocolError, match=r"jobs before this one \(ps-0:1 1, ps-1:1 0\)"):
        ClusterClient(transport).join(0, INCARNATION, terms={}).result()


def test_abort_is_heard_by_all_servers_before_it_fails() -> None:
    """Whoever aborts ends then, and takes back what is still on its way."""
    transport = transport_to(3)
    client = joined_client(transport)
    heard: list[int] = []

    def answer(server: int) -> None:
        heard.append(server)
        if server == 0:
            raise TransportError("away")

    transport.answers["Abort"] = answer
    with pytest.raises(TransportError, match="away"):
        client.abort(0, "the disk is gone")

    assert heard == [0, 1, 2]


def test_second_load_of_a_process_is_another_one(tmp_path: Path) -> None:
    trained_chain(tmp_path, 1)
    client = joined_client(transport_to(2))
    declare(client)
    digests: list[str] = []

    for name in ("0", "1", "0"):
        client.load(f"{tmp_path}/{name}")
        digests.append(client.digest())

    assert digests[0] == digests[2] != digests[1]


def test_dry_run_takes_no_number_of_a_shrink() -> None:
    """A process in another's place may look at other times, and comes to the same shrinks."""
    transport = transport_to(1)
    client = joined_client(transport)

    for dry_run in (True, False, True, False):
        client.shrink(dry_run=dry_run)

    assert [shrink.number for _, _, shrink in transport.calls] == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("length", "num_keys", "expected"),
    [
        (1_000, 1_000, ["PushPull"]),
        (MAX_NUMBERS_BYTES // 4 - 1_000, 1_000, ["PushGrad", "PullSparse", "PullDense"]),
    ],
    ids=["one call", "rows and parameters fit no message together"],
)
def test_push_with_pulls_is_one_call_if_its_answer_fits_a_message(
    length: int, num_keys: int, expected: list[str]
) -> None:
    """The push of a batch that is skipped is empty, and what is pulled as large as ever."""
    transport = transport_to(1)
    client = joined_client(transport)
    initializer = InitializerSpec()
    client.create_table(TableSpec(name="t", dim=2, initializer=initializer, optimizer=SGD))
    segment = DenseSegment(length=length, initializer=initializer)
    client.create_dense(DenseSpec(name="d", segments=(segment,), optimizer=SGD))
    transport.calls.clear()
    into = {"d": np.empty(length, np.float32)}

    rows, version = client.push_pull(Gradients(), PUSH_ID, keys={"t": KEYS[:num_keys]}, into=into)

    assert rows.result().rows["t"].shape == (num_keys, 2)
    assert version.result() == 1
    assert [name for _, name, _ in transport.calls] == expected


def test_push_with_pulls_is_all_of_a_push() -> None:
    store = ParameterStore(wait_limit_s=0.0)
    transport = LocalTransport([store])
    client = joined_client(transport)
    client.push_pull(Gradients(), PUSH_ID, keys={}, into={})[0].result()
    (_, _, request) = transport.calls[-1]
    chunk = replace(request, push=replace(request.push, chunk=PushChunk([], [], 0, 2)))

    with pytest.raises(ProtocolError, match="PushPull has one chunk of a push"):
        transport.call(0, PUSH_PULL, chunk).result()


@pytest.mark.parametrize("comes_again", [False, True])
def test_servers_are_told_whether_the_error_of_an_abort_comes_again(comes_again: bool) -> None:
    """By that they keep their update logs, or remove them."""
    transport = transport_to(2)
    client = joined_client(transport)

    client.abort(0, "the disk is gone", comes_again=comes_again)

    told = [(server, abort.comes_again) for server, _, abort in transport.calls]
    assert told == [(0, comes_again), (1, comes_again)]
