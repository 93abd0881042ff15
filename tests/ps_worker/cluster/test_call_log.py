"""What a worker says of calls that take long: enough to know why nothing moves, and no more."""

import threading
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import Message, Missing, ReduceOp
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Awaited, Call
from ctr_ps.ps_worker.cluster import call_log
from ctr_ps.ps_worker.cluster.call_log import CallLog
from tests.support.cluster import cluster
from tests.support.stores import member, push_id


class Clock:
    """Seconds, as the test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pull_at(at: int | None) -> requests.PullDense:
    return requests.PullDense(blocks=[], at=at, shard_map_epoch=FIRST_EPOCH)


def push_with_pulls_at(at: int | None) -> requests.PushPull:
    push = requests.PushGrad(
        chunk=PushChunk([], []), push_id=push_id(), shard_map_epoch=FIRST_EPOCH
    )
    return requests.PushPull(push=push, sparse=rows_at(at), dense=pull_at(at))


def rows_at(at: int | None) -> requests.PullSparse:
    return requests.PullSparse(keys={}, missing=Missing.ZEROS, at=at, shard_map_epoch=FIRST_EPOCH)


PLACES: dict[str, tuple[Call[Any, Any], Any, str]] = {
    "join": (calls.JOIN, requests.Join(member=member(), terms={}, lease=None), "join"),
    "barrier": (
        calls.BARRIER,
        requests.Barrier(name="start", member=member(), step=0, number=1),
        "barrier start",
    ),
    "all-reduce": (
        calls.ALL_REDUCE,
        requests.AllReduce(
            name="sum", member=member(), values=np.ones(1), op=ReduceOp.SUM, step=0, number=1
        ),
        "barrier sum",
    ),
    "dense": (calls.PULL_DENSE, pull_at(7), "step 7"),
    "sparse": (calls.PULL_SPARSE, rows_at(7), "step 7"),
    "push with pulls": (calls.PUSH_PULL, push_with_pulls_at(7), "step 7"),
    "version": (calls.WAIT_VERSION, requests.WaitVersion(at=7), "step 7"),
    "clock": (
        calls.ADVANCE,
        requests.Advance(member=member(), clock=9, at_least=7, after_barrier=1),
        "step 7",
    ),
    "take": (
        calls.TAKE,
        requests.Take(exchange="rows", member=member(), received=0),
        "exchange rows",
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_wait_for_others_has_a_place(case: str) -> None:
    call, argument, place = PLACES[case]

    assert call.awaits is not None
    wait = call.awaits(argument)

    assert wait is not None
    assert (wait.place, wait.workers) == (place, "")
    # Many threads wait for steps, each for its own, and that is told once; of barriers and exchanges each is.
    assert wait.kind == ("step" if place == "step 7" else place)


def test_message_waits_for_its_receiver() -> None:
    message = Message(sender=0, receiver=3, sequence=0, content=b"")
    post = requests.Post(exchange="rows", message=message, member=member())

    assert calls.POST.awaits is not None
    assert calls.POST.awaits(post) == Awaited("exchange rows", "exchange rows", "[3] ")


def test_call_that_needs_no_other_worker_waits_for_none() -> None:
    assert calls.PULL_DENSE.awaits is not None
    assert calls.PULL_DENSE.awaits(pull_at(None)) is None
    assert calls.LEAVE.awaits is None


def test_wait_of_many_threads_is_told_once_and_then_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    log = CallLog(clock)

    for waited_s in range(5, 70, 5):
        clock.now += 5
        for step in (7, 8):
            log.waits(Awaited("step", f"step {step}"), waited_s)
        log.waits(Awaited("barrier end", "barrier end", "[3] "), waited_s)

    assert caplog.messages == [
        f"waiting for workers {text} waited_s={waited_s}"
        for waited_s in (5, 35, 65)
        for text in ("at=step 7", "[3] at=barrier end")
    ]


def test_calls_sent_again_are_a_line_a_server_and_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    log = CallLog(clock)

    for _ in range(4):
        clock.now += 20
        log.sends_again("ps-0:1", "PushGrad", "UNAVAILABLE")
    log.sends_again("ps-1:1", "PullDense", "CANCELLED")

    assert caplog.messages == [
        "sends again server=ps-0:1 call=PushGrad cause=UNAVAILABLE calls=1",
        "sends again server=ps-0:1 call=PushGrad cause=UNAVAILABLE calls=3",
        "sends again server=ps-1:1 call=PullDense cause=CANCELLED calls=1",
    ]


def test_worker_at_a_barrier_says_so_until_the_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_log, "FIRST_WAIT_S", 0.1)
    told = threading.Event()
    lines: list[str] = []

    def tell(text: str, *values: object) -> None:
        lines.append(text % values)
        told.set()

    monkeypatch.setattr(call_log.logger, "info", tell)
    with cluster(num_servers=2, num_workers=2) as servers:
        client = servers.client()

        def come_when_told() -> None:
            assert told.wait(20)
            client.barrier("start", 1, step=0).result()

        other = threading.Thread(target=come_when_told)
        other.start()
        client.barrier("start", 0, step=0).result()
        other.join()

    assert lines == ["waiting for workers at=barrier start waited_s=0"]
