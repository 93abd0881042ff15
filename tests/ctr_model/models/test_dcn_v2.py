"""DCN-v2 and its cross network against their oracles."""

import pytest

from ctr_ps.ctr_model.models.dcn_v2 import Cross, DcnV2
from ctr_ps.ctr_model.parameters import FlatLayout
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import models as oracle
from tests.support.model_cases import (
    SCHEMA,
    ModelCase,
    assert_gradients_agree,
    assert_predictions_agree,
)

every_structure = pytest.mark.parametrize("structure", ["parallel", "stacked"])


@every_structure
@pytest.mark.parametrize("num_cross_layers", [1, 2, 3])
@pytest.mark.parametrize("cross_rank", [None, 2, 5])
def test_every_network_agrees_with_the_oracle(
    structure: str, num_cross_layers: int, cross_rank: int | None
) -> None:
    model = DcnV2(
        SCHEMA,
        dim=2,
        hidden=[5],
        structure=structure,
        num_cross_layers=num_cross_layers,
        cross_rank=cross_rank,
    )
    case = ModelCase(model, SCHEMA, seed=1)

    assert_predictions_agree(case, oracle.dcn_v2)
    assert_gradients_agree(case, oracle.dcn_v2)


@every_structure
def test_any_columns_will_do(structure: str) -> None:
    schema = Schema.numbered(0, 3)
    case = ModelCase(DcnV2(schema, dim=2, hidden=[5], structure=structure), schema, seed=1)

    assert_gradients_agree(case, oracle.dcn_v2)


def test_sizes_are_those_of_the_paper() -> None:
    perceptron = 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 1
    crosses = 2 * (273 * 273 + 273)

    assert DcnV2(criteo_schema()).num_params == crosses + perceptron
    assert DcnV2(criteo_schema(), structure="parallel").num_params == crosses + perceptron + 273


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("structure", "side by side", "structure is 'side by side': .*'stacked' or 'parallel'"),
        ("num_cross_layers", 0, "num_cross_layers is 0"),
        ("cross_rank", 0, "cross_rank is 0"),
    ],
)
def test_wrong_option_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("dcn_v2", SCHEMA, {option: value})


def test_low_rank_has_fewer_parameters() -> None:
    full, low = Cross(273, 2), Cross(273, 2, rank=32)

    assert FlatLayout(full.segments).length == 2 * (273 * 273 + 273)
    assert FlatLayout(low.segments).length == 2 * (273 * 32 + 32 * 273 + 273)
    assert [segment.name for segment in low.segments[:3]] == [
        "cross1.weight_in",
        "cross1.weight_out",
        "cross1.bias",
    ]
    assert low.segments[1].init_std == pytest.approx(32**-0.5)
