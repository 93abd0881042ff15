"""Sums of gradients, and the refusal of what must not be summed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ctr_ps.protos.errors import GradientError
from ctr_ps.protos.gradients import (
    DenseGrad,
    Gradients,
    SparseGrad,
    require_finite,
    sum_dense,
    sum_gradients,
    sum_sparse,
)

DIM = 3
KEYS = st.lists(st.sampled_from([0, 1, 2, 7, 2**63, 2**64 - 1]), unique=True, max_size=5)
NOT_FINITE = [np.nan, -np.nan, np.inf, -np.inf]


def sparse(keys: list[int], values: object, examples: int = 1) -> SparseGrad:
    array = np.array(values, np.float32).reshape(len(keys), -1 if keys else 0)
    return SparseGrad(np.array(keys, np.uint64), array, examples)


def dense(values: list[float], examples: int = 1) -> DenseGrad:
    return DenseGrad(np.array(values, np.float32), examples)


@st.composite
def sparse_grads(draw: st.DrawFn) -> SparseGrad:
    keys = draw(KEYS)
    values = draw(
        arrays.arrays(np.float32, (len(keys), DIM), elements=st.floats(-1e3, 1e3, width=32))
    )
    return SparseGrad(np.array(keys, np.uint64), values, draw(st.integers(0, 9)))


def added_up(grads: list[SparseGrad]) -> dict[int, list[float]]:
    """Returns the sum by key, added in order in float32."""
    total: dict[int, np.ndarray] = {}
    for grad in grads:
        for key, value in zip(grad.keys.tolist(), grad.values, strict=True):
            total[key] = total.get(key, np.zeros(DIM, np.float32)) + value
    return {key: value.tolist() for key, value in total.items()}


@given(grads=st.lists(sparse_grads(), min_size=1, max_size=5))
def test_sparse_values_are_added_in_the_order_given(grads: list[SparseGrad]) -> None:
    """To the bit: sync training promises it."""
    total = sum_sparse(grads)

    expected = added_up(grads)
    assert total.keys.tolist() == list(expected)
    assert total.values.tolist() == list(expected.values())
    assert total.examples == sum(grad.examples for grad in grads)


def test_order_shows_in_the_last_bits() -> None:
    """The test above would not notice a sum in another order if it did not."""
    large, small = sparse([1], [1e8]), sparse([1], [1.0])
    negative = sparse([1], [-1e8])

    assert sum_sparse([large, negative, small]).values.tolist() == [[1.0]]
    assert sum_sparse([large, small, negative]).values.tolist() == [[0.0]]
    assert sum_dense([dense([1e8]), dense([1.0]), dense([-1e8])]).values.tolist() == [0.0]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_part_without_keys_only_adds_its_examples(place: int) -> None:
    """Off the wire it has no width either: it must not decide the width of the sum."""
    parts = [sparse([4, 5], [[1, 2], [3, 4]], 10), sparse([5, 6], [[10, 20], [30, 40]], 20)]
    parts.insert(place, sparse([], [], 3))

    total = sum_sparse(parts)

    assert total.keys.tolist() == [4, 5, 6]
    assert total.values.tolist() == [[1, 2], [13, 24], [30, 40]]
    assert total.examples == 33


def test_sums_leave_their_parts_as_they_were() -> None:
    first, second, third = (dense([1.0]) for _ in range(3))
    row, same_row = sparse([1], [1.0]), sparse([1], [1.0])

    sum_dense([first, second, third])
    sum_sparse([row, same_row])

    assert [part.values.tolist() for part in (first, second, third)] == [[1.0]] * 3
    assert row.values.tolist() == same_row.values.tolist() == [[1.0]]


def test_dense_sum_adds_values_and_examples() -> None:
    total = sum_dense([dense([1, 2], 3), dense([10, 20], 4), dense([100, 200], 5)])

    assert (total.values.tolist(), total.examples) == ([111, 222], 12)


def test_parts_may_lack_tables_and_blocks() -> None:
    first = Gradients(sparse={"wide": sparse([1], [1.0])}, dense={"mlp": dense([1.0])})
    second = Gradients(sparse={"deep": sparse([1], [5.0]), "wide": sparse([1], [2.0])})

    total = sum_gradients([first, Gradients(), second])

    assert {name: grad.values.tolist() for name, grad in total.sparse.items()} == {
        "wide": [[3.0]],
        "deep": [[5.0]],
    }
    assert {name: grad.values.tolist() for name, grad in total.dense.items()} == {"mlp": [1.0]}


@given(
    bad=st.sampled_from(NOT_FINITE),
    row=st.integers(0, 6),
    column=st.integers(0, DIM - 1),
)
def test_table_and_key_that_are_not_finite_are_named(bad: float, row: int, column: int) -> None:
    values = np.ones((7, DIM), np.float32)
    values[row, column] = bad
    grad = SparseGrad(np.arange(100, 107, dtype=np.uint64), values, 1)

    with pytest.raises(GradientError, match=rf"table 'deep' is not finite: key {100 + row} has"):
        require_finite(Gradients(sparse={"wide": sparse([1], [1.0]), "deep": grad}))


@given(bad=st.sampled_from(NOT_FINITE), position=st.integers(0, 40))
def test_block_and_element_that_are_not_finite_are_named(bad: float, position: int) -> None:
    values = np.ones(41, np.float32)
    values[position] = bad

    with pytest.raises(GradientError, match=rf"block 'mlp' is not finite: element {position} is"):
        require_finite(Gradients(dense={"bias": dense([1.0]), "mlp": DenseGrad(values, 1)}))


def test_largest_and_smallest_numbers_are_finite() -> None:
    limits = np.finfo(np.float32)
    edges = [limits.max, limits.min, limits.smallest_subnormal, -0.0]

    require_finite(Gradients(sparse={"t": sparse([1], edges)}, dense={"d": dense(edges)}))


def test_views_of_other_memory_are_checked_too() -> None:
    """Columns off the wire are read-only, pieces of a vector are strided or empty."""
    matrix = np.ones((4, 6), np.float32)
    matrix[3, 4] = np.inf
    matrix.flags.writeable = False

    require_finite(Gradients(dense={"empty": DenseGrad(matrix[0, :0], 1)}))
    with pytest.raises(GradientError, match="key 3"):
        require_finite(
            Gradients(sparse={"t": SparseGrad(np.arange(4, dtype=np.uint64), matrix[:, ::2], 1)})
        )
    with pytest.raises(GradientError, match="element 3"):
        require_finite(Gradients(dense={"d": DenseGrad(matrix[:, 4], 1)}))


@given(grads=st.lists(sparse_grads(), min_size=1, max_size=5))
def test_counts_are_summed_by_key(grads: list[SparseGrad]) -> None:
    """Exactly, beyond what a float32 counts."""
    expected: dict[int, list[int]] = {}
    counted = []
    for number, grad in enumerate(grads):
        shows = [2**24 + number + row for row in range(grad.keys.size)]
        for key, show in zip(grad.keys.tolist(), shows, strict=True):
            total = expected.setdefault(key, [0, 0])
            expected[key] = [total[0] + show, total[1] + number]
        counts = np.array([[show, number] for show in shows], np.uint32).reshape(-1, 2)
        counted.append(replace(grad, counts=counts if shows else None))

    total = sum_sparse(counted)

    if expected:
        assert total.counts is not None
        assert total.counts.dtype == np.uint32
        assert dict(zip(total.keys.tolist(), total.counts.tolist(), strict=True)) == expected
