"""LR and wide & deep against their oracles, and the first-order part of their logits."""

import numpy as np
import pytest
from hypothesis import given

from ctr_ps.ctr_model.models.wide_deep import (
    LogisticRegression,
    WideDeep,
    first_order,
    first_order_backward,
)
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import models as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree
from tests.support.slot_keys import Slots, lookup_of, slots_of


def test_schema_without_numbers_will_do() -> None:
    schema = Schema.numbered(0, 3)
    case = ModelCase(LogisticRegression(schema), schema, seed=1)

    assert_gradients_agree(case, oracle.lr)


def test_it_starts_as_a_coin() -> None:
    case = ModelCase(LogisticRegression(SCHEMA), SCHEMA, seed=1)
    case.params[:] = 0
    case.change_lookup("linear", rows=np.zeros_like(case.lookups["linear"].rows))

    assert case.predict().tolist() == [0.5] * 5
    assert [segment.init_std for segment in case.model.segments] == [0, 0]
    assert case.model.tables[0].init_range == 0


def test_every_slot_has_a_weight_in_one_table() -> None:
    model = LogisticRegression(criteo_schema())

    assert [(table.name, table.dim, table.slots) for table in model.tables] == [("linear", 1, None)]
    assert model.num_params == 13 + 1


@pytest.mark.parametrize(
    ("num_dense", "hidden", "crosses"),
    [(0, (5,), ()), (3, (4, 5, 6), [("C3", "C1")]), (1, (4,), [("C1", "C2"), ("C2", "C1")])],
)
def test_any_layers_numbers_and_crosses_will_do(
    num_dense: int, hidden: tuple[int, ...], crosses: list[tuple[str, str]]
) -> None:
    schema = Schema.numbered(num_dense, 3)
    model = WideDeep(schema, dim=2, hidden=hidden, crosses=crosses)

    assert_gradients_agree(ModelCase(model, schema, seed=1), oracle.wide_deep)


def test_crosses_are_slots_of_the_wide_table_alone() -> None:
    model = build_model("wide_deep", criteo_schema(), {"crosses": [["C1", "C2"], ["C26", "C3"]]})

    wide, deep = model.tables
    assert (wide.name, wide.dim, wide.slots, wide.crosses) == ("wide", 1, None, ((0, 1), (25, 2)))
    assert (deep.name, deep.dim, deep.slots, deep.crosses) == ("embedding", 10, None, ())
    assert model.num_params == 13 + 1 + 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 1


def test_wide_table_is_trained_by_ftrl_and_the_deep_one_as_the_job_says() -> None:
    wide, deep = WideDeep(SCHEMA).tables

    assert wide.optimizer is not None
    assert wide.optimizer["name"] == "ftrl"
    assert deep.optimizer is None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("crosses", [["C1", "D2"]], "no slot 'D2', did you mean 'C2'"),
        ("crosses", [["C1"]], r"crosses is \[\['C1'\]\]"),
    ],
)
def test_wrong_option_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("wide_deep", SCHEMA, {option: value})


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
