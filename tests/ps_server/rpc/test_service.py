"""The service without a network: what becomes of errors, waiting calls and signs of life."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import numpy as np
import pytest

from protos.chunking import PushChunk
from protos.errors import GradientError, WaitTimeoutError
from protos.futures import Answered
from protos.gradients import SparseGrad
from protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from protos.store import Changed, Missing, PushId
from protos.v1 import control_plane_pb2, data_plane_pb2
from protos.wire import data_messages, spec_messages
from protos.wire.grpc_status import METADATA_KEY
from ps_server.rpc.activity import Activity
from ps_server.rpc.service import ParameterServerServicer, abort_with
from ps_server.store import ParameterStore

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
    """A servicer over a store with one table, and what it was told."""

    def __init__(self, **settings: Any) -> None:
        self.store = ParameterStore(**settings)
        self.store.create_table(
            TableSpec(
                name="t",
                dim=2,
                initializer=InitializerSpec(),
                optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
            )
        )
        self.activity = Activity(lambda: 0.0)
        self.num_times_all_done = 0
        self.servicer = ParameterServerServicer(
            self.store, activity=self.activity, on_all_left=self._on_all_left
        )

    def _on_all_left(self) -> None:
        self.num_times_all_done += 1

    def push(self, worker: int = 0, at: int | None = None, **part: int) -> Coroutine[Any, Any, Any]:
        grad = SparseGrad(KEYS, np.ones((4, 2), np.float32), 1)
        push_id = PushId(
            worker=worker, incarnation=1, sequence=0, step=0, examples=1, batches=1, pulled=0
        )
        request = data_messages.push_grad_request(push_id, PushChunk([("t", grad)], [], **part), at)
        return self.servicer.PushGrad(request, Context())

    def pull(self, at: int | None = None) -> Coroutine[Any, Any, Any]:
        request = data_messages.pull_sparse_request({"t": KEYS}, Missing.ZEROS, at)
        return self.servicer.PullSparse(request, Context())

    def rows(self) -> np.ndarray:
        return self.store.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result().rows["t"]


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 20))


def test_error_of_ours_ends_a_call_with_its_class():
    context = Context()

    with pytest.raises(AbortedError):
        asyncio.run(abort_with(context, "PushGrad", GradientError("not finite")))

    assert context.aborted == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "not finite",
        ((METADATA_KEY, "GradientError"),),
    )


def test_error_that_is_not_ours_is_logged_and_not_told(caplog):
    service, context = Service(), Context()

    def fail() -> None:
        raise ZeroDivisionError("a secret")

    service.store.status = fail
    with pytest.raises(AbortedError), caplog.at_level(logging.ERROR):
        asyncio.run(service.servicer.GetStatus(control_plane_pb2.GetStatusRequest(), context))

    code, details, *metadata = context.aborted
    assert code is grpc.StatusCode.INTERNAL
    assert details == "the server failed in GetStatus; its log says why"
    assert not metadata
    assert "call=GetStatus" in caplog.text
    assert "ZeroDivisionError: a secret" in caplog.text


def test_failed_call_is_no_longer_in_flight():
    service = Service()

    with pytest.raises(AbortedError):
        asyncio.run(service.push(at=5))

    service.activity._clock = lambda: 9.0
    assert service.activity.idle_s == 9.0


def test_pushes_are_taken_while_a_pull_waits_for_them():
    """Many more waiting calls than there could be threads, all on one loop."""
    service = Service(num_workers=2)

    async def body() -> None:
        waiting = [asyncio.create_task(service.pull(at=1)) for _ in range(200)]
        await service.push(worker=0, at=0)
        assert not any(task.done() for task in waiting)
        assert service.activity.idle_s == 0.0
        await service.push(worker=1, at=0)
        for response in await asyncio.gather(*waiting):
            np.testing.assert_array_equal(
                data_messages.pulled_rows(response, {"t": 4}).rows["t"], -1.0
            )

    run(body)


def test_messages_are_taken_while_others_wait_for_room():
    """Many more waiting calls than there could be threads: each sender's second message."""
    senders = range(100)
    service = Service(num_workers=100, inbox_bytes=1)

    async def post(sender: int, sequence: int) -> None:
        request = data_plane_pb2.PostRequest(
            exchange="exchange", sender=sender, receiver=0, sequence=sequence, content=b"a"
        )
        await service.servicer.Post(request, Context())

    async def take(received: int) -> int:
        request = data_plane_pb2.TakeRequest(exchange="exchange", worker=0, received=received)
        return len((await service.servicer.Take(request, Context())).messages)

    async def body() -> None:
        waiting = [asyncio.create_task(post(sender, 0)) for sender in senders]
        await asyncio.sleep(0)  # all of them have come
        assert sum(task.done() for task in waiting) <= 1
        assert await take(0) == 100
        taking = asyncio.create_task(take(100))
        await asyncio.gather(*waiting)
        await post(7, 1)
        assert await taking == 1

    run(body)


def test_steps_are_told_while_others_wait_for_them():
    """Many more waiting calls than there could be threads."""
    service = Service(num_workers=2)

    async def advance(worker: int, clock: int, at_least: int) -> int:
        request = control_plane_pb2.AdvanceRequest(worker=worker, clock=clock, at_least=at_least)
        return (await service.servicer.Advance(request, Context())).slowest

    async def body() -> None:
        waiting = [asyncio.create_task(advance(0, 9, 7)) for _ in range(200)]
        await asyncio.sleep(0)  # all of them have asked
        assert await advance(1, 6, 0) == 6
        assert not any(task.done() for task in waiting)
        await advance(1, 8, 0)
        assert set(await asyncio.gather(*waiting)) == {8}

    run(body)


def test_call_that_waits_too_long_says_for_whom():
    service = Service(num_workers=2, wait_limit_s=0.01)
    context = Context()
    request = control_plane_pb2.BarrierRequest(name="pass", worker=0, step=0)

    with pytest.raises(AbortedError):
        asyncio.run(service.servicer.Barrier(request, context))

    code, details, metadata = context.aborted
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details.startswith("barrier 'pass': workers [1] did not come within 0.01 s")
    assert metadata == ((METADATA_KEY, WaitTimeoutError.__name__),)


def test_caller_that_gives_up_does_not_disturb_others():
    service = Service(num_workers=2)

    async def body() -> None:
        cancelled, waiting = (asyncio.create_task(service.pull(at=1)) for _ in range(2))
        await service.push(worker=0, at=0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await service.push(worker=1, at=0)
        await waiting

    run(body)
    assert service.store.status().version == 1


def test_push_in_parts_counts_when_all_have_come():
    service = Service()

    async def body() -> None:
        await service.push(chunk=1, num_chunks=2)
        assert not service.rows().any()
        await service.push(chunk=0, num_chunks=2)

    run(body)
    np.testing.assert_array_equal(service.rows(), -2.0)
    assert service.store.status().examples == {0: 1}


def test_large_call_has_the_answer_of_a_small_one():
    """A limit of 0 sends every call to a thread."""
    service = Service()
    service.servicer._inline_values = 0

    async def body() -> None:
        await service.push()
        response = await service.pull()
        np.testing.assert_array_equal(data_messages.pulled_rows(response, {"t": 4}).rows["t"], -1.0)

    run(body)


@pytest.mark.parametrize(
    ("call", "request_of"),
    [
        ("shrink", control_plane_pb2.ShrinkRequest),
        ("pull_changed", data_plane_pb2.PullChangedRequest),
    ],
    ids=["Shrink", "PullChanged"],
)
def test_call_that_looks_at_all_rows_does_not_hold_the_loop(call, request_of):
    service = Service()
    answers = {"shrink": {}, "pull_changed": Answered(Changed({}, 0, False))}
    loop_runs = threading.Event()

    def look(*_: object, **__: object) -> object:
        assert loop_runs.wait(5), "the loop was held"
        return answers[call]

    setattr(service.store, call, look)
    method = service.servicer.Shrink if call == "shrink" else service.servicer.PullChanged

    async def body() -> None:
        task = asyncio.create_task(method(request_of(), Context()))
        asyncio.get_running_loop().call_later(0.01, loop_runs.set)
        await task

    run(body)


def test_last_worker_that_is_done_is_told():
    service = Service(num_workers=2)

    async def done(worker: int) -> None:
        await service.servicer.Leave(
            control_plane_pb2.LeaveRequest(worker=worker, step=0), Context()
        )

    asyncio.run(done(1))
    assert service.num_times_all_done == 0
    asyncio.run(done(0))
    assert service.num_times_all_done == 1


def test_lifecycle_is_logged_once(caplog):
    service = Service(num_workers=2)

    async def body() -> None:
        await service.push()
        await service.push()
        request = control_plane_pb2.CreateTableRequest(
            spec=spec_messages.table_spec_to_message(service.store._parameters.table("t").spec)
        )
        for _ in range(2):
            await service.servicer.CreateTable(request, Context())

    with caplog.at_level(logging.INFO):
        run(body)

    assert caplog.messages == ["worker seen worker=0", "table created table=t dim=2"]


def test_push_of_nothing_is_taken():
    service = Service()
    push_id = PushId(worker=0, incarnation=1, sequence=0, step=0, examples=3, batches=1, pulled=0)
    request = data_messages.push_grad_request(push_id, PushChunk([], []), None)

    asyncio.run(service.servicer.PushGrad(request, Context()))

    assert service.store.status().examples == {0: 3}
