import numpy as np
import pytest
from hypothesis import given

from ctr_ps.ctr_model.layers.first_order import first_order, first_order_backward
from tests.reference import fm as oracle
from tests.support.slot_keys import Slots, lookup_of, slots_of

NUM_DENSE, NUM_SLOTS, NUM_UNIQUE, BATCH = 2, 3, 4, 3

SLOTS = slots_of(NUM_UNIQUE, BATCH * NUM_SLOTS)


def features_of(slots: Slots, b: int) -> list[int]:
    return [key for slot in slots[b * NUM_SLOTS : (b + 1) * NUM_SLOTS] for key in slot]


def whole_numbers(*shape: int) -> np.ndarray:
    """Small whole numbers, whose float32 sums are exact in any order."""
    return np.random.default_rng(1).integers(-9, 9, shape).astype(np.float32)


@given(SLOTS)
def test_numbers_keys_and_bias_are_added(slots: Slots) -> None:
    dense, rows = whole_numbers(BATCH, NUM_DENSE), whole_numbers(NUM_UNIQUE, 1)
    weight, bias = np.array([2, -3], np.float32), np.array([5], np.float32)
    out = np.full(BATCH, np.nan, np.float32)

    first_order(dense, lookup_of(rows, slots, NUM_SLOTS), weight, bias, out)

    expected = [
        oracle.first_order(dense[b], weight, bias, rows[features_of(slots, b)])
        for b in range(BATCH)
    ]
    assert out.tolist() == expected


@given(SLOTS)
def test_gradients_are_the_sums_over_examples_and_occurrences(slots: Slots) -> None:
    lookup = lookup_of(whole_numbers(NUM_UNIQUE, 1), slots, NUM_SLOTS)
    grad, dense = np.array([1, -2, 5], np.float32), whole_numbers(BATCH, NUM_DENSE)
    rows_grad = np.full((NUM_UNIQUE, 1), np.nan, np.float32)
    weight_grad, bias_grad = np.full(NUM_DENSE, np.nan, np.float32), np.full(1, np.nan, np.float32)

    first_order_backward(grad, dense, lookup, rows_grad, weight_grad, bias_grad)

    expected = np.zeros(NUM_UNIQUE)
    for b in range(BATCH):
        for key in features_of(slots, b):
            expected[key] += grad[b]
    assert rows_grad[:, 0].tolist() == expected.tolist()
    assert weight_grad.tolist() == (grad @ dense).tolist()
    assert bias_grad.tolist() == [4.0]


@pytest.mark.parametrize("num_dense", [0, 1, 40])
def test_any_number_of_numbers_will_do(num_dense: int) -> None:
    lookup = lookup_of(np.array([[1], [10]], np.float32), [[0], [], [1, 1]], NUM_SLOTS)
    dense, weight = np.ones((1, num_dense), np.float32), np.ones(num_dense, np.float32)
    out = np.empty(1, np.float32)

    first_order(dense, lookup, weight, np.zeros(1, np.float32), out)

    assert out.tolist() == [21 + num_dense]
