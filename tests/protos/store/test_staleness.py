"""A histogram of staleness, against the list of what was counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.store import Staleness, merge_staleness

COUNTED = st.lists(st.tuples(st.integers(0, 2**40) | st.integers(0, 20), st.integers(0, 5)))


def histogram(counted: list[tuple[int, int]]) -> Staleness:
    staleness = Staleness()
    for value, batches in counted:
        staleness = staleness.add(value, batches)
    return staleness


@given(counted=COUNTED)
def test_mean_and_largest_are_exact(counted: list[tuple[int, int]]) -> None:
    each = [value for value, batches in counted for _ in range(batches)]

    found = histogram(counted)

    assert found.batches == len(each)
    assert found.total == sum(each)
    assert found.mean == (sum(each) / len(each) if each else 0.0)
    assert found.largest == max(each, default=0)


@given(counted=COUNTED, share=st.floats(0, 1))
def test_quantile_is_a_bound_within_a_factor_of_two(
    counted: list[tuple[int, int]], share: float
) -> None:
    each = [value for value, batches in counted for _ in range(batches)]

    bound = histogram(counted).quantile(share)

    if each:
        exact = int(np.quantile(each, share, method="inverted_cdf"))
        assert exact <= bound <= 2 * exact
    else:
        assert bound == 0


@pytest.mark.parametrize(("share", "bound"), [(0.0, 1), (0.5, 1), (0.51, 4), (0.75, 4), (1.0, 11)])
def test_quantile_is_the_end_of_a_bucket_or_the_largest(share: float, bound: int) -> None:
    """Of 1, 1, 3 and 11."""
    assert histogram([(1, 2), (3, 1), (11, 1)]).quantile(share) == bound


@given(parts=st.lists(COUNTED, max_size=4))
def test_merging_is_counting_together(parts: list[list[tuple[int, int]]]) -> None:
    merged = merge_staleness(histogram(part) for part in parts)

    assert merged == histogram([one for part in parts for one in part])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (0, "0"),
        (1, "1"),
        (2, "2"),
        (3, "3-4"),
        (4, "3-4"),
        (5, "5-8"),
        (8, "5-8"),
        (9, "9-16"),
        (1000, "513-1024"),
    ],
)
def test_bucket_is_named_by_its_range(value: int, name: str) -> None:
    assert Staleness().add(value, 3).as_dict() == {
        "batches": 3,
        "mean": value,
        "largest": value,
        "counts": {name: 3},
    }


def test_adding_leaves_what_was_handed_out_as_it_was() -> None:
    before = Staleness().add(2)

    after = before.add(2).merge(before)

    assert before == Staleness().add(2)
    assert after == Staleness().add(2, 3)
