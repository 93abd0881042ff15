"""Progress of workers: what is whole, whatever the order in which pushes are applied."""

from hypothesis import given
from hypothesis import strategies as st

from protos.store import PushId, WorkerProgress
from ps_server.coordination.progress import ProgressTracker


def push_id(sequence: int, *, worker: int = 0, incarnation: int = 1, first_step: int = 0) -> PushId:
    step = first_step + sequence + 1
    return PushId(
        worker=worker,
        incarnation=incarnation,
        sequence=sequence,
        step=step,
        examples=1,
        batches=1,
        pulled=0,
        position=f"after {step}",
    )


def steps(tracker: ProgressTracker) -> dict[int, int]:
    return {worker: progress.step for worker, progress in tracker.progress().items()}


@given(order=st.permutations(range(6)))
def test_progress_is_the_last_push_before_the_first_gap(order: list[int]) -> None:
    tracker = ProgressTracker()
    applied: set[int] = set()

    for sequence in order:
        tracker.note(push_id(sequence))
        applied.add(sequence)

        whole = next(number for number in range(7) if number not in applied)
        assert steps(tracker) == ({0: whole} if whole else {})


def test_progress_is_what_the_push_id_says() -> None:
    tracker = ProgressTracker()

    tracker.note(push_id(0, worker=3, incarnation=9, first_step=20))

    assert tracker.progress() == {
        3: WorkerProgress(incarnation=9, sequence=0, step=21, position="after 21")
    }


def test_worker_that_comes_again_begins_with_push_0() -> None:
    tracker = ProgressTracker()
    tracker.note(push_id(0))
    tracker.note(push_id(2))

    tracker.note(push_id(1, incarnation=2, first_step=1))

    assert steps(tracker) == {0: 1}
    tracker.note(push_id(0, incarnation=2, first_step=1))
    assert steps(tracker) == {0: 3}


def test_restored_progress_holds_until_the_first_push() -> None:
    before, tracker = ProgressTracker(), ProgressTracker()
    before.note(push_id(0, worker=0))
    before.note(push_id(0, worker=1))

    tracker.restore(before.progress())
    tracker.note(push_id(1, worker=0, incarnation=2, first_step=1))

    assert steps(tracker) == {0: 1, 1: 1}
    tracker.note(push_id(0, worker=0, incarnation=2, first_step=1))
    assert steps(tracker) == {0: 3, 1: 1}
