"""Clipping of a batch's gradient, with PyTorch's as the oracle."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.training.clipping import clip
from tests.support.training import (
    job,
    random_batches,
    train_worker,
)

CLIPPED = "train.clip_norm=0.05"
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.5}",
)
DATA = [random_batches(8, 16, seed=seed) for seed in (1, 2)]


def random_gradients(examples: int) -> Gradients:
    rng = np.random.default_rng(examples)

    def values(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(np.float32)

    keys = np.arange(7, dtype=np.uint64)
    return Gradients(
        sparse={
            "deep": SparseGrad(keys, values(7, 5), examples),
            "wide": SparseGrad(keys[:3], values(3, 1), examples),
            "none": SparseGrad(keys[:0], values(0, 2), examples),
        },
        dense={"dense": DenseGrad(values(23), examples)},
    )


def arrays_of(gradients: Gradients) -> list[np.ndarray]:
    return [each.values for each in (*gradients.sparse.values(), *gradients.dense.values())]


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 30.0, 1e9])
@pytest.mark.parametrize("examples", [1, 32])
def test_clipped_means_are_those_of_torch(examples: int, clip_norm: float) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    gradients = random_gradients(examples)
    tensors = [torch.zeros(each.shape) for each in arrays_of(gradients)]
    for tensor, each in zip(tensors, arrays_of(gradients), strict=True):
        tensor.grad = torch.from_numpy(each / np.float32(examples))
    torch.nn.utils.clip_grad_norm_(tensors, clip_norm)

    clip(gradients, clip_norm)

    for tensor, each in zip(tensors, arrays_of(gradients), strict=True):
        np.testing.assert_allclose(each / examples, tensor.grad.numpy(), rtol=1e-5)


def test_gradient_within_the_norm_keeps_its_bytes() -> None:
    gradients, expected = random_gradients(4), random_gradients(4)

    clip(gradients, 1e9)

    for each, same in zip(arrays_of(gradients), arrays_of(expected), strict=True):
        np.testing.assert_array_equal(each, same)


def test_squares_that_no_float32_holds_are_added_up() -> None:
    gradients = Gradients(dense={"dense": DenseGrad(np.full(9, 1e30, np.float32), 1)})

    clip(gradients, 3.0)

    np.testing.assert_allclose(gradients.dense["dense"].values, 1.0, rtol=1e-6)


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo"])
def test_step_of_gradient_descent_is_no_longer_than_the_norm(mode: str) -> None:
    """With the rate 0.5 weights move by half the norm of a mean gradient that was clipped."""
    batches = DATA[0][:1]
    moved = {}
    for name, knobs in {"free": (), "clipped": (CLIPPED,)}.items():
        store = ParameterStore()
        before = after_training(store, [], *SGD, *knobs, mode=mode)
        after = after_training(ParameterStore(), batches, *SGD, *knobs, mode=mode)
        moved[name] = after - before

    assert np.linalg.norm(moved["free"]) > 2 * 0.5 * 0.05
    assert np.linalg.norm(moved["clipped"]) == pytest.approx(0.5 * 0.05, rel=1e-4)
    np.testing.assert_allclose(
        moved["clipped"] / np.linalg.norm(moved["clipped"]),
        moved["free"] / np.linalg.norm(moved["free"]),
        atol=1e-3,
    )


def test_batch_whose_examples_all_weigh_nothing_changes_nothing() -> None:
    nothing = replace(DATA[0][0], weights=np.zeros(16, np.float32))

    untrained, trained = (
        after_training(ParameterStore(), batches, *SGD, CLIPPED, mode="sync")
        for batches in ([], [nothing])
    )

    np.testing.assert_array_equal(trained, untrained)


def after_training(store: ParameterStore, batches: list, *knobs: str, mode: str) -> np.ndarray:
    """Returns all parameters, flat: dense ones, and the rows of the first batch."""
    train_worker(store, batches, job(mode, *knobs), is_in_process=mode != "geo")
    keys = {"embedding": np.unique(DATA[0][0].keys)}
    state = store.pull_state(keys, ["dense"]).result()
    return np.concatenate(
        [state.blocks["dense"].weights, state.rows["embedding"].weights.reshape(-1)]
    )
