import pytest

from ctr_ps.ctr_model.models.wide_deep import WideDeep
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import wide_deep as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree


@pytest.mark.parametrize(
    ("num_dense", "hidden", "crosses"),
    [(0, (5,), ()), (3, (4, 5, 6), [("C3", "C1")]), (1, (4,), [("C1", "C2"), ("C2", "C1")])],
)
def test_any_layers_numbers_and_crosses_will_do(
    num_dense: int, hidden: tuple[int, ...], crosses: list[tuple[str, str]]
) -> None:
    schema = Schema.numbered(num_dense, 3)
    model = WideDeep(schema, dim=2, hidden=hidden, crosses=crosses)

    assert_gradients_agree(ModelCase(model, schema, seed=1), oracle.probability)


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
