import numpy as np
import pytest

from ctr_model.models.fm import Fm
from ctr_model.registry import build_model
from ctr_model.schema import Schema, criteo_schema
from tests.reference import fm as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree


@pytest.mark.parametrize("schema", [Schema.numbered(0, 3), Schema.numbered(13, 1)])
def test_any_columns_will_do(schema: Schema) -> None:
    assert_gradients_agree(ModelCase(Fm(schema, dim=3), schema, seed=1), oracle.probability)


def test_key_that_stands_in_an_example_twice_meets_itself() -> None:
    """The first slot of the first example has one key twice: <v, v> of its own is in the logit."""
    case = ModelCase(Fm(SCHEMA, dim=2), SCHEMA, seed=1)
    case.params[:] = 0
    case.lookups["linear"].rows[:] = 0
    rows = case.lookups["embedding"].rows
    twice = case.lookups["embedding"].inverse[0]
    rows[np.arange(len(rows)) != twice] = 0

    logit = float(np.log(1 / (1 / case.predict()[0] - 1)))

    features = case.lookups["embedding"].inverse[: case.batch.offsets[len(SCHEMA.slots)]]
    times = int((features == twice).sum())
    pairs = times * (times - 1) // 2
    assert pairs >= 1
    assert logit == pytest.approx(pairs * float(rows[twice] @ rows[twice]), rel=1e-4)


def test_weights_start_at_zero_and_embeddings_do_not() -> None:
    model = Fm(criteo_schema())

    assert [(table.name, table.dim) for table in model.tables] == [("linear", 1), ("embedding", 10)]
    assert [table.init_range for table in model.tables] == [0.0, 0.01]
    assert model.num_params == 13 + 1
    assert all(segment.init_std == 0 for segment in model.segments)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("dim", 0, "dim is 0"), ("init_range", -1.0, "init_range is -1")],
)
def test_wrong_option_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("fm", SCHEMA, {option: value})
