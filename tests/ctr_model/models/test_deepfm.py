from ctr_ps.ctr_model.models.deepfm import DeepFm
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import deepfm as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree


def test_any_number_of_hidden_layers_and_numbers_will_do() -> None:
    for schema, hidden in [(Schema.numbered(0, 3), (5,)), (SCHEMA, (4, 5, 6))]:
        case = ModelCase(DeepFm(schema, dim=2, hidden=hidden), schema, seed=1)

        assert_gradients_agree(case, oracle.probability)


def test_both_parts_share_one_table_of_embeddings() -> None:
    model = DeepFm(criteo_schema())

    assert [(table.name, table.dim) for table in model.tables] == [("linear", 1), ("embedding", 10)]
    assert model.num_params == 13 + 1 + 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 1
