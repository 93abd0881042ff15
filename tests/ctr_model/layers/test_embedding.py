import numpy as np
import pytest
from hypothesis import given

from ctr_ps.ctr_model.layers.pooling import pool_slots, scatter_slots
from tests.support.slot_keys import Slots, lookup_of, slots_of

NUM_DENSE, NUM_SLOTS, DIM, NUM_UNIQUE = 2, 3, 2, 4

SLOTS = slots_of(NUM_UNIQUE, 3 * NUM_SLOTS)


@given(SLOTS)
def test_numbers_come_first_and_slots_are_sums_of_their_keys(slots: Slots) -> None:
    dense = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    rows = np.arange(NUM_UNIQUE * DIM, dtype=np.float32).reshape(NUM_UNIQUE, DIM)
    pooled = np.full((3, NUM_DENSE + NUM_SLOTS * DIM), np.nan, np.float32)

    pool_slots(dense, lookup_of(rows, slots, NUM_SLOTS), pooled)

    sums = [sum((rows[key] for key in slot), np.zeros(DIM)) for slot in slots]
    np.testing.assert_array_equal(pooled[:, :NUM_DENSE], dense)
    np.testing.assert_array_equal(pooled[:, NUM_DENSE:].reshape(-1, DIM), sums)


@given(SLOTS)
def test_gradient_of_a_key_is_the_sum_over_its_occurrences(slots: Slots) -> None:
    lookup = lookup_of(np.zeros((NUM_UNIQUE, DIM), np.float32), slots, NUM_SLOTS)
    grad = np.arange(3 * (NUM_DENSE + NUM_SLOTS * DIM), dtype=np.float32).reshape(3, -1)
    scattered = np.full((NUM_UNIQUE, DIM), np.nan, np.float32)

    scatter_slots(grad, lookup, scattered)

    expected = np.zeros((NUM_UNIQUE, DIM))
    of_slot = grad[:, NUM_DENSE:].reshape(-1, DIM)
    for position, slot in enumerate(slots):
        for key in slot:
            expected[key] += of_slot[position]
    np.testing.assert_array_equal(scattered, expected)


@pytest.mark.parametrize("dim", [1, 10, 17, 64])
def test_every_width_is_pooled_whole(dim: int) -> None:
    rows = np.random.default_rng(1).random((5, dim), np.float32)
    pooled = np.empty((1, 2 * dim), np.float32)

    pool_slots(np.empty((1, 0), np.float32), lookup_of(rows, [[4], [2]], num_slots=2), pooled)

    np.testing.assert_array_equal(pooled[0], np.concatenate([rows[4], rows[2]]))
