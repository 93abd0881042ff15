"""LR and wide & deep against their oracles, and the first-order part of their logits."""

import numpy as np
import pytest

from ctr_ps.ctr_model.models.summed import LogisticRegression, WideDeep, first_order
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import models as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree
from tests.support.slot_keys import lookup_of


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


@pytest.mark.parametrize("num_dense", [0, 1, 40])
def test_any_number_of_numbers_will_do(num_dense: int) -> None:
    lookup = lookup_of(np.array([[1], [10]], np.float32), [[0], [], [1, 1]], num_slots=3)
    dense, weight = np.ones((1, num_dense), np.float32), np.ones(num_dense, np.float32)
    out = np.empty(1, np.float32)

    first_order(dense, lookup, weight, np.zeros(1, np.float32), out)

    assert out.tolist() == [21 + num_dense]
