import numpy as np
import pytest

from ctr_model.models.deepfm import DeepFm
from ctr_model.models.fm import Fm
from ctr_model.registry import build_model
from ctr_model.schema import Schema, criteo_schema
from tests.reference import deepfm as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree


def test_any_number_of_hidden_layers_and_numbers_will_do() -> None:
    for schema, hidden in [(Schema.numbered(0, 3), (5,)), (SCHEMA, (4, 5, 6))]:
        case = ModelCase(DeepFm(schema, dim=2, hidden=hidden), schema, seed=1)

        assert_gradients_agree(case, oracle.probability)


def test_without_its_deep_part_it_is_a_factorization_machine() -> None:
    deep, fm = (
        ModelCase(DeepFm(SCHEMA, dim=2, hidden=[4]), SCHEMA, seed=1),
        ModelCase(Fm(SCHEMA, dim=2), SCHEMA, seed=1),
    )
    fm.lookups = deep.lookups
    deep.params[fm.params.size :] = 0
    fm.params = deep.params[: fm.params.size]

    np.testing.assert_allclose(deep.predict(), fm.predict(), rtol=1e-6)


def test_both_parts_share_one_table_of_embeddings() -> None:
    model = DeepFm(criteo_schema())

    assert [(table.name, table.dim) for table in model.tables] == [("linear", 1), ("embedding", 10)]
    assert model.num_params == 13 + 1 + 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dim", 0, "dim is 0"),
        ("hidden", [], "hidden is "),
        ("init_range", -1.0, "init_range is -1"),
    ],
)
def test_wrong_option_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("deepfm", SCHEMA, {option: value})
