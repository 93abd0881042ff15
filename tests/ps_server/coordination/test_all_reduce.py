"""What workers' numbers come to, against numpy over all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Reduced, ReduceOp
from ctr_ps.ps_server.coordination.barrier import (
    Contribution,
    Outcome,
    Reductions,
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


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (contribution(1.0, 2.0, 3.0), "worker 1 3 numbers for SUM"),
        (contribution(1.0, 2.0, op=ReduceOp.MAX), "worker 1 2 numbers for MAX"),
        (None, "worker 1 nothing"),
    ],
    ids=["other-length", "other-op", "no-numbers"],
)
def test_numbers_that_do_not_fit_are_named_with_who_gave_them(second, told) -> None:
    given = {1: second, 0: contribution(1.0, 2.0)}

    with pytest.raises(
        ProtocolError, match=f"all_reduce 'x' .* worker 0 2 numbers for SUM, {told};"
    ):
        reduce_numbers("x", given, WORKERS)


def test_what_was_given_last_counts_once() -> None:
    tracker = Reductions()
    tracker.give("x", 0, contribution(1.0))
    tracker.give("x", 0, contribution(2.0))
    tracker.give("y", 0, contribution(3.0))
    tracker.give("x", 1, contribution(4.0))
    tracker.give("x", 1, None)

    taken = tracker.take("x", [0, 1])

    assert taken[0] is not None
    assert taken[0].values.tolist() == [2.0]
    assert taken[1] is None
    assert tracker.take("x", [0, 1]) == {0: None, 1: None}


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
