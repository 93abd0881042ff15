import pytest

from ctr_ps.ctr_model.models.fm import Fm
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import fm as oracle
from tests.support.model_cases import ModelCase, assert_gradients_agree


@pytest.mark.parametrize("schema", [Schema.numbered(0, 3), Schema.numbered(13, 1)])
def test_any_columns_will_do(schema: Schema) -> None:
    assert_gradients_agree(ModelCase(Fm(schema, dim=3), schema, seed=1), oracle.probability)


def test_weights_start_at_zero_and_embeddings_do_not() -> None:
    model = Fm(criteo_schema())

    assert [(table.name, table.dim) for table in model.tables] == [("linear", 1), ("embedding", 10)]
    assert [table.init_range for table in model.tables] == [0.0, 0.01]
    assert model.num_params == 13 + 1
    assert all(segment.init_std == 0 for segment in model.segments)
