"""Who waits for whom: what becomes of calls that wait. Orders of calls are test_store_steps.py's business."""

import gc
import weakref
from contextlib import nullcontext

import pytest

from protos.errors import WaitTimeoutError
from protos.futures import WaitingFuture
from protos.gradients import Gradients
from protos.store import PushId
from ps_server.coordination.coordinator import Coordinator


def workers_of(num_workers: int, wait_limit_s: float = 10.0) -> Coordinator:
    return Coordinator(
        num_workers,
        wait_limit_s=wait_limit_s,
        inbox_bytes=1000,
        apply=lambda *_: None,
        applying=nullcontext,
    )


def push_id(worker: int = 0, *, batches: int = 1, pulled: int = 0) -> PushId:
    return PushId(
        worker=worker,
        incarnation=0,
        sequence=0,
        step=0,
        examples=1,
        batches=batches,
        pulled=pulled,
    )


def test_call_is_answered_without_the_lock() -> None:
    """The answer asks for what needs the lock."""
    workers = workers_of(1)
    waiting = workers.at_version(1, lambda: workers.status({}, None).version)

    workers.push_on_arrival(Gradients(), push_id())

    assert waiting.result() == 1


def test_call_that_gave_up_is_forgotten() -> None:
    workers = workers_of(2, wait_limit_s=0.001)
    waiting = workers.at_version(1, lambda: pytest.fail("answered"))

    with pytest.raises(WaitTimeoutError, match=r"version 1 .* step 0 .* workers \[0, 1\]"):
        waiting.result()
    workers.push_on_arrival(Gradients(), push_id())


def test_call_that_was_cancelled_is_forgotten_by_the_next_change() -> None:
    workers = workers_of(1)
    waiting = workers.at_version(5, lambda: None)
    assert isinstance(waiting, WaitingFuture)
    remembered = weakref.ref(waiting)

    waiting.cancel()
    workers.push_on_arrival(Gradients(), push_id())
    del waiting
    gc.collect()

    assert remembered() is None


def test_part_of_a_step_is_progress_when_the_step_is_applied() -> None:
    workers = workers_of(2)

    workers.push_part(Gradients(), push_id(0), 0)
    before = workers.progress()
    workers.push_part(Gradients(), push_id(1), 0)

    assert before == {}
    assert workers.progress().keys() == {0, 1}


def test_push_is_progress_when_it_is_applied() -> None:
    seen: list[object] = []
    workers = Coordinator(
        1,
        wait_limit_s=10.0,
        inbox_bytes=1000,
        apply=lambda *_: seen.append(workers.progress()),
        applying=nullcontext,
    )

    workers.push_on_arrival(Gradients(), push_id())

    assert seen == [{}]
    assert workers.status({}, None).progress == workers.progress() != {}
