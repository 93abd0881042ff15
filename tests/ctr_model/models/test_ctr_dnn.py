import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.models.ctr_dnn import CtrDnn
from ctr_model.models.model import Lookup
from ctr_model.parameters import FlatLayout, ModelInputError
from ctr_model.schema import Schema, criteo_schema
from tests.reference import ctr_dnn as oracle

NUM_DENSE, NUM_SLOTS, DIM = 3, 4, 2


class Case:
    """A small model with random parameters and a batch with empty, single and multi-valued slots."""

    def __init__(self, seed: int, batch_size: int = 5, hidden: tuple[int, ...] = (7, 6)) -> None:
        rng = np.random.default_rng(seed)
        schema = Schema.numbered(NUM_DENSE, NUM_SLOTS)
        self.model = CtrDnn(schema, dim=DIM, hidden=hidden, table="t")
        lengths = rng.integers(0, 4, batch_size * NUM_SLOTS)
        self.num_unique = 6
        self.inverse = rng.integers(0, self.num_unique, lengths.sum()).astype(np.int32)
        self.batch = Batch(
            labels=rng.integers(0, 2, batch_size).astype(np.float32),
            dense=rng.normal(size=(batch_size, NUM_DENSE)).astype(np.float32),
            keys=self.inverse.astype(np.uint64),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            num_slots=NUM_SLOTS,
        )
        self.rows = rng.normal(size=(self.num_unique, DIM)).astype(np.float32)
        self.params = rng.normal(scale=0.5, size=self.model.num_params).astype(np.float32)

    def lookups(self) -> dict[str, Lookup]:
        return {"t": Lookup(self.rows, self.inverse, self.batch.offsets, self.batch.num_slots)}

    def gradient(self, workspace_size: int = 5) -> tuple[float, NDArray, NDArray]:
        dense_grad = np.full(self.model.num_params, np.nan, np.float32)
        sparse_grad = np.full_like(self.rows, np.nan)
        result = self.model.gradient(
            self.params,
            self.batch,
            self.lookups(),
            self.model.workspace(workspace_size),
            dense_grad,
            {"t": sparse_grad},
        )
        return result.loss, dense_grad, sparse_grad

    def oracle_loss(self, params: NDArray, rows: NDArray) -> float:
        tensors = FlatLayout(self.model.segments).views(params)
        inputs = oracle.network_input(
            self.batch.dense.astype(np.float64),
            rows,
            self.inverse.tolist(),
            self.batch.offsets.tolist(),
            NUM_SLOTS,
        )
        assert self.batch.labels is not None
        return oracle.loss(self.batch.labels.astype(np.float64), inputs, tensors)


def finite_differences(function, at: NDArray, step: float = 1e-5) -> NDArray:
    grad = np.zeros_like(at)
    for i in range(at.size):
        upper, lower = at.copy(), at.copy()
        upper.flat[i] += step
        lower.flat[i] -= step
        grad.flat[i] = (function(upper) - function(lower)) / (2 * step)
    return grad


@pytest.mark.parametrize("seed", range(4))
def test_every_gradient_agrees_with_finite_differences(seed: int) -> None:
    case = Case(seed)
    params, rows = case.params.astype(np.float64), case.rows.astype(np.float64)

    _, dense_grad, sparse_grad = case.gradient()

    expected_dense = finite_differences(lambda p: case.oracle_loss(p, rows), params)
    expected_sparse = finite_differences(lambda r: case.oracle_loss(params, r), rows)
    np.testing.assert_allclose(dense_grad, expected_dense, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(sparse_grad, expected_sparse, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_loss_and_predictions_agree_with_the_oracle(seed: int) -> None:
    case = Case(seed, hidden=(5,))
    lookups = case.lookups()

    loss, _, _ = case.gradient()
    predicted = case.model.predict(case.params, case.batch, lookups, case.model.workspace(8))

    inputs = oracle.network_input(
        case.batch.dense, case.rows, case.inverse.tolist(), case.batch.offsets.tolist(), NUM_SLOTS
    )
    tensors = FlatLayout(case.model.segments).views(case.params.astype(np.float64))
    expected = [oracle.probability(x, tensors) for x in inputs]
    np.testing.assert_allclose(predicted, expected, rtol=1e-4)
    assert loss == pytest.approx(case.oracle_loss(case.params, case.rows), rel=1e-5)


def test_gradient_does_not_depend_on_the_size_of_the_workspace() -> None:
    case = Case(1)

    exact, larger = case.gradient(5), case.gradient(64)

    assert exact[0] == larger[0]
    assert exact[1].tobytes() == larger[1].tobytes()
    assert exact[2].tobytes() == larger[2].tobytes()


def test_gradient_is_the_sum_over_examples() -> None:
    """A batch given twice has twice the gradient."""
    once = Case(2)
    twice = Case(2)
    batch = once.batch
    assert batch.labels is not None
    twice.inverse = np.concatenate([once.inverse, once.inverse])
    twice.batch = Batch(
        labels=np.concatenate([batch.labels, batch.labels]),
        dense=np.concatenate([batch.dense, batch.dense]),
        keys=np.concatenate([batch.keys, batch.keys]),
        offsets=np.concatenate([batch.offsets, batch.offsets[1:] + batch.offsets[-1]]),
        num_slots=NUM_SLOTS,
    )

    _, dense_once, sparse_once = once.gradient()
    _, dense_twice, sparse_twice = twice.gradient(10)

    np.testing.assert_allclose(dense_twice, 2 * dense_once, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sparse_twice, 2 * sparse_once, rtol=1e-4, atol=1e-6)


def test_unlabelled_batch_has_no_gradient() -> None:
    case = Case(3)
    case.batch = dataclasses.replace(case.batch, labels=None)

    with pytest.raises(ModelInputError, match="needs labels"):
        case.gradient()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": np.zeros((5, 2), np.float32)}, "dense columns is 2, the model expects 3"),
        ({"labels": np.zeros(6, np.float32)}, "labels is 6, the model expects 5"),
        ({"num_slots": 5}, "slots is 5, the model expects 4"),
        ({"offsets": np.zeros(20, np.int32)}, "length of offsets is 20, the model expects 21"),
        ({"offsets": np.zeros(21, np.int32)}, "length of inverse is 21, the model expects 0"),
    ],
)
def test_batch_of_another_shape_is_refused(change: dict, message: str) -> None:
    case = Case(3)
    case.batch = dataclasses.replace(case.batch, **change)

    with pytest.raises(ModelInputError, match=message):
        case.gradient()


def test_batch_larger_than_the_workspace_is_refused() -> None:
    with pytest.raises(ModelInputError, match="5 examples, the workspace holds 4"):
        Case(3).gradient(workspace_size=4)


def test_rows_of_another_width_are_refused() -> None:
    case = Case(3)
    case.rows = np.zeros((6, DIM + 1), np.float32)

    with pytest.raises(ModelInputError, match="width of the rows of table 't' is 3"):
        case.gradient()


def test_lookup_of_other_keys_is_refused() -> None:
    case = Case(3)
    case.inverse = case.inverse[1:]

    with pytest.raises(ModelInputError, match="length of inverse"):
        case.gradient()


def test_parameters_of_another_model_are_refused() -> None:
    case = Case(3)
    case.params = case.params[1:]

    with pytest.raises(ModelInputError, match=f"has {case.model.num_params} dense parameters"):
        case.gradient()


def test_workspace_of_another_model_is_refused() -> None:
    case, other = Case(3), Case(3, hidden=(9,))
    lookups = case.lookups()

    with pytest.raises(ModelInputError, match="another model's"):
        case.model.predict(case.params, case.batch, lookups, other.model.workspace(5))


def test_sparse_gradient_of_another_shape_is_refused() -> None:
    case = Case(3)

    with pytest.raises(ModelInputError, match=r"gradient of table 't' is \(5, 2\)"):
        case.model.gradient(
            case.params,
            case.batch,
            case.lookups(),
            case.model.workspace(5),
            np.empty(case.model.num_params, np.float32),
            {"t": np.empty((5, DIM), np.float32)},
        )


def test_threads_with_one_model_compute_what_one_thread_computes() -> None:
    cases = [Case(seed, batch_size=64, hidden=(33, 17)) for seed in range(4)]
    for case in cases:
        case.model = cases[0].model
    barrier = threading.Barrier(len(cases))

    def repeat(case: Case) -> list[tuple[float, NDArray, NDArray]]:
        barrier.wait(timeout=10)
        return [case.gradient(64) for _ in range(20)]

    alone = [case.gradient(64) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(repeat, cases))

    for (loss, dense_grad, sparse_grad), repeated in zip(alone, together, strict=True):
        for other in repeated:
            assert other[0] == loss
            assert other[1].tobytes() == dense_grad.tobytes()
            assert other[2].tobytes() == sparse_grad.tobytes()


def test_tutorial_network_has_the_tutorials_sizes() -> None:
    model = CtrDnn(criteo_schema())

    shapes = {segment.name: segment.shape for segment in model.segments}
    stds = {segment.name: segment.init_std for segment in model.segments}

    assert shapes["fc1.weight"] == (273, 400)
    assert shapes["fc4.weight"] == (400, 2)
    assert model.num_params == 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 * 2 + 2
    assert stds["fc2.weight"] == pytest.approx(1 / 20)
    assert stds["fc2.bias"] == 0
