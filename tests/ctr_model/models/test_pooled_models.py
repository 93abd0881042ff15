"""The models whose slots have poolings and widths of their own, against their oracles."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ctr_ps.ctr_model.registry import build_model
from tests.support.model_cases import (
    SCHEMA,
    SMALL,
    ModelCase,
    Oracle,
    assert_gradients_agree,
    assert_predictions_agree,
)

Array = NDArray[np.float64]

POOLED = ["ctr_dnn", "wide_deep", "deepfm", "dcn_v2"]
SLOTS = {"C2": {"pooling": "max"}, "C3": {"pooling": "sum", "dim": 3}, "C4": {"dim": 3}}
TABLE_AND_POSITION = [("embedding", 0), ("embedding", 1), ("embedding_3", 0), ("embedding_3", 1)]
POOLINGS = ["mean", "max", "sum", "mean"]


def pooled(rows: Array, pooling: str) -> Array:
    if not len(rows):
        return np.zeros((1, rows.shape[1]))
    function = {"sum": np.sum, "mean": np.mean, "max": np.max}[pooling]
    return function(rows, axis=0, keepdims=True)


def with_pooling(oracle: Oracle, places: Sequence[tuple[str, int]]) -> Oracle:
    """Returns an oracle that is given the pooled row of each slot where it would add the rows up."""

    def probability(
        dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
    ) -> float:
        of_slots = [
            pooled(slots[table][position], pooling)
            for (table, position), pooling in zip(places, POOLINGS, strict=True)
        ]
        pairs = {"pooled": of_slots} if "linear" in slots else {"embedding": of_slots}
        return oracle(dense, {**slots, **pairs}, tensors)

    return probability


def case_of(name: str, seed: int) -> tuple[ModelCase, Oracle]:
    """Returns a model with all poolings, and two widths where it can have them."""
    has_one_dim = name == "deepfm"
    slots = {
        slot: {key: value for key, value in options.items() if not (has_one_dim and key == "dim")}
        for slot, options in SLOTS.items()
    }
    options = {**SMALL[name].options, "pooling": "mean", "slots": slots}
    places = [("embedding", s) for s in range(4)] if has_one_dim else TABLE_AND_POSITION
    model = build_model(name, SCHEMA, options)
    return ModelCase(model, SCHEMA, seed), with_pooling(SMALL[name].oracle, places)


@pytest.mark.parametrize("name", POOLED)
@pytest.mark.parametrize("seed", range(3))
def test_every_gradient_agrees_with_finite_differences(name: str, seed: int) -> None:
    assert_gradients_agree(*case_of(name, seed))


@pytest.mark.parametrize("name", POOLED)
def test_loss_and_predictions_agree_with_the_oracle(name: str) -> None:
    assert_predictions_agree(*case_of(name, seed=5))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fm", {"pooling": "max"}, "model 'fm' has no option 'pooling': it multiplies the emb"),
        ("fm", {"slots": {"C1": {"dim": 2}}}, "model 'fm' has no option 'slots': .*all have one"),
        ("lr", {"pooling": "mean"}, "model 'lr' has no option 'pooling': it has one weight for"),
        (
            "deepfm",
            {"slots": {"C1": {"dim": 2}}},
            "slots.C1.dim is 2, but the factorization machine multiplies .*, so all have dim = 10",
        ),
    ],
)
def test_models_that_need_one_dim_say_why(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, SCHEMA, options)
