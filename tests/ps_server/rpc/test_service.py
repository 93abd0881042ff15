"""The service without a network: what becomes of errors, waiting calls and signs of life."""

import asyncio
import logging
import math
import threading
import tracemalloc
from collections.abc import Coroutine
from dataclasses import replace
from operator import attrgetter
from typing import Any

import grpc
import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import WaitTimeoutError
from ctr_ps.protos.futures import Answered, WaitingFuture
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Changed, Message, Missing, Stretch
from ctr_ps.protos.store.moves import Cut, Phase
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.engine.journal import Journal
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.service import INLINE_VALUES
from ctr_ps.ps_server.rpc.service import Service as RpcService
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import joined, member, push_id

KEYS = np.arange(4, dtype=np.uint64)


class AbortedError(Exception):
    """The call ended with a status."""


class Context:
    """The part of a servicer's context that the service uses."""

    def __init__(self) -> None:
        self.aborted: tuple[Any, ...] | None = None

    async def abort(self, *arguments: Any) -> None:
        self.aborted = arguments
        raise AbortedError


class Service:
    """A service over a store with one table, and what it was told."""

    def __init__(self, **settings: Any) -> None:
        self.store = joined(ParameterStore(**settings))
        self.store.create_table(
            TableSpec(
                name="t",
                dim=2,
                initializer=InitializerSpec(),
                optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
            )
        )
        self.now = 0.0
        self.num_times_all_left = 0
        self.handlers = Handlers(self.store.engine, self._on_all_left)
        self.service = RpcService(self.handlers, clock=lambda: self.now)

    def _on_all_left(self) -> None:
        self.num_times_all_left += 1

    async def call(self, call: Call, argument: Any, context: Context | None = None) -> Any:
        message = call.request.encode(argument)
        return call.answer.decode(await self.service.method(call)(message, context or Context()))

    def push(
        self,
        worker: int = 0,
        at: int | None = None,
        sequence: int | None = None,
        keys: Keys = KEYS,
        **part: int,
    ) -> Coroutine[Any, Any, Any]:
        grad = SparseGrad(keys, np.ones((keys.size, 2), np.float32), 1)
        request = requests.PushGrad(
            chunk=PushChunk([("t", grad)], [], **part),
            push_id=push_id(worker, sequence),
            at=at,
            shard_map_epoch=FIRST_EPOCH,
        )
        return self.call(calls.PUSH_GRAD, request)

    def pull(self, at: int | None = None) -> Coroutine[Any, Any, Any]:
        request = requests.PullSparse(
            keys={"t": KEYS}, missing=Missing.ZEROS, at=at, shard_map_epoch=FIRST_EPOCH
        )
        return self.call(calls.PULL_SPARSE, request)

    def rows(self) -> np.ndarray:
        return self.store.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result().rows["t"]


async def test_a_move_waits_for_the_thread_of_a_call_whose_client_is_gone(monkeypatch):
    service, goes_on = Service(endpoints=["s0:1"]), threading.Event()
    engine, has_begun = service.store.engine, asyncio.Event()
    loop, push = asyncio.get_running_loop(), engine.push

    def late(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(has_begun.set)
        assert goes_on.wait(10.0)
        return push(*arguments)

    monkeypatch.setattr(engine, "push", late)
    keys = np.arange(INLINE_VALUES, dtype=np.uint64)
    gone = asyncio.create_task(service.push(sequence=0, keys=keys))
    await asyncio.wait_for(has_begun.wait(), 10.0)
    gone.cancel()
    await asyncio.sleep(0)
    moves = service.handlers.moves
    moves.begin_move(requests.BeginMove(token="m", shard_map=replace(engine.shard_map, epoch=2)))
    hold = requests.HoldMove(token="m", number=1, phase=Phase.HOLD, cut=Cut())
    held = moves.hold_move(hold)
    was_early = isinstance(held, Answered)
    goes_on.set()
    seen = (await asyncio.wait_for(asyncio.wrap_future(held), 10.0)).seen
    assert gone.cancelled()
    assert (was_early, seen[0].pushes) == (False, 1)


async def test_error_that_is_not_ours_is_logged_and_not_told(caplog):
    service, context = Service(), Context()

    def fail() -> None:
        raise ZeroDivisionError("a secret")

    service.store.engine.status = fail
    with pytest.raises(AbortedError), caplog.at_level(logging.ERROR):
        await service.call(calls.GET_STATUS, None, context)

    code, details, *metadata = context.aborted
    assert code is grpc.StatusCode.INTERNAL
    assert details == "the server failed in GetStatus: see its log"
    assert not metadata
    assert "call=GetStatus" in caplog.text
    assert "ZeroDivisionError: a secret" in caplog.text


async def test_idle_time_counts_from_the_start_and_from_the_last_answer():
    service = Service()
    service.now = 7.0
    assert service.service.idle_s == 7.0

    with pytest.raises(AbortedError):  # which is an answer, too
        await service.push(at=5)

    service.now = 9.0
    assert service.service.idle_s == 2.0


async def test_pushes_are_taken_while_a_pull_waits_for_them():
    """Many more waiting calls than there could be threads, all on one loop."""
    service = Service(num_workers=2)

    waiting = [asyncio.create_task(service.pull(at=1)) for _ in range(200)]
    await service.push(worker=0, at=0)
    assert not any(task.done() for task in waiting)
    assert service.service.idle_s == 0.0
    await service.push(worker=1, at=0)
    for response in await asyncio.gather(*waiting):
        np.testing.assert_array_equal(response.rows["t"], -1.0)


async def test_messages_are_taken_while_others_wait_for_room():
    """Many more waiting calls than there could be threads: each sender's second message."""
    senders = range(100)
    service = Service(num_workers=100, inbox_bytes=1)

    async def post(sender: int, sequence: int) -> None:
        message = Message(sender=sender, receiver=0, sequence=sequence, content=b"a")
        await service.call(
            calls.POST,
            requests.Post(exchange="exchange", message=message, member=member(message.sender)),
        )

    async def take(received: int) -> int:
        request = requests.Take(exchange="exchange", member=member(0), received=received)
        return len(await service.call(calls.TAKE, request))

    waiting = [asyncio.create_task(post(sender, 0)) for sender in senders]
    await asyncio.sleep(0)  # all of them have come
    assert sum(task.done() for task in waiting) <= 1
    assert await take(0) == 100
    taking = asyncio.create_task(take(100))
    await asyncio.gather(*waiting)
    await post(7, 1)
    assert await taking == 1


async def test_steps_are_told_while_others_wait_for_them():
    """Many more waiting calls than there could be threads."""
    service = Service(num_workers=2)

    async def advance(worker: int, clock: int, at_least: int) -> int:
        request = requests.Advance(
            member=member(worker), clock=clock, at_least=at_least, after_barrier=0
        )
        return await service.call(calls.ADVANCE, request)

    waiting = [asyncio.create_task(advance(0, 9, 7)) for _ in range(200)]
    await asyncio.sleep(0)  # all of them have asked
    assert await advance(1, 6, 0) == 6
    assert not any(task.done() for task in waiting)
    await advance(1, 8, 0)
    assert set(await asyncio.gather(*waiting)) == {8}


async def test_caller_that_gives_up_does_not_disturb_others():
    service = Service(num_workers=2)

    cancelled, waiting = (asyncio.create_task(service.pull(at=1)) for _ in range(2))
    await service.push(worker=0, at=0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await service.push(worker=1, at=0)
    await waiting
    assert service.store.status().version == 1


async def test_caller_that_gives_up_takes_no_other_call_for_what_is_durable():
    """They wait for the same sync of the update log."""
    service = Service()
    durable: WaitingFuture[None] = WaitingFuture(10.0, lambda _: WaitTimeoutError("no sync"))
    service.store.engine.journal = journal = Journal()
    journal.durable = lambda: durable

    cancelled, waiting = (asyncio.create_task(service.push()) for _ in range(2))
    await asyncio.sleep(0)  # both have come
    cancelled.cancel()
    await asyncio.wait([cancelled])
    durable.set_result(None)
    await waiting


async def test_logged_calls_versions_and_renewals_are_answered_when_durable_and_reads_at_once():
    """A snapshot of all servers follows a version: after a loss of power one would have a step less.

    A worker that was lost, and is back by a renewal, would be lost again, and another take its place.
    """
    service = Service()
    durable: WaitingFuture[None] = WaitingFuture(10.0, lambda _: WaitTimeoutError("no sync"))
    journal = Journal()
    journal.durable = lambda: durable
    service.store.engine.journal = journal

    push = asyncio.create_task(service.push())
    version = asyncio.create_task(service.call(calls.WAIT_VERSION, requests.WaitVersion(at=0)))
    renewal = asyncio.create_task(service.call(calls.RENEW, requests.Renew(member=member(0))))
    await asyncio.sleep(0.01)
    await service.pull()
    assert not push.done()
    assert not version.done()
    assert not renewal.done()
    durable.set_result(None)
    await asyncio.gather(push, version, renewal)


async def test_push_in_chunks_counts_when_all_have_come():
    service = Service()

    await service.push(sequence=0, keys=KEYS[:3], chunk=1, num_chunks=2)
    assert not service.rows().any()
    await service.push(sequence=0, keys=KEYS[3:], chunk=0, num_chunks=2)
    np.testing.assert_array_equal(service.rows(), -1.0)
    assert service.store.status().examples == {0: 1}


async def test_large_call_has_the_answer_of_a_small_one(monkeypatch):
    """A limit of 0 sends every call to a thread."""
    monkeypatch.setattr("ctr_ps.ps_server.rpc.service.INLINE_VALUES", 0)
    service = Service()

    await service.push()
    response = await service.pull()
    np.testing.assert_array_equal(response.rows["t"], -1.0)


@pytest.mark.parametrize(
    ("call", "argument", "method", "answer"),
    [
        (calls.SHRINK, requests.Shrink(member=member(), number=1), "parameters.shrink", {}),
        (calls.LEAVE, requests.Leave(member=member(0), step=0), "leave", None),
        (calls.CHECK_FOLDER, requests.CheckFolder(folder="f", token="t"), "check_folder", None),
        (calls.SNAPSHOT, requests.Snapshot(token="t", member=member()), "snapshot", None),
        (
            calls.SAVE,
            requests.Save(folder="f", token="t", member=member()),
            "save_share",
            Share(entries=()),
        ),
        (calls.LOAD, requests.Load(url="u", member=member(), number=1), "load", None),
        (calls.GET_DIGEST, None, "parameters.shard_digests", {}),
        (
            calls.PULL_CHANGED,
            requests.PullChanged(
                tables=[], member=member(0), max_rows=1, shard_map_epoch=FIRST_EPOCH, number=1
            ),
            "pulls.changed",
            Answered(Changed({}, 0, False)),
        ),
    ],
    ids=["Shrink", "Leave", "CheckFolder", "Snapshot", "Save", "Load", "GetDigest", "PullChanged"],
)
async def test_long_call_does_not_hold_the_loop(call, argument, method, answer):
    service = Service()
    loop_runs = threading.Event()

    def look(*_: object, **__: object) -> object:
        assert loop_runs.wait(5), "the loop was held"
        return answer

    *path, name = method.split(".")
    setattr(attrgetter(*path)(service.store.engine) if path else service.store.engine, name, look)

    task = asyncio.create_task(service.call(call, argument))
    asyncio.get_running_loop().call_later(0.01, loop_runs.set)
    await task


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_work_of_a_push_is_that_of_all_its_chunks(num_chunks: int):
    """The last to come applies them all; a key counts as two numbers."""
    grad = SparseGrad(KEYS, np.ones((4, 2), np.float32), 1)
    chunk = PushChunk([("t", grad)], [], chunk=0, num_chunks=num_chunks)
    request = requests.PushGrad(chunk=chunk, push_id=push_id(), shard_map_epoch=FIRST_EPOCH)

    assert Service().handlers.work(calls.PUSH_GRAD, request) == num_chunks * (8 + 2 * 4)


def test_work_of_a_dense_block_counts_its_segments():
    """Hundreds of small ones are no call for the event loop."""
    segment = DenseSegment(length=1, initializer=InitializerSpec())
    spec = DenseSpec(name="d", segments=(segment,) * 200, optimizer=OptimizerSpec(name="adam"))

    work = Service().handlers.work(calls.CREATE_DENSE, requests.CreateDense(spec=spec))

    assert INLINE_VALUES < work < math.inf


def test_work_of_a_pull_of_state_is_that_of_what_is_copied():
    """Each number of the answer, with those that a block has once; and no more of a piece is copied."""
    service = Service()
    length, copied = 2_000_000, 1000
    service.store.create_dense(
        DenseSpec(
            name="large",
            segments=(DenseSegment(length=length, initializer=InitializerSpec()),),
            optimizer=OptimizerSpec(name="adam"),
        )
    )
    request = requests.PullState(
        keys={"t": KEYS},
        stretches=[Stretch(block="large", start=length - copied, stop=length)],
        shard_map_epoch=FIRST_EPOCH,
    )
    service.handlers.start(calls.PULL_STATE, request).result()  # compiled

    tracemalloc.start()
    try:
        answer = service.handlers.start(calls.PULL_STATE, request).result()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert service.handlers.work(calls.PULL_STATE, request) == answer.num_values
    assert answer.num_values == 4 * (2 + 2) + 3 * copied + 2
    assert most_bytes < 4 * length / 10


async def test_last_worker_that_is_done_is_told():
    service = Service(num_workers=2)

    async def done(worker: int) -> None:
        await service.call(calls.LEAVE, requests.Leave(member=member(worker), step=0))

    await done(1)
    assert service.num_times_all_left == 0
    await done(0)
    assert service.num_times_all_left == 1


async def test_lifecycle_is_logged_once(caplog):
    service = Service(num_workers=2)

    with caplog.at_level(logging.INFO):
        await service.push()
        await service.push()
        for _ in range(2):
            spec = service.store.engine.parameters.table("t").spec
            await service.call(calls.CREATE_TABLE, requests.CreateTable(spec=spec))

    assert caplog.messages == ["table created table=t dim=2"]


async def test_job_of_a_server_that_stays_ends_once_however_workers_leave():
    """Departures are handled in threads, the end of the job on the event loop alone."""
    service = Service(num_workers=8)
    loop_thread, threads = threading.get_ident(), []

    def begin_next() -> None:
        threads.append(threading.get_ident())
        service.store.engine.begin_job()

    service.handlers._on_all_left = begin_next
    for _ in range(20):
        joined(service.store)
        leaves = [
            service.call(calls.LEAVE, requests.Leave(member=member(worker), step=0))
            for worker in range(8)
        ]
        await asyncio.gather(*leaves)

    assert threads == [loop_thread] * 20
