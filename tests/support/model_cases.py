"""Random cases for any model, and checks against an oracle: the model in float64, slow and obvious.

A model gets all tests of tests/ctr_model/models/test_models.py by one line in `SMALL`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Model, Workspace
from ctr_ps.ctr_model.parameters import EmbeddingTable, FlatLayout, Lookup, select_slots
from ctr_ps.ctr_model.registry import build_model, with_delay, with_logit_offset
from ctr_ps.ctr_model.schema import Schema
from tests.reference import models, my_model

Array = NDArray[np.float64]

# probability(dense, slots, tensors) of one example's click, from
#   dense    float64[num_dense]
#   slots    by table, for each of its slots and crosses float64[K, D]: the rows of the keys there, in
#            order and with repetitions; K = 0 for an empty slot
#   tensors  the dense parameters by name
Oracle = Callable[[Array, Mapping[str, Sequence[Array]], Mapping[str, Array]], float]

# C3 is a history of C1, where a model has such.
SCHEMA = replace(Schema.numbered(num_dense=3, num_slots=4), shares={"C3": "C1"})


@dataclass(frozen=True)
class Small:
    oracle: Oracle
    options: dict[str, Any] = field(default_factory=dict)


# A custom model has the same tests.
MY_MODEL = "examples/my_model.py:MyModel"

SMALL: dict[str, Small] = {
    "lr": Small(models.lr),
    "fm": Small(models.fm, {"dim": 2}),
    "ctr_dnn": Small(models.ctr_dnn, {"dim": 2, "hidden": [7, 6]}),
    "wide_deep": Small(
        models.wide_deep, {"dim": 2, "hidden": [7, 6], "crosses": [["C1", "C2"], ["C4", "C1"]]}
    ),
    "deepfm": Small(models.deepfm, {"dim": 2, "hidden": [7, 6]}),
    "dcn_v2": Small(models.dcn_v2, {"dim": 2, "hidden": [7, 6]}),
    MY_MODEL: Small(my_model.probability, {"slots": ["C4", "C2"], "dim": 2}),
}


def small_model(name: str) -> Model:
    """Returns the small model `name` for the columns of `SCHEMA`."""
    return build_model(name, SCHEMA, SMALL[name].options)


def small_case(name: str, seed: int, batch_size: int = 5) -> "ModelCase":
    return ModelCase(small_model(name), SCHEMA, seed, batch_size)


@dataclass
class Gradients:
    """Result of one call of `gradient`."""

    loss: float
    dense: NDArray[np.float32]
    sparse: dict[str, NDArray[np.float32]]

    def as_bytes(self) -> list[bytes]:
        sparse = [self.sparse[name].tobytes() for name in sorted(self.sparse)]
        return [np.float64(self.loss).tobytes(), self.dense.tobytes(), *sparse]


class ModelCase:
    """A model with random parameters and rows, and a batch of all kinds of slots.

    Tests may replace `batch`, `lookups` and `params`.
    """

    def __init__(self, model: Model, schema: Schema, seed: int, batch_size: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.model = model
        self.batch = random_batch(schema, batch_size, rng)
        self.lookups = {table.name: _lookup(self.batch, table, rng) for table in model.tables}
        self.params = rng.normal(scale=0.5, size=model.num_params).astype(np.float32)

    def predict(self, workspace: Workspace | None = None) -> NDArray[np.float32]:
        own = workspace or self.model.workspace(self.batch.size)
        return self.model.predict(self.params, self.batch, self.lookups, own)

    def outputs(self) -> Gradients:
        """Returns arrays for gradients, full of nan."""
        return Gradients(
            loss=np.nan,
            dense=np.full(self.model.num_params, np.nan, np.float32),
            sparse={
                name: np.full_like(lookup.rows, np.nan) for name, lookup in self.lookups.items()
            },
        )

    def gradient(
        self, workspace: Workspace | None = None, out: Gradients | None = None
    ) -> Gradients:
        """Returns the model's loss and gradients, written to `out` if given."""
        out = out or self.outputs()
        own = workspace or self.model.workspace(self.batch.size)
        result = self.model.gradient(
            self.params, self.batch, self.lookups, own, out.dense, out.sparse
        )
        out.loss = result.loss
        return out

    def weigh(self) -> None:
        self.batch = replace(
            self.batch, weights=np.linspace(0.0, 3.0, self.batch.size).astype(np.float32)
        )

    def change_lookup(self, table: str, **changes: Any) -> None:
        self.lookups[table] = self.lookups[table]._replace(**changes)

    def oracle_probabilities(
        self, oracle: Oracle, params: Array, rows: Mapping[str, Array]
    ) -> list[float]:
        """Returns the oracle's result, by default for the model's own parameters and rows in float64."""
        segments = self.model.segments
        views = FlatLayout(segments).views(params)  # type: ignore[arg-type]  # float64 here
        tensors = {segment.name: view for segment, view in zip(segments, views, strict=True)}
        dense = self.batch.dense.astype(np.float64)
        return [
            oracle(dense[b], {name: self._slots(name, b, rows[name]) for name in rows}, tensors)
            for b in range(self.batch.size)
        ]

    def oracle_loss(self, oracle: Oracle, params: Array, rows: Mapping[str, Array]) -> float:
        """Returns the log loss of `oracle_probabilities`, summed over the examples by their weights."""
        labels = self.batch.labels
        assert labels is not None
        clicks = np.array(self.oracle_probabilities(oracle, params, rows))
        losses = -np.log(np.where(labels == 1, clicks, 1.0 - clicks))
        return float(np.sum(losses if self.batch.weights is None else losses * self.batch.weights))

    def values(self) -> tuple[Array, dict[str, Array]]:
        rows = {name: lookup.rows.astype(np.float64) for name, lookup in self.lookups.items()}
        return self.params.astype(np.float64), rows

    def _slots(self, table: str, b: int, rows: Array) -> list[Array]:
        lookup = self.lookups[table]
        starts = lookup.offsets[b * lookup.num_slots : (b + 1) * lookup.num_slots]
        stops = lookup.offsets[b * lookup.num_slots + 1 :]
        return [
            rows[lookup.inverse[start:stop]] for start, stop in zip(starts, stops, strict=False)
        ]


def random_batch(schema: Schema, batch_size: int, rng: np.random.Generator) -> Batch:
    """Returns examples with 0 to 3 keys a slot, of 6 keys altogether.

    The first example has a slot with one key twice, an empty slot and a slot with one key, and the last has
    no keys at all.
    """
    num_slots = len(schema.slots)
    lengths = rng.integers(0, 4, (batch_size, num_slots))
    lengths[0, :3] = [2, 0, 1][:num_slots]
    lengths[-1] = 0
    keys = rng.integers(0, 6, lengths.sum()).astype(np.uint64)
    keys[1] = keys[0]
    return Batch(
        labels=rng.integers(0, 2, batch_size).astype(np.float32),
        dense=rng.normal(size=(batch_size, schema.num_dense)).astype(np.float32),
        keys=keys,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        num_slots=num_slots,
    )


def assert_gradients_agree(case: ModelCase, oracle: Oracle) -> None:
    """Checks the gradient of each table and of all dense parameters by finite differences."""
    params, rows = case.values()

    actual = case.gradient()

    expected = finite_differences(lambda at: case.oracle_loss(oracle, at, rows), params)
    _assert_close(actual.dense, expected, "dense parameters")
    for name in rows:
        expected = finite_differences(
            lambda at, name=name: case.oracle_loss(oracle, params, {**rows, name: at}), rows[name]
        )
        _assert_close(actual.sparse[name], expected, f"table {name!r}")


def assert_fake_negatives_are_weighted(case: ModelCase, oracle: Oracle, offset: float) -> None:
    """Checks `fnw` in float64: the probabilities before the step in its weights are constants.

    Training sees the logit plus `offset`; the weights do not.
    """
    case.weigh()
    fixed = copy.copy(case)
    p = np.array(case.oracle_probabilities(oracle, *case.values()))
    weights = np.where(case.batch.labels == 1, 1 + p, 1 - p**2) * case.batch.weights
    fixed.batch = replace(case.batch, weights=weights)
    case.oracle_loss = fixed.oracle_loss  # type: ignore[method-assign]
    case.model = with_logit_offset(with_delay(case.model, "fnw"), offset)

    def shifted(*arrays: Any) -> float:
        p = oracle(*arrays)
        return 1 / (1 + (1 - p) / p * np.exp(-offset))

    assert_gradients_agree(case, shifted)
    own, out = case.model.workspace(case.batch.size), case.outputs()
    step = case.model.gradient(case.params, case.batch, case.lookups, own, out.dense, out.sparse)
    np.testing.assert_allclose(step.loss, case.oracle_loss(shifted, *case.values()), rtol=1e-5)
    np.testing.assert_allclose(step.probabilities, p / (p + np.exp(-offset)), rtol=1e-4)
    np.testing.assert_allclose(case.predict(), p, rtol=1e-4)


def assert_odds_are_predicted(case: ModelCase) -> None:
    """Checks `fnc`: the loss is as without, and predictions are b / (1 - b), up to 1."""
    plain, rates = case.gradient(), case.predict().astype(np.float64)
    case.model = with_delay(case.model, "fnc")

    assert case.gradient().as_bytes() == plain.as_bytes()
    expected = np.minimum(rates / (1 - rates), 1)
    assert {*(expected == 1)} == {True, False}
    np.testing.assert_allclose(case.predict(), expected, rtol=1e-5)


def assert_slopes_agree(case: ModelCase, oracle: Oracle, step: float = 1e-5) -> None:
    """Checks the gradient along random directions, by two calls of a slow oracle for each."""
    params, rows = case.values()
    rng = np.random.default_rng(7)
    actual = case.gradient()
    for _ in range(3):
        way = rng.normal(size=params.size)
        ways = {name: rng.normal(size=each.shape) for name, each in rows.items()}

        def loss(distance: float, way: Array = way, ways: Mapping[str, Array] = ways) -> float:
            moved = {name: each + distance * ways[name] for name, each in rows.items()}
            return case.oracle_loss(oracle, params + distance * way, moved)

        expected = (loss(step) - loss(-step)) / (2 * step)
        found = np.dot(actual.dense, way) + sum(
            np.sum(actual.sparse[name] * ways[name]) for name in rows
        )
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def assert_predictions_agree(case: ModelCase, oracle: Oracle) -> None:
    params, rows = case.values()

    np.testing.assert_allclose(
        case.predict(), case.oracle_probabilities(oracle, params, rows), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        case.gradient().loss, case.oracle_loss(oracle, params, rows), rtol=1e-5
    )


def finite_differences(function: Callable[[Array], float], at: Array, step: float = 1e-5) -> Array:
    """Returns the gradient of `function`, by central differences."""
    grad = np.zeros_like(at)
    for i in range(at.size):
        upper, lower = at.copy(), at.copy()
        upper.flat[i] += step
        lower.flat[i] -= step
        grad.flat[i] = (function(upper) - function(lower)) / (2 * step)
    return grad


def _assert_close(actual: NDArray[np.float32], expected: Array, what: str) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4, err_msg=what)


def _lookup(batch: Batch, table: EmbeddingTable, rng: np.random.Generator) -> Lookup:
    selected = select_slots(batch, table.slots, table.crosses)
    unique, inverse = np.unique(selected.keys, return_inverse=True)
    rows = rng.normal(scale=0.7, size=(len(unique), table.dim)).astype(np.float32)
    return Lookup(rows, inverse.astype(np.int32), selected.offsets, selected.num_slots)
