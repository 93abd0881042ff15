"""What holds for every model of the registry, and for the example of one's own."""

import dataclasses
import math
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from ctr_ps.ctr_model.models.model import initial_biases_of
from ctr_ps.ctr_model.parameters import EmbeddingTable, Floats, ModelInputError
from ctr_ps.ctr_model.registry import MODELS, build_model, with_delay, with_logit_offset
from tests.support.model_cases import (
    MY_MODEL,
    SCHEMA,
    SMALL,
    ModelCase,
    Oracle,
    assert_fake_negatives_are_weighted,
    assert_gradients_agree,
    assert_odds_are_predicted,
    assert_predictions_agree,
    small_case,
    small_model,
)

TABLES = [
    pytest.param(name, table, id=f"{name}-{table.name}")
    for name in SMALL
    for table in small_model(name).tables
]
every_model = pytest.mark.parametrize("name", SMALL)
every_table = pytest.mark.parametrize(("name", "table"), TABLES)


def assert_refused(case: ModelCase, message: str) -> None:
    """Checks that a gradient raises, and before it writes."""
    out = case.outputs()

    with pytest.raises(ModelInputError, match=message):
        case.gradient(out=out)

    assert np.isnan(out.dense).all()
    assert all(np.isnan(grad).all() for grad in out.sparse.values())


def squared_error(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, grad: Floats
) -> float:
    raise NotImplementedError


def test_every_model_of_the_registry_has_an_oracle() -> None:
    assert list(SMALL) == [*MODELS, MY_MODEL]


@every_model
def test_log_loss_is_known_from_other_losses(name: str) -> None:
    model = small_model(name)
    assert model.has_log_loss

    model._loss = dataclasses.replace(model._loss, with_gradient=squared_error)

    assert not model.has_log_loss


@every_model
@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_agrees_with_finite_differences(name: str, seed: int) -> None:
    assert_gradients_agree(small_case(name, seed), SMALL[name].oracle)


@every_model
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_predictions_agree_with_the_oracle(name: str, seed: int) -> None:
    assert_predictions_agree(small_case(name, seed), SMALL[name].oracle)


@every_model
def test_model_of_biases_alone_predicts_the_rates_that_it_starts_at(name: str) -> None:
    case = small_case(name, 0)
    rates = [0.03]
    for table in case.lookups:
        case.change_lookup(table, rows=np.zeros_like(case.lookups[table].rows))

    biases = initial_biases_of(case.model, rates)

    values = [
        biases.get(segment.name, [0.0] * math.prod(segment.shape))
        for segment in case.model.segments
    ]
    case.params = np.concatenate(values).astype(np.float32)
    predicted = case.predict().reshape(case.batch.size, -1)
    np.testing.assert_allclose(predicted, [rates] * case.batch.size, rtol=1e-5)


@every_model
def test_weights_multiply_loss_and_gradient(name: str) -> None:
    case = small_case(name, 4)
    case.weigh()

    assert_gradients_agree(case, SMALL[name].oracle)
    assert_predictions_agree(case, SMALL[name].oracle)


@every_model
def test_weight_of_1_changes_no_bit(name: str) -> None:
    case = small_case(name, 5)
    without = case.gradient()
    case.batch = dataclasses.replace(case.batch, weights=np.ones(case.batch.size, np.float32))

    assert case.gradient().as_bytes() == without.as_bytes()


@every_model
def test_logit_offset_is_of_the_loss_alone(name: str) -> None:
    """Training sees sigmoid(z + offset), predictions sigmoid(z)."""
    offset, oracle = 1.5, SMALL[name].oracle

    def shifted(*arrays) -> float:
        p = oracle(*arrays)
        return 1 / (1 + (1 - p) / p * np.exp(-offset))

    case = small_case(name, 6)
    predicted = case.predict()
    case.model = with_logit_offset(case.model, offset)

    assert_gradients_agree(case, shifted)
    assert case.predict().tobytes() == predicted.tobytes()


@every_model
@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_fake_negatives_are_weighted_by_own_predictions(name: str, offset: float) -> None:
    assert_fake_negatives_are_weighted(small_case(name, 6), SMALL[name].oracle, offset)


@every_model
def test_calibration_of_fake_negatives_predicts_the_odds(name: str) -> None:
    assert_odds_are_predicted(small_case(name, 5, batch_size=20))


def test_delay_of_another_loss_cannot_be_corrected() -> None:
    model = small_model("lr")
    model._loss = dataclasses.replace(model._loss, with_gradient=squared_error)

    assert with_delay(model, "none") is model
    with pytest.raises(ValueError, match="or its own loss, but 'fnw' needs the log loss"):
        with_delay(model, "fnw")


def test_logit_of_another_loss_cannot_be_corrected() -> None:
    model = small_model("lr")
    model._loss = dataclasses.replace(model._loss, with_gradient=squared_error)

    with pytest.raises(ValueError, match="has its own loss, whose logit cannot be corrected"):
        with_logit_offset(model, 1.0)


@every_model
def test_missing_indicator_is_one_more_input(name: str) -> None:
    columns = (dataclasses.replace(SCHEMA.dense[0], missing_indicator=True), *SCHEMA.dense[1:])
    schema = dataclasses.replace(SCHEMA, dense=columns)
    case = ModelCase(build_model(name, schema, SMALL[name].options), schema, seed=1)

    assert case.batch.dense.shape[1] == 4
    assert_gradients_agree(case, SMALL[name].oracle)
    assert_predictions_agree(case, SMALL[name].oracle)


@every_model
def test_probabilities_of_a_step_are_those_before_it(name: str) -> None:
    case = small_case(name, 1)
    out = case.outputs()

    result = case.model.gradient(
        case.params, case.batch, case.lookups, case.model.workspace(5), out.dense, out.sparse
    )

    assert result.probabilities.tobytes() == case.predict().tobytes()


@every_model
def test_gradient_does_not_depend_on_the_workspace(name: str) -> None:
    """Neither on its size nor on what the step before left in it."""
    case, other = small_case(name, 1), small_case(name, 2, batch_size=64)
    other.model = case.model
    workspace = case.model.workspace(64)
    other.gradient(workspace)

    used = case.gradient(workspace)

    assert used.as_bytes() == case.gradient().as_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_step_allocates_nothing_as_long_as_the_batch(name: str) -> None:
    case = small_case(name, 1, batch_size=4096)
    workspace, out = case.model.workspace(4096), case.outputs()
    case.gradient(workspace, out)
    case.predict(workspace)
    tracemalloc.start()

    try:
        case.gradient(workspace, out)
        case.predict(workspace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < case.batch.size * np.dtype(np.float32).itemsize


@every_model
def test_unlabelled_batch_has_no_gradient_but_predictions(name: str) -> None:
    case = small_case(name, 3)
    labelled = case.predict().tobytes()
    case.batch = dataclasses.replace(case.batch, labels=None)

    assert_refused(case, "has no labels")
    assert case.predict().tobytes() == labelled


@every_model
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": np.zeros((5, 2), np.float32)}, "dense columns is 2, the model expects 3"),
        ({"labels": np.zeros(6, np.float32)}, "labels is 6, the model expects 5"),
        ({"num_slots": 5}, "number of slots is 5, the model expects 4"),
    ],
)
def test_batch_of_another_shape_is_refused(name: str, change: dict, message: str) -> None:
    case = small_case(name, 3)
    case.batch = dataclasses.replace(case.batch, **change)

    assert_refused(case, message)


@every_model
def test_batch_larger_than_the_workspace_is_refused(name: str) -> None:
    case = small_case(name, 3)

    with pytest.raises(ModelInputError, match="5 examples, the workspace holds 4"):
        case.gradient(case.model.workspace(4))


@every_table
@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("rows", "rows of table '{table}' is {found}, the model expects {expected}"),
        ("num_slots", "slots of table '{table}' is {found}, the model expects {expected}"),
        ("offsets", "length of offsets is {found}, the model expects {expected}"),
        ("inverse", "length of inverse is {found}, the model expects {expected}"),
    ],
)
def test_lookup_of_another_shape_is_refused(
    name: str, table: EmbeddingTable, field: str, what: str
) -> None:
    case = small_case(name, 3)
    lookup = case.lookups[table.name]
    value, expected = {
        "rows": (np.zeros((len(lookup.rows), table.dim + 1), np.float32), table.dim),
        "num_slots": (lookup.num_slots + 1, lookup.num_slots),
        "offsets": (lookup.offsets[:-1], len(lookup.offsets)),
        "inverse": (lookup.inverse[1:], len(lookup.inverse)),
    }[field]
    found = expected + 1 if field in ("rows", "num_slots") else expected - 1
    case.change_lookup(table.name, **{field: value})

    assert_refused(case, what.format(table=table.name, found=found, expected=expected))


@every_table
def test_prediction_refuses_what_a_step_refuses(name: str, table: EmbeddingTable) -> None:
    case = small_case(name, 3)
    case.change_lookup(table.name, inverse=case.lookups[table.name].inverse[1:])

    with pytest.raises(ModelInputError, match="length of inverse"):
        case.predict()


@every_table
def test_gradient_of_other_rows_is_refused(name: str, table: EmbeddingTable) -> None:
    case = small_case(name, 3)
    out = case.outputs()
    out.sparse[table.name] = out.sparse[table.name][1:]

    with pytest.raises(ModelInputError, match=f"gradient of table '{table.name}' is "):
        case.gradient(out=out)

    assert np.isnan(out.dense).all()


@every_model
def test_parameters_of_another_model_are_refused(name: str) -> None:
    case = small_case(name, 3)
    case.params = case.params[1:]

    assert_refused(case, f"has {case.model.num_params} dense parameters")


@every_model
def test_dense_gradient_of_another_model_is_refused(name: str) -> None:
    case = small_case(name, 3)
    out = case.outputs()
    out.dense = out.dense[1:]

    with pytest.raises(ModelInputError, match=f"has {case.model.num_params} dense parameters"):
        case.gradient(out=out)

    assert all(np.isnan(grad).all() for grad in out.sparse.values())


@every_model
def test_workspace_of_another_model_is_refused(name: str) -> None:
    case, other = small_case(name, 3), small_model(name)

    with pytest.raises(ModelInputError, match="belongs to another model"):
        case.predict(other.workspace(5))
    with pytest.raises(ModelInputError, match="belongs to another model"):
        case.gradient(other.workspace(5))


@every_model
def test_threads_with_one_model_compute_what_one_thread_computes(name: str) -> None:
    cases = [small_case(name, seed, batch_size=64) for seed in range(4)]
    for case in cases:
        case.model = cases[0].model
    barrier = threading.Barrier(len(cases))

    def repeat(case: ModelCase) -> list[list[bytes]]:
        workspace = case.model.workspace(64)
        barrier.wait(timeout=10)
        return [case.gradient(workspace).as_bytes() for _ in range(20)]

    alone = [case.gradient().as_bytes() for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(repeat, cases))

    assert together == [[expected] * 20 for expected in alone]


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
def test_gradients_of_pooled_slots_agree_with_finite_differences(name: str, seed: int) -> None:
    assert_gradients_agree(*case_of(name, seed))


@pytest.mark.parametrize("name", POOLED)
def test_loss_and_predictions_of_pooled_slots_agree_with_the_oracle(name: str) -> None:
    assert_predictions_agree(*case_of(name, seed=5))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fm", {"pooling": "max"}, "model 'fm' has no option 'pooling': it multiplies the emb"),
        (
            "fm",
            {"slots": {"C1": {"dim": 2}}},
            "model 'fm' has no option 'slots': .*all slots have one",
        ),
        ("lr", {"pooling": "mean"}, "model 'lr' has no option 'pooling': it has one weight for"),
        (
            "deepfm",
            {"slots": {"C1": {"dim": 2}}},
            "slots.C1.dim is 2, but the factorization machine multiplies .*, so all must have dim = 10",
        ),
    ],
)
def test_models_that_need_one_dim_say_why(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, SCHEMA, options)
