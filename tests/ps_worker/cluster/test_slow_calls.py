"""Calls that take long: when they are sent again, where they wait, and what a worker says of them."""

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import Message, Missing, ReduceOp
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Awaited, Call
from ctr_ps.ps_worker.cluster import slow_calls
from ctr_ps.ps_worker.cluster.slow_calls import (
    FIRST_PAUSE_S,
    FORGET_S,
    LONGEST_PAUSE_S,
    CallLog,
    Delays,
    Retry,
)
from tests.support.cluster import cluster
from tests.support.stores import member, push_id

LIMIT_S = 20.0
NEVER_S = 600.0
NAME = "delays-of-a-test"


def pauses(retry: Retry, number: int) -> list[float]:
    found = [retry.pause_after(0.0) for _ in range(number)]
    assert None not in found
    return [pause for pause in found if pause is not None]


def test_pauses_grow_up_to_the_longest() -> None:
    found = pauses(Retry(budget_s=10.0), 2000)

    assert FIRST_PAUSE_S / 2 <= found[0] <= FIRST_PAUSE_S
    for shorter, longer in zip(found[:2], found[2:4], strict=True):
        assert shorter < longer, "half of a pause is by chance, and the next is twice as long"
    assert all(LONGEST_PAUSE_S / 2 <= pause <= LONGEST_PAUSE_S for pause in found[10:])
    assert len(set(found[10:])) > 100, "by chance, so that workers do not come all at once"


def test_no_try_begins_after_the_budget() -> None:
    """It is counted from the first failure, not from the call."""
    retry = Retry(budget_s=10.0)

    assert retry.pause_after(100.0) is not None
    assert retry.pause_after(109.9) is not None
    assert retry.pause_after(110.0) is None
    assert retry.tries == 3


def test_last_try_is_when_the_budget_ends() -> None:
    """Others count on that: the error has to come before a lease is over (extras/heter/connect.py)."""
    retry = Retry(budget_s=10.0)
    for now in (100.0, 103.0, 106.0, 109.0, 109.5):
        retry.pause_after(now)

    assert retry.pause_after(109.99) == pytest.approx(0.01)


def test_call_without_a_budget_is_not_sent_again() -> None:
    retry = Retry(budget_s=0.0)

    assert retry.pause_after(5.0) is None
    assert retry.tries == 1


@pytest.mark.parametrize("asked_s", [7.5, 60.0])
def test_pause_is_as_long_as_asked(asked_s: float) -> None:
    assert Retry(budget_s=10.0).pause_after(0.0, asked_s=asked_s) == asked_s


def test_pause_is_not_shorter_than_usual_when_less_is_asked() -> None:
    pause = Retry(budget_s=10.0).pause_after(0.0, asked_s=0.0)

    assert pause is not None
    assert pause >= FIRST_PAUSE_S / 2


def test_time_in_which_a_server_recovers_is_not_used_up() -> None:
    retry = Retry(budget_s=10.0)
    for now in range(0, 100, 5):
        assert retry.pause_after(now, progress=now) is not None


@pytest.mark.parametrize("progress", [99, 5])
def test_server_that_makes_no_progress_is_not_waited_for(progress: int) -> None:
    """It hangs, or dies at the same call again and again: beyond that it has to come."""
    retry = Retry(budget_s=10.0)
    assert retry.pause_after(0.0, progress=99) is not None
    assert retry.pause_after(8.0, progress=progress) is not None

    assert retry.pause_after(10.0, progress=progress) is None


def test_failure_after_a_long_wait_begins_another_budget() -> None:
    """A call may wait at a server for other workers, in whose time that one is restarted twice."""
    retry = Retry(budget_s=10.0)
    assert retry.pause_after(0.0) is not None
    assert retry.pause_after(9.0) is not None

    assert retry.pause_after(9.0 + FORGET_S) is not None
    assert retry.pause_after(18.0 + FORGET_S) is not None
    assert retry.pause_after(19.0 + FORGET_S) is None


def test_what_is_due_sooner_is_not_kept_by_what_came_before() -> None:
    done: queue.Queue[int] = queue.Queue()
    delays = Delays(NAME)
    delays.after(NEVER_S, lambda: done.put(-1))
    delays.after(0.1, lambda: done.put(1))
    delays.after(0.0, lambda: done.put(0))
    assert [done.get(timeout=LIMIT_S) for _ in range(2)] == [0, 1]

    for number in range(20):  # the thread waits for the first, mostly
        delays.after(0.0, lambda number=number: done.put(number))
        assert done.get(timeout=LIMIT_S) == number
    assert done.empty()

    delays.close()
    assert done.get_nowait() == -1


def test_closing_does_at_once_what_is_left_and_what_comes_then() -> None:
    done: queue.Queue[str] = queue.Queue()
    delays = Delays(NAME)
    for name in ("a", "b"):
        delays.after(NEVER_S, lambda name=name: done.put(name))
    begun = time.monotonic()

    delays.close()

    assert [done.get_nowait() for _ in range(2)] == ["a", "b"]
    assert NAME not in {each.name for each in threading.enumerate()}
    delays.after(NEVER_S, lambda: done.put("c"))
    assert done.get(timeout=LIMIT_S) == "c"
    assert time.monotonic() - begun < LIMIT_S


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
        "retrying server=ps-0:1 call=PushGrad cause=UNAVAILABLE calls=1",
        "retrying server=ps-0:1 call=PushGrad cause=UNAVAILABLE calls=3",
        "retrying server=ps-1:1 call=PullDense cause=CANCELLED calls=1",
    ]


def test_worker_at_a_barrier_says_so_until_the_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_calls, "FIRST_WAIT_S", 0.1)
    told = threading.Event()
    lines: list[str] = []

    def tell(text: str, *values: object) -> None:
        lines.append(text % values)
        told.set()

    monkeypatch.setattr(slow_calls.logger, "info", tell)
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
