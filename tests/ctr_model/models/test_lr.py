import numpy as np

from ctr_ps.ctr_model.models.lr import LogisticRegression
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import lr as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree


def test_schema_without_numbers_will_do() -> None:
    schema = Schema.numbered(0, 3)
    case = ModelCase(LogisticRegression(schema), schema, seed=1)

    assert_gradients_agree(case, oracle.probability)


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
