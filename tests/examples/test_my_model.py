"""The example of a model of one's own; tests/ctr_model/models/test_models.py checks its gradients."""

import pytest

from ctr_model.registry import build_model
from ctr_model.schema import Schema
from tests.reference import my_model as oracle
from tests.support.model_cases import MY_MODEL, ModelCase, assert_gradients_agree


def test_one_slot_and_no_numbers_will_do() -> None:
    schema = Schema.numbered(0, 3)
    model = build_model(MY_MODEL, schema, {"slots": ["C2"], "dim": 3})

    assert_gradients_agree(ModelCase(model, schema, seed=1), oracle.probability)


def test_tables_have_their_own_dims_slots_and_optimizers() -> None:
    weight, embedding = build_model(MY_MODEL, Schema.numbered(1, 3), {"slots": ["C3"]}).tables

    assert (weight.dim, weight.slots) == (1, None)
    assert (embedding.dim, embedding.slots) == (4, (2,))
    assert weight.optimizer is not None
    assert embedding.optimizer is None


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="slots is empty"):
        build_model(MY_MODEL, Schema.numbered(1, 3), {"slots": []})
