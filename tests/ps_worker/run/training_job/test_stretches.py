"""Batches, a number of them at a time."""

from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ps_worker.run.training_job.passes import Stretches


@given(st.integers(0, 12), st.lists(st.integers(0, 5), max_size=8), st.booleans())
def test_stretches_are_the_batches_in_their_order(number, sizes, looks) -> None:
    stretches = Stretches(iter(range(number)))
    expected, taken = list(range(number)), []

    for size in sizes:
        if looks:
            assert stretches.has_more == (len(taken) < number)
        stretch = list(stretches.take(size))
        assert stretch == expected[len(taken) : len(taken) + size]
        taken += stretch

    assert stretches.has_more == (len(taken) < number)
    assert list(stretches.take(number)) == expected[len(taken) :]
