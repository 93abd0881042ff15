"""Every optimizer on a device against the row function of the servers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import UsageError  # noqa: E402
from ctr_ps.protos.runtime.jit import kernel  # noqa: E402
from ctr_ps.protos.spec import OptimizerSpec, ScheduleSpec  # noqa: E402
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS, WEIGHT_DECAY, Tuning, initial_state  # noqa: E402
from ctr_ps.ps_server.optimizers.row_update import decay_row, update_row  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass.pass_table import UPDATES, update_of  # noqa: E402
from tests.support.optimizers import CUSTOM_PARAMS, plain_optimizer  # noqa: E402

NUM_ROWS = 30
STEPS = 100
SUMMING = {"adagrad_row", "adam_row"}


@kernel
def update_rows(hyper, decay, weights, state, grads, scale) -> None:
    for i in range(weights.shape[0]):
        decay_row(weights[i], decay)
        update_row(hyper, weights[i], state[i], grads[i], scale)


def random_gradients(rng: np.random.Generator, dim: int) -> np.ndarray:
    """Of magnitudes from a thousandth to a thousand, some of them 0."""
    magnitudes = 10.0 ** rng.uniform(-3, 3, (NUM_ROWS, dim))
    grads = rng.normal(size=(NUM_ROWS, dim)) * magnitudes
    return (grads * (rng.random((NUM_ROWS, dim)) < 0.9)).astype(np.float32)


def test_every_optimizer_of_the_servers_is_there() -> None:
    assert UPDATES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("dim", [1, 10, 33])
@pytest.mark.parametrize("params", ["default", "custom", "scheduled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_is_that_of_the_servers(name: str, params: str, dim: int) -> None:
    """To the bit, but where the elements of a row are added up."""
    spec = plain_optimizer(name)
    if params == "custom":
        spec = OptimizerSpec(name=name, params=CUSTOM_PARAMS[name])
    if params == "scheduled" and name != "sum":
        decay = {WEIGHT_DECAY: 0.25} if OPTIMIZERS[name].decays else {}
        cosine = ScheduleSpec(kind="cosine", warmup_steps=10, total_steps=90, end_factor=0.125)
        spec = OptimizerSpec(name=name, params={**spec.params, **decay}, schedule=cosine)
    rng = np.random.default_rng(dim)
    weights = rng.normal(size=(NUM_ROWS, dim)).astype(np.float32)
    state = np.tile(initial_state(spec, dim), (NUM_ROWS, 1))
    values = torch.from_numpy(np.concatenate([weights, state], axis=1))
    tuning, update = Tuning(spec), update_of(spec)

    for step in range(STEPS):
        grads, examples = random_gradients(rng, dim), int(rng.integers(1, 100))
        hyper, decay = tuning.at(step)
        update_rows(hyper, decay, weights, state, grads, np.float32(1.0 / examples))
        update(values[:, :dim], values[:, dim:], torch.from_numpy(grads), examples, step)

    expected = np.concatenate([weights, state], axis=1)
    if name in SUMMING:
        np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(values.numpy(), expected)


def test_optimizer_without_an_update_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(UPDATES, "ftrl")
    with pytest.raises(UsageError, match=r"'ftrl' does not run on a device: .* one of sgd, "):
        update_of(OptimizerSpec(name="ftrl", params={}))
