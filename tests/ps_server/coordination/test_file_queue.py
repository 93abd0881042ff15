"""Which worker trains which file, whatever comes twice and whoever leaves."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import TakenFile
from ctr_ps.ps_server.coordination.file_queue import FileQueue
from ctr_ps.ps_server.coordination.job_state import FileQueueState

NUM_FILES = 5
EVENTS = ["take", "again", "finish", "leave", "restore"]
OVER = TakenFile(is_over=True)


def queue() -> FileQueue:
    return FileQueue(Members(3))


def take(files: FileQueue, worker: int, received: int, pass_number: int = 1) -> int | None:
    return files.take(worker, pass_number, NUM_FILES, received).file


def test_workers_take_different_files_in_the_order_of_the_pass() -> None:
    files = queue()

    assert [take(files, 0, 0), take(files, 1, 0), take(files, 0, 1)] == [0, 1, 2]


def test_a_call_that_comes_again_is_given_the_same_file() -> None:
    files = queue()

    assert [take(files, 0, 0), take(files, 1, 0), take(files, 0, 0)] == [0, 1, 0]
    assert take(files, 0, 1) == 2
    # Late, and from a process in its place: what it was given counts as begun.
    assert files.take(0, 1, NUM_FILES, 0) == TakenFile(file=0, was_taken=True)


def test_a_pass_is_over_when_all_have_finished_their_files() -> None:
    files = queue()
    for received in range(4):
        take(files, 0, received)
    take(files, 1, 0)

    assert files.take(1, 1, NUM_FILES, 1) == TakenFile()
    files.finish(1, 1, 1)
    assert not files.is_over(1)
    assert files.awaited() == [0]
    files.finish(0, 1, 4)

    assert files.take(0, 1, NUM_FILES, 4) == OVER
    assert files.is_over(1)


def test_files_of_a_worker_that_leaves_are_free_again_but_not_the_finished_ones() -> None:
    files = queue()
    for received in range(3):
        take(files, 0, received)
    files.finish(0, 1, 1)

    files.give_back(0)

    assert files.has_free
    assert [files.take(1, 1, NUM_FILES, received) for received in range(3)] == [
        TakenFile(file=1, was_taken=True),
        TakenFile(file=2, was_taken=True),
        TakenFile(file=3),
    ]
    assert take(files, 0, 0) == 4  # another process in its place begins with nothing


def test_a_new_pass_begins_with_the_first_call_and_earlier_ones_are_over() -> None:
    files = queue()
    for received in range(NUM_FILES):
        take(files, 0, received)
    files.finish(0, 1, NUM_FILES)

    assert take(files, 1, 0, pass_number=2) == 0
    assert files.take(0, 1, NUM_FILES, NUM_FILES) == OVER
    assert files.is_over(1)
    assert not files.is_over(2)


def test_a_pass_is_not_ended_by_one_who_asks_for_another() -> None:
    files = queue()
    take(files, 0, 0)
    before = files.state()

    with pytest.raises(
        ProtocolError, match="worker 1 asks for pass 2, but the workers are in pass 1"
    ):
        take(files, 1, 0, pass_number=2)
    assert files.state() == before

    files.restore(FileQueueState(pass_number=1))
    with pytest.raises(ProtocolError, match="asks for pass 3, but the workers are in pass 1"):
        take(files, 1, 0, pass_number=3)
    assert take(files, 1, 0, pass_number=2) == 0


@pytest.mark.parametrize(
    ("pass_number", "num_files", "received"),
    [(1, NUM_FILES + 1, 1), (1, NUM_FILES, 2), (2, NUM_FILES, 1)],
    ids=["other files", "more than it was given", "files of a new pass"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    pass_number: int, num_files: int, received: int
) -> None:
    files = queue()
    take(files, 0, 0)
    before = files.state()

    with pytest.raises(ProtocolError, match="worker 0 has"):
        files.take(0, pass_number, num_files, received)

    assert files.state() == before


def test_nobody_waits_in_a_pass_that_has_not_begun() -> None:
    with pytest.raises(ProtocolError, match="worker 2 waits in pass 1"):
        queue().finish(2, 1, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "again", "finish", "leave", "restore"]), st.integers(0, 2)
        )
    )
)
def test_each_file_is_finished_once_whatever_happens(events: list[tuple[str, int]]) -> None:
    files = queue()
    received: dict[int, list[int]] = {0: [], 1: [], 2: []}
    finished: Counter[int] = Counter()
    done = dict.fromkeys(received, 0)

    def happen(event: str, worker: int) -> None:
        nonlocal files
        own = received[worker]
        if event in ("take", "again"):
            repeated = event == "again" and bool(own)
            file = take(files, worker, len(own) - repeated)
            if repeated:
                assert file == own[-1]
            elif file is not None:
                own.append(file)
        elif event == "finish" and files.pass_number:
            files.finish(worker, 1, len(own))
            finished.update(own[done[worker] :])
            done[worker] = len(own)
        elif event == "leave":
            files.give_back(worker)
            own.clear()
            done[worker] = 0
        elif event == "restore":
            other = queue()
            other.restore(files.state())
            files = other

    for event, worker in events:
        happen(event, worker)
    while not files.is_over(1) or not files.pass_number:
        for worker in received:
            happen("take", worker)
            happen("finish", worker)

    assert finished == Counter(range(NUM_FILES))
