"""Who waits for whom: what becomes of calls that wait. Orders of calls are test_store_steps.py's business."""

import gc
import weakref

import pytest

from protos.chunking import PushChunk
from protos.errors import CtrPsError, ProtocolError, WaitTimeoutError
from protos.futures import WaitingFuture
from protos.gradients import Gradients
from protos.store import PushId
from ps_server.coordination.coordinator import Coordinator


def workers_of(num_workers: int, wait_limit_s: float = 10.0) -> Coordinator:
    return Coordinator(
        num_workers,
        wait_limit_s=wait_limit_s,
        inbox_bytes=1000,
    )


def apply_on_arrival(workers: Coordinator, push_id: PushId) -> None:
    workers.begin_arrival(push_id.worker)
    workers.note_applied(push_id)
    workers.end_arrival(push_id)


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

    apply_on_arrival(workers, push_id())

    assert waiting.result() == 1


def test_call_that_gave_up_is_forgotten() -> None:
    workers = workers_of(2, wait_limit_s=0.001)
    waiting = workers.at_version(1, lambda: pytest.fail("answered"))

    with pytest.raises(WaitTimeoutError, match=r"version 1 .* step 0 .* workers \[0, 1\]"):
        waiting.result()
    apply_on_arrival(workers, push_id())


def test_call_that_was_cancelled_is_forgotten_by_the_next_change() -> None:
    workers = workers_of(1)
    waiting = workers.at_version(5, lambda: None)
    assert isinstance(waiting, WaitingFuture)
    remembered = weakref.ref(waiting)

    waiting.cancel()
    apply_on_arrival(workers, push_id())
    del waiting
    gc.collect()

    assert remembered() is None


def test_part_of_a_step_is_progress_when_the_step_is_applied() -> None:
    workers = workers_of(2)

    for worker in range(2):
        workers.push_part(Gradients(), push_id(worker), 0)
    step = workers.take_complete_step()
    before = workers.applied()
    assert step is not None
    workers.step_applied(step)

    assert before == (0, {})
    version, progress = workers.applied()
    assert version == 1
    assert progress.keys() == {0, 1}


def test_push_is_progress_when_it_is_applied() -> None:
    workers = workers_of(1)
    workers.begin_arrival(0)
    assert workers.applied() == (0, {})

    workers.note_applied(push_id())
    workers.end_arrival(push_id())

    version, progress = workers.applied()
    assert version == 1
    assert workers.status({}, None).progress == progress != {}


def test_push_that_was_abandoned_does_not_count() -> None:
    workers = workers_of(1)
    workers.begin_arrival(0)

    workers.abandon_arrival()

    assert workers.applied() == (0, {})
    workers.push_part(Gradients(), push_id(), 0)


def test_calls_wait_until_a_complete_step_is_applied() -> None:
    """Pulls of its version and barriers behind it; and no other is taken meanwhile."""
    workers = workers_of(2)
    pull = workers.at_version(1, lambda: workers.version)
    for worker in range(2):
        workers.push_part(Gradients(), push_id(worker), 0)
    step = workers.take_complete_step()
    barriers = [workers.barrier("b", worker, step=1) for worker in range(2)]
    waiting = [pull, workers.when_applied(), *barriers]

    assert step is not None
    assert workers.take_complete_step() is None
    assert workers.status({}, None).version == 0
    assert not any(isinstance(call, WaitingFuture) and call.done() for call in waiting)
    workers.step_applied(step)
    workers.answer_ready()

    assert [call.result() for call in waiting] == [1, 1, 1, 1]


def test_time_out_while_a_step_is_applied_blames_no_worker() -> None:
    workers = workers_of(1, wait_limit_s=0.001)
    workers.push_part(Gradients(), push_id(), 0)
    workers.take_complete_step()

    with pytest.raises(WaitTimeoutError, match="step 0 is still being applied; see the server's"):
        workers.at_version(1, lambda: None).result()
    with pytest.raises(WaitTimeoutError, match="all workers came, but steps were not applied"):
        workers.barrier("b", 0, step=1).result()


def test_step_that_could_not_be_applied_fails_every_call() -> None:
    workers = workers_of(2)
    pull = workers.at_version(1, lambda: pytest.fail("answered"))
    workers.push_part(Gradients(), push_id(0), 0)
    barrier = workers.barrier("b", 1, step=0)
    step = workers.take_complete_step()
    assert step is not None

    workers.step_failed(step, MemoryError("no room"))

    later = [
        lambda: workers.at_version(1, lambda: None),
        lambda: workers.push_part(Gradients(), push_id(0), 1),
        lambda: workers.begin_arrival(0),
        lambda: workers.barrier("b", 0, step=1),
        lambda: workers.advance(0, 1, at_least=0),
        lambda: workers.at_version(None, lambda: None),
        workers.applied,
    ]
    for call in (pull.result, barrier.result, *later):
        with pytest.raises(CtrPsError, match=r"step 0 could not be applied .*no room.* checkpoint"):
            call()
    assert workers.take_complete_step() is None
    assert workers.status({}, None).version == 0


def test_chunk_of_a_stranger_is_refused() -> None:
    with pytest.raises(ProtocolError, match="this job has 1 workers"):
        workers_of(1).assemble(PushChunk([], [], 0, 2), push_id(3))
