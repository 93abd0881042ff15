import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_model.layers.embedding import pool_slots, scatter_slots

NUM_DENSE, NUM_SLOTS, DIM, NUM_UNIQUE = 2, 3, 2, 4

Slots = list[list[int]]

# For each slot of three examples, which unique keys it holds: none, one or several, also repeated.
SLOTS = st.lists(
    st.lists(st.integers(0, NUM_UNIQUE - 1), max_size=3),
    min_size=3 * NUM_SLOTS,
    max_size=3 * NUM_SLOTS,
)


def columns(slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    lengths = [len(slot) for slot in slots]
    inverse = np.array([key for slot in slots for key in slot], np.int32)
    return inverse, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@given(SLOTS)
def test_slots_are_sums_of_their_keys_and_dense_columns_stay(slots: Slots) -> None:
    inverse, offsets = columns(slots)
    dense = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    rows = np.arange(NUM_UNIQUE * DIM, dtype=np.float32).reshape(NUM_UNIQUE, DIM)
    pooled = np.full((3, NUM_DENSE + NUM_SLOTS * DIM), np.nan, np.float32)
    pooled[:, :NUM_DENSE] = dense

    pool_slots(rows, inverse, offsets, NUM_SLOTS, NUM_DENSE, pooled)

    sums = [sum((rows[key] for key in slot), np.zeros(DIM)) for slot in slots]
    np.testing.assert_array_equal(pooled[:, :NUM_DENSE], dense)
    np.testing.assert_array_equal(pooled[:, NUM_DENSE:].reshape(-1, DIM), sums)


@given(SLOTS)
def test_gradient_of_a_key_is_the_sum_over_its_occurrences(slots: Slots) -> None:
    inverse, offsets = columns(slots)
    grad = np.arange(3 * (NUM_DENSE + NUM_SLOTS * DIM), dtype=np.float32).reshape(3, -1)
    scattered = np.full((NUM_UNIQUE, DIM), np.nan, np.float32)

    scatter_slots(grad, inverse, offsets, NUM_SLOTS, NUM_DENSE, scattered)

    expected = np.zeros((NUM_UNIQUE, DIM))
    of_slot = grad[:, NUM_DENSE:].reshape(-1, DIM)
    for position, slot in enumerate(slots):
        for key in slot:
            expected[key] += of_slot[position]
    np.testing.assert_array_equal(scattered, expected)


@pytest.mark.parametrize("dim", [1, 10, 17, 64])
def test_every_width_is_pooled_whole(dim: int) -> None:
    rows = np.random.default_rng(1).random((5, dim), np.float32)
    inverse, offsets = columns([[4], [2]])
    pooled = np.empty((1, 2 * dim), np.float32)

    pool_slots(rows, inverse, offsets, 2, 0, pooled)

    np.testing.assert_array_equal(pooled[0], np.concatenate([rows[4], rows[2]]))
