"""What workers are answered at barriers: their numbers, against numpy over all of them; and once more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import RESTART, Reduced, ReduceOp
from ctr_ps.ps_server.coordination.barrier import (
    Contribution,
    Outcome,
    PassedBarriers,
    reduce_numbers,
)

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
WORKERS = Members(4)

OVER_WORKERS = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}


def contribution(*values: float, op: ReduceOp = ReduceOp.SUM) -> Contribution:
    return Contribution(np.array(values, np.float64), op)


@given(
    rows=st.integers(0, 5).flatmap(
        lambda size: st.lists(
            st.lists(ANY_FLOAT, min_size=size, max_size=size), min_size=1, max_size=5
        )
    ),
    op=st.sampled_from(ReduceOp),
    order=st.randoms(use_true_random=False),
)
def test_numbers_are_reduced_in_worker_order_whoever_came_first(rows, op, order) -> None:
    workers = list(range(len(rows)))
    order.shuffle(workers)

    found = reduce_numbers(
        "x", {worker: contribution(*rows[worker], op=op) for worker in workers}, WORKERS
    )

    expected = np.array(rows[0], np.float64)
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            expected = OVER_WORKERS[op](expected, np.array(row, np.float64))
    np.testing.assert_array_equal(found, expected)


def test_what_was_given_stays_as_it_was() -> None:
    given = {0: contribution(1.0), 1: contribution(2.0)}

    total = reduce_numbers("x", given, WORKERS)

    assert given[0].values.tolist() == [1.0]
    assert total is not None
    assert not total.flags.writeable


def test_barrier_without_numbers_comes_to_none() -> None:
    assert reduce_numbers("x", {0: None, 1: None}, WORKERS) is None


class ForgottenWhenRead(Outcome):
    """An outcome whose numbers another thread forgets as soon as they are read."""

    @property
    def _values(self):
        values, self._kept = self._kept, None
        return values

    @_values.setter
    def _values(self, values):
        self._kept = values


def test_answer_that_is_repeated_while_its_numbers_are_forgotten_has_numbers() -> None:
    outcome = ForgottenWhenRead(5, lambda: np.array([3.0]), num_values=1, remember=False)
    outcome.answer()

    answer = outcome.answer(brought=np.array([1.0]))

    assert isinstance(answer, Reduced)
    assert answer.values.tolist() == [3.0]


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
        ProtocolError,
        match="worker 0 called 'end' as its barrier 2, but the lost process called 'pass'",
    ):
        passed(0, "start", "pass").outcome("end", 0, 2)


@pytest.mark.parametrize("limit", ["MAX_PASSED", "MAX_PASSED_VALUES"])
def test_barrier_passed_too_long_ago_is_refused(monkeypatch, limit: str) -> None:
    """Only so many are kept, and so many numbers in their answers."""
    monkeypatch.setattr(f"ctr_ps.ps_server.coordination.barrier.{limit}", 2)
    barriers = passed(0, "start", "pass", "pass")

    with pytest.raises(
        ProtocolError,
        match=r"called its barrier 1, 'start', again, but .* no longer keeps the result",
    ):
        barriers.outcome("start", 0, 1)
    assert [barriers.outcome("pass", 0, number) is not None for number in (2, 3)] == [True, True]


def test_answer_with_more_numbers_than_are_kept_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.coordination.barrier.MAX_PASSED_VALUES", 2)
    barriers = passed(0, "start")
    barriers.expect(0, 2)
    barriers.note("large", [0], outcome_of(20, 3))
    barriers.expect(0, 3)
    barriers.note("small", [0], outcome_of(30, 2))

    with pytest.raises(ProtocolError, match="no longer keeps the result"):
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


def pass_together(
    barriers: PassedBarriers, number: int, outcome: Outcome, name: str = "pass"
) -> None:
    for worker in range(4):
        barriers.expect(worker, number)
    barriers.note(name, range(4), outcome)


def again(barriers: PassedBarriers, number: int) -> tuple[int, list[float]]:
    """Returns what a worker is answered that comes to a barrier again with 0.5."""
    outcome = barriers.outcome("pass", 3, number)
    assert outcome is not None
    answer = outcome.answer(np.array([0.5]))
    assert isinstance(answer, Reduced)
    return answer.version, answer.values.tolist()


def test_a_run_that_never_ends_keeps_few_barriers() -> None:
    barriers = PassedBarriers(WORKERS)
    pass_together(barriers, 1, outcome_of(7), "start")
    for number in range(2, 400, 2):
        pass_together(barriers, number, outcome_of(number))
        pass_together(barriers, number + 1, outcome_of(number + 1, 5), RESTART)
    pass_together(barriers, 400, outcome_of(400))
    restored = PassedBarriers(WORKERS)
    restored.restore(barriers.state())

    for each in (barriers, restored):
        assert [each.restart(worker) for worker in range(4)] == [399] * 4
        kept = {(passed.name, passed.number) for passed in each.state()}
        assert kept == {
            ("start", 1), (RESTART, 397), ("pass", 398), (RESTART, 399), ("pass", 400)
        }  # fmt: skip
        with pytest.raises(ProtocolError, match="no longer keeps"):
            each.outcome("pass", 0, 396)
