from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ctr_ps.ctr_model.models.din import Din
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from tests.reference import models as oracle
from tests.support.model_cases import ModelCase, assert_gradients_agree, assert_predictions_agree

# C3 and C4 are histories of C1.
SCHEMA = replace(Schema.numbered(num_dense=2, num_slots=4), shares={"C3": "C1", "C4": "C1"})
SMALL = {"dim": 2, "hidden": [6], "attention_hidden": [4, 3]}


@pytest.mark.parametrize("max_length", [1, 2, 50])
def test_several_histories_may_have_one_target(max_length: int) -> None:
    case = ModelCase(Din(SCHEMA, **SMALL, max_length=max_length), SCHEMA, seed=1)
    of_example = partial(oracle.din, histories={2: 0, 3: 0}, max_length=max_length)

    assert_gradients_agree(case, of_example)
    assert_predictions_agree(case, of_example)


def test_histories_may_be_fewer_than_slots_that_share_keys() -> None:
    case = ModelCase(Din(SCHEMA, **SMALL, histories={"C4": "C1"}), SCHEMA, seed=1)

    assert_predictions_agree(case, partial(oracle.din, histories={3: 0}, max_length=50))
    assert {segment.name.split(".")[1] for segment in case.model.segments[4:]} == {"C4"}


def test_slots_that_share_keys_may_be_histories_of_each_other() -> None:
    """The target needs no keys of its own, only the same."""
    case = ModelCase(Din(SCHEMA, **SMALL, histories={"C4": "C3"}), SCHEMA, seed=1)

    assert_gradients_agree(case, partial(oracle.din, histories={3: 2}, max_length=50))


def test_a_history_and_its_target_may_have_a_dim_of_their_own() -> None:
    slots = {"C1": {"dim": 3}, "C3": {"dim": 3}}
    model = Din(SCHEMA, **SMALL, slots=slots, histories={"C3": "C1"})
    case = ModelCase(model, SCHEMA, seed=1)

    assert [(table.name, table.dim, table.slots) for table in model.tables] == [
        ("embedding", 2, (1, 3)),
        ("embedding_3", 3, (0, 2)),
    ]

    def of_example(dense, slots, tensors):  # type: ignore[no-untyped-def]
        first, second = slots["embedding_3"], slots["embedding"]
        in_order = [first[0], second[0], first[1], second[1]]
        return oracle.din(dense, {"embedding": in_order}, tensors, histories={2: 0}, max_length=50)

    assert_gradients_agree(case, of_example)


def test_a_batch_without_any_history_will_do() -> None:
    model = Din(SCHEMA, **SMALL)
    case = ModelCase(model, SCHEMA, seed=1, batch_size=2)
    nothing = np.zeros_like(case.batch.offsets)
    case.batch = replace(case.batch, keys=case.batch.keys[:0], offsets=nothing)
    case.change_lookup(
        "embedding",
        rows=np.empty((0, 2), np.float32),
        inverse=np.empty(0, np.int32),
        offsets=nothing,
    )

    gradients = case.gradient()

    assert np.isfinite(gradients.dense).all()
    of_attention = gradients.dense[-sum(np.prod(s.shape) for s in model.segments[4:]) :]
    assert not of_attention.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"histories": {}}, "histories is empty, and no slots of the schema share keys"),
        (
            {"histories": {"C2": "C1"}},
            "histories.C2 is 'C1', but equal values of the two slots have different keys",
        ),
        ({"histories": {"C9": "C1"}}, "no slot 'C9', did you mean"),
        (
            {"histories": {"C3": "C4", "C4": "C1"}},
            "histories.C3 is 'C4', which is itself a history",
        ),
        ({"histories": {"C3": "C3"}}, "histories.C3 is 'C3', which is itself a history"),
        (
            {"slots": {"C3": {"pooling": "max"}}},
            "slots.C3.pooling: 'C3' is a history, pooled by at",
        ),
        ({"slots": {"C1": {"dim": 4}}}, "slots.C3.dim: the history 'C3' and its target 'C1' have"),
        ({"max_length": 0}, "max_length is 0, expected"),
        ({"attention_hidden": []}, "attention_hidden is .*, expected"),
    ],
)
def test_what_is_wrong_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("din", SCHEMA, options)


def test_a_schema_without_histories_is_refused() -> None:
    with pytest.raises(ValueError, match=r'such as shares = { history = "item" }'):
        build_model("din", Schema.numbered(num_dense=0, num_slots=2), {})
