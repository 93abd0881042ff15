"""Who has come to a barrier, who is missing, when all may go on."""

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_BARRIERS, MAX_NAME_CHARACTERS
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Reduced
from ctr_ps.ps_server.coordination.barrier import Barriers, Outcome, PassedBarriers
from ctr_ps.ps_server.coordination.membership import Membership

WORKERS = Members(4)


def test_barrier_is_released_when_all_members_have_come() -> None:
    barriers = barriers_of(3)
    for worker in (2, 0):
        barriers.arrive("pass", worker)
        assert barriers.take_released() == {}
    assert barriers.missing("pass") == [1]

    barriers.arrive("pass", 1)

    assert barriers.take_released() == {"pass": [0, 1, 2]}


def test_released_barrier_is_forgotten() -> None:
    barriers = come_all(2)
    assert barriers.take_released() == {"pass": [0, 1]}

    assert barriers.take_released() == {}
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {}
    assert barriers.missing("pass") == [1]


def test_barriers_of_different_names_do_not_mix() -> None:
    barriers = barriers_of(2)
    barriers.arrive("start", 0)
    barriers.arrive("end", 1)

    assert barriers.take_released() == {}
    barriers.arrive("start", 1)
    assert barriers.take_released() == {"start": [0, 1]}
    assert barriers.missing("end") == [0]


def test_worker_that_is_done_is_not_waited_for() -> None:
    barriers = barriers_of(3)
    leave(barriers, 1)
    barriers.arrive("pass", 0)
    assert barriers.missing("pass") == [2]

    barriers.arrive("pass", 2)

    assert barriers.take_released() == {"pass": [0, 2]}


def test_last_one_missing_releases_the_barrier_by_leaving() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 0)
    leave(barriers, 1)

    assert barriers.take_released() == {"pass": [0]}


def test_worker_that_leaves_while_it_waits_is_not_released() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 1)
    leave(barriers, 1)
    assert barriers.take_released() == {}

    barriers.arrive("pass", 0)

    assert barriers.take_released() == {"pass": [0]}


def test_nobody_waits_once_all_are_done() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 0)
    leave(barriers, 0)
    leave(barriers, 1)

    assert barriers.take_released() == {}


def test_who_gives_up_is_told_who_is_missing_and_counts_as_not_come() -> None:
    barriers = barriers_of(4)
    barriers.arrive("pass", 0)
    barriers.arrive("pass", 2)

    barriers.give_up("pass", 0)

    barriers.arrive("pass", 1)
    barriers.arrive("pass", 3)
    assert barriers.take_released() == {}
    assert barriers.missing("pass") == [0]
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {"pass": [0, 1, 2, 3]}


def test_coming_again_is_the_same_as_waiting_on() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 0)
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {}
    assert barriers.missing("pass") == [1]

    barriers.arrive("pass", 1)

    assert barriers.take_released() == {"pass": [0, 1]}


@pytest.mark.parametrize("worker", [1, 2, -1])
def test_who_is_done_or_unknown_is_refused_and_changes_nothing(worker: int) -> None:
    barriers = barriers_of(2)
    leave(barriers, 1)

    with pytest.raises(ProtocolError, match=rf"worker {worker} came to barrier 'pass'.*\[0\]"):
        barriers.arrive("pass", worker)

    assert barriers.missing("pass") == [0]
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {"pass": [0]}


def test_workers_that_wait_for_each_other_at_different_barriers_are_stuck() -> None:
    barriers = barriers_of(3)
    barriers.arrive("pass", 0)
    barriers.arrive("loss", 1)
    assert barriers.take_stuck() == {}  # worker 2 may come to either

    leave(barriers, 2)

    assert barriers.take_released() == {}
    assert barriers.take_stuck() == {"pass": [0], "loss": [1]}
    assert barriers.take_stuck() == {}


def test_nobody_who_waits_is_not_stuck() -> None:
    assert barriers_of(1).take_stuck() == {}


def test_worker_at_more_barriers_than_it_can_have_lost_calls_is_refused() -> None:
    barriers = barriers_of(2)
    for number in range(MAX_BARRIERS):
        barriers.arrive(f"barrier-{number}", 0)

    with pytest.raises(
        ProtocolError, match="'one-more' while it waits at 8 others, as 'barrier-0'"
    ):
        barriers.arrive("one-more", 0)

    barriers.arrive("barrier-0", 0)
    barriers.arrive("one-more", 1)
    barriers.give_up("barrier-1", 0)
    barriers.arrive("one-more", 0)
    assert barriers.take_released() == {"one-more": [0, 1]}


def test_barrier_at_which_nobody_waits_any_more_is_forgotten() -> None:
    barriers = barriers_of(2)
    for number in range(100):
        barriers.arrive(f"barrier-{number}", 0)
        barriers.give_up(f"barrier-{number}", 0)
    barriers.arrive("last", 1)
    leave(barriers, 1)

    assert not barriers._waiting


def test_long_name_of_a_barrier_is_refused() -> None:
    barriers = barriers_of(1)

    with pytest.raises(ProtocolError, match=r"barrier 'x{100}'... has 101 characters"):
        barriers.arrive("x" * (MAX_NAME_CHARACTERS + 1), 0)

    assert not barriers._waiting


def barriers_of(num_workers: int) -> Barriers:
    return Barriers(Membership(Members(num_workers)))


def leave(barriers: Barriers, worker: int) -> None:
    barriers._members.leave(worker)
    barriers.leave(worker)


def come_all(num_workers: int) -> Barriers:
    barriers = barriers_of(num_workers)
    for worker in range(num_workers):
        barriers.arrive("pass", worker)
    return barriers


PASSED = [(1, "start"), (2, "pass"), (3, "pass"), (4, "end")]


def outcome_of(version: int, num_values: int = 1, *, remember: bool = True) -> Outcome:
    """Returns the outcome of an all-reduce of numbers that are the version."""
    values = np.full(num_values, float(version))
    return Outcome(version, lambda: values, num_values=num_values, remember=remember)


def passed(worker: int, *names: str) -> PassedBarriers:
    """Returns what is known of a worker that has passed these barriers, and was answered 10, 20, ..."""
    barriers = PassedBarriers(WORKERS)
    for number, name in enumerate(names, 1):
        barriers.expect(worker, number)
        barriers.note(name, [worker], outcome_of(10 * number))
    return barriers


def test_passed_barrier_is_answered_again_as_it_was() -> None:
    barriers = passed(0, "start", "pass", "pass")

    answers = [barriers.outcome(name, 0, number) for number, name in PASSED]

    assert [outcome and outcome.version for outcome in answers] == [10, 20, 30, None]
    assert (barriers.newest(0), barriers.newest(1)) == (3, 0)
    assert barriers.outcome("start", 1, 1) is None, "another worker has not passed it"


def test_other_barrier_than_the_one_passed_is_refused() -> None:
    with pytest.raises(
        ProtocolError, match="worker 0 came to barrier 'end' as its barrier 2, which was 'pass'"
    ):
        passed(0, "start", "pass").outcome("end", 0, 2)


@pytest.mark.parametrize("limit", ["MAX_PASSED", "MAX_PASSED_VALUES"])
def test_barrier_passed_too_long_ago_is_refused(monkeypatch, limit: str) -> None:
    """Only so many are kept, and so many numbers in their answers."""
    monkeypatch.setattr(f"ctr_ps.ps_server.coordination.barrier.{limit}", 2)
    barriers = passed(0, "start", "pass", "pass")

    with pytest.raises(ProtocolError, match="passed its barrier 1 too long ago to come to 'start'"):
        barriers.outcome("start", 0, 1)
    assert [barriers.outcome("pass", 0, number) is not None for number in (2, 3)] == [True, True]


def test_answer_with_more_numbers_than_are_kept_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.coordination.barrier.MAX_PASSED_VALUES", 2)
    barriers = passed(0, "start")
    barriers.expect(0, 2)
    barriers.note("large", [0], outcome_of(20, 3))
    barriers.expect(0, 3)
    barriers.note("small", [0], outcome_of(30, 2))

    with pytest.raises(ProtocolError, match="too long ago"):
        barriers.outcome("large", 0, 2)
    assert barriers.outcome("small", 0, 3) is not None


def test_barrier_without_a_number_is_not_kept() -> None:
    barriers = PassedBarriers(WORKERS)

    barriers.note("pass", [0], outcome_of(10))

    assert barriers.newest(0) == 0
    assert barriers.outcome("pass", 0, 1) is None


def test_numbers_of_workers_together_count_once(monkeypatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.coordination.barrier.MAX_PASSED_VALUES", 6)
    barriers = PassedBarriers(WORKERS)
    for number in (1, 2):
        pass_together(barriers, number, outcome_of(number, 3))

    found = [barriers.outcome("pass", worker, 1) for worker in range(4)]

    assert found[0] is not None
    assert found == [found[0]] * 4
    assert sum(len(each.values or "") for each in barriers.state()) == 16 * 6


def test_numbers_that_need_not_be_remembered_are_kept_until_the_next_barrier() -> None:
    barriers = PassedBarriers(WORKERS)
    pass_together(barriers, 1, outcome_of(7, remember=False))
    restored = PassedBarriers(WORKERS)
    restored.restore(barriers.state())

    for each in (barriers, restored):
        assert again(each, 1) == (7, [7.0])
        pass_together(each, 2, outcome_of(8))
        assert again(each, 1) == (7, [0.5]), "what it brought itself"
        assert again(each, 2) == (8, [8.0])
    assert barriers.state() == restored.state()


def test_numbers_that_are_forgotten_take_no_room(monkeypatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.coordination.barrier.MAX_PASSED_VALUES", 3)
    barriers = PassedBarriers(WORKERS)

    pass_together(barriers, 1, outcome_of(7))
    for number in range(2, 6):
        pass_together(barriers, number, outcome_of(number, 2, remember=False))

    assert again(barriers, 1) == (7, [7.0])


def pass_together(barriers: PassedBarriers, number: int, outcome: Outcome) -> None:
    for worker in range(4):
        barriers.expect(worker, number)
    barriers.note("pass", range(4), outcome)


def again(barriers: PassedBarriers, number: int) -> tuple[int, list[float]]:
    """Returns what a worker is answered that comes to a barrier again with 0.5."""
    outcome = barriers.outcome("pass", 3, number)
    assert outcome is not None
    answer = outcome.answer(np.array([0.5]))
    assert isinstance(answer, Reduced)
    return answer.version, answer.values.tolist()
