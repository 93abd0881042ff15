import numpy as np
import pytest
from hypothesis import given

from ctr_ps.ctr_model.layers.interactions import add_interactions, interactions_backward
from tests.reference import fm as oracle
from tests.support.slot_keys import Slots, lookup_of, slots_of

NUM_SLOTS, DIM, NUM_UNIQUE, BATCH = 3, 2, 4, 3
BEFORE = 8.0  # what stood in the output, to which is added

SLOTS = slots_of(NUM_UNIQUE, BATCH * NUM_SLOTS)


def features_of(slots: Slots, b: int) -> list[int]:
    return [key for slot in slots[b * NUM_SLOTS : (b + 1) * NUM_SLOTS] for key in slot]


def forward(rows: np.ndarray, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    batch = len(slots) // NUM_SLOTS
    sums = np.full((batch, rows.shape[1]), np.nan, np.float32)
    out = np.full(batch, BEFORE, np.float32)
    add_interactions(lookup_of(rows, slots, NUM_SLOTS), sums, out)
    return sums, out


@given(SLOTS)
def test_each_pair_of_features_counts_once(slots: Slots) -> None:
    rows = np.arange(1, 1 + NUM_UNIQUE * DIM, dtype=np.float32).reshape(NUM_UNIQUE, DIM)

    _, out = forward(rows, slots)

    expected = [BEFORE + oracle.interactions(rows[features_of(slots, b)]) for b in range(BATCH)]
    assert out.tolist() == expected


@given(SLOTS)
def test_gradient_is_the_difference_quotient(slots: Slots) -> None:
    """Of a function of second degree the central difference quotient is exact, whatever the step."""
    rows = np.arange(1, 1 + NUM_UNIQUE * DIM, dtype=np.float32).reshape(NUM_UNIQUE, DIM)
    grad = np.array([1, -2, 4], np.float32)
    sums, _ = forward(rows, slots)
    out = np.full_like(rows, BEFORE)

    interactions_backward(grad, sums, lookup_of(rows, slots, NUM_SLOTS), out)

    def loss(at: np.ndarray) -> float:
        return sum(grad[b] * oracle.interactions(at[features_of(slots, b)]) for b in range(BATCH))

    for i in range(rows.size):
        step = np.zeros(rows.size)
        step[i] = 1.0
        upper, lower = rows + step.reshape(rows.shape), rows - step.reshape(rows.shape)
        assert out.flat[i] - BEFORE == (loss(upper) - loss(lower)) / 2


@pytest.mark.parametrize("dim", [1, 10, 17, 64])
def test_every_width_is_summed_whole(dim: int) -> None:
    rows = np.random.default_rng(1).random((5, dim), np.float32)

    sums, out = forward(rows, [[4], [2, 2], []])

    np.testing.assert_allclose(sums[0], rows[4] + 2 * rows[2], rtol=1e-6)
    assert out[0] - BEFORE == pytest.approx(oracle.interactions(rows[[4, 2, 2]]), rel=1e-4)


def test_one_large_feature_has_no_interactions_at_all() -> None:
    """Not even those of rounding, as a difference of squares would have."""
    rows = np.random.default_rng(1).normal(0, 1e6, (1, 10)).astype(np.float32)

    _, out = forward(rows, [[0], [], []])

    assert out.tolist() == [BEFORE]
