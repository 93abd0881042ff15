"""Every optimizer against its formula in float64, and on the way to the minimum of a convex function."""

import numpy as np
import pytest

from ctr_ps.protos.gradients import DenseGrad, SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.reference.optimizers import UPDATES, Memory, Vector, state_of
from tests.reference.table import ReferenceTable
from tests.support.optimizers import CUSTOM_PARAMS, plain_optimizer

ELEMENTWISE = [name for name, optimizer in OPTIMIZERS.items() if optimizer.is_elementwise]
UNIFORM = InitializerSpec(kind="uniform", scale=0.5)
STEPS = 40

both_params = pytest.mark.parametrize("params", ["default", "custom"])


def optimizer_spec(name: str, params: str) -> OptimizerSpec:
    if params == "custom":
        return OptimizerSpec(name=name, params=CUSTOM_PARAMS[name])
    return plain_optimizer(name)


def random_gradient(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Of magnitudes from a thousandth to a thousand, some of them 0."""
    magnitudes = 10.0 ** rng.uniform(-3, 3, shape)
    return (rng.normal(size=shape) * magnitudes * (rng.random(shape) < 0.9)).astype(np.float32)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


def test_every_optimizer_has_an_oracle() -> None:
    assert OPTIMIZERS.keys() == UPDATES.keys() == CUSTOM_PARAMS.keys()
    for name, optimizer in OPTIMIZERS.items():
        assert optimizer.ranges.keys() == CUSTOM_PARAMS[name].keys()


@pytest.mark.parametrize("dim", [1, 2, 5, 16])
@both_params
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_follow_the_formula(name: str, params: str, dim: int) -> None:
    """Rows are touched at random, so each has had a number of updates of its own."""
    spec = TableSpec(name="t", dim=dim, initializer=UNIFORM, optimizer=optimizer_spec(name, params))
    table, reference = SparseTable(spec), ReferenceTable(spec)
    rng = np.random.default_rng(dim)
    for _ in range(STEPS):
        keys = np.flatnonzero(rng.random(9) < 0.4).astype(np.uint64)
        examples = int(rng.integers(1, 100))
        values = random_gradient(rng, keys.size, dim) * np.float32(examples)

        table.push(SparseGrad(keys, values, examples))
        reference.push(keys.tolist(), values.astype(np.float64), examples)

    rows = rows_by_key(table)
    assert sorted(rows) == sorted(reference.weights)
    for key, (weights, state) in rows.items():
        close(weights, reference.weights[key])
        close(state, state_of(name, reference.memories[key]))


def rows_by_key(table: SparseTable) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    exported = [table.export_shard(shard) for shard in table.shards]
    return {
        int(key): (weights, state)
        for rows in exported
        for key, weights, state in zip(rows.keys, rows.weights, rows.state, strict=True)
    }


@both_params
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_dense_blocks_follow_the_formula(name: str, params: str) -> None:
    block = DenseTable(dense_spec(name, params, length=37))
    weights = pulled(block).astype(np.float64)
    memory: Memory = {}
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        examples = int(rng.integers(1, 100))
        values = random_gradient(rng, 37) * np.float32(examples)

        block.push(DenseGrad(values, examples))
        weights = oracle_step(name, params, weights, memory, values / examples)

    piece = block.export()
    close(piece.weights, weights)
    close(np.concatenate([piece.element_state.reshape(-1), piece.scalars]), state_of(name, memory))


def oracle_step(name: str, params: str, w: Vector, memory: Memory, g: np.ndarray) -> Vector:
    return UPDATES[name](w, memory, g.astype(np.float64), **optimizer_spec(name, params).params)


def dense_spec(name: str, params: str, length: int) -> DenseSpec:
    segments = (
        DenseSegment(length=length // 2, initializer=UNIFORM),
        DenseSegment(length=length - length // 2, initializer=InitializerSpec()),
    )
    return DenseSpec(name="d", segments=segments, optimizer=optimizer_spec(name, params))


def pulled(block: DenseTable) -> np.ndarray:
    out = np.empty(block.length, np.float32)
    block.pull(out)
    return out


@pytest.mark.parametrize("num_servers", [2, 3, 41])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_snapshot_over_servers_does_not_show(name: str, num_servers: int) -> None:
    """To the byte, in weights and in state; with more servers than elements, too."""
    spec = dense_spec(name, "default", length=37)
    whole = DenseTable(spec)
    pieces = [
        DenseTable(spec, server_index=server, shard_map=ShardMap.of(num_servers))
        for server in range(num_servers)
    ]
    rng = np.random.default_rng(3)
    for _ in range(10):
        values = random_gradient(rng, 37)

        whole.push(DenseGrad(values, 7))
        for block in pieces:
            block.push(DenseGrad(values[block.piece], 7))

    exports = [block.export() for block in pieces]
    expected = whole.export()
    assert (
        np.concatenate([part.weights for part in exports]).tobytes() == expected.weights.tobytes()
    )
    states = np.concatenate([part.element_state for part in exports], axis=1)
    assert states.tobytes() == expected.element_state.tobytes()
    assert {part.scalars.tobytes() for part in exports} == {expected.scalars.tobytes()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradient_moves_no_new_row(name: str) -> None:
    spec = TableSpec(
        name="t", dim=3, initializer=UNIFORM, optimizer=optimizer_spec(name, "default")
    )
    table, keys = SparseTable(spec), np.array([4], np.uint64)

    table.push(SparseGrad(keys, np.zeros((1, 3), np.float32), 1))

    weights, _ = rows_by_key(table)[4]
    np.testing.assert_allclose(weights, ReferenceTable(spec).initial(4), rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_smallest_gradients_move_weights_less_than_the_learning_rate(name: str) -> None:
    """Their squares are 0 in float32: what is left to divide by must not be smaller still."""
    optimizer = OPTIMIZERS[name]
    wanted = {"epsilon": optimizer.ranges.get("epsilon", (0.0,))[0], "learning_rate": 0.5}
    params = {name: value for name, value in wanted.items() if name in optimizer.ranges}
    spec = TableSpec(
        name="t",
        dim=4,
        initializer=InitializerSpec(),
        optimizer=OptimizerSpec(name=name, params=params),
    )
    table = SparseTable(spec)
    gradient = np.array([[1e-45, 1e-30, 2.6e-23, 8e-22]], np.float32)

    table.push(SparseGrad(np.array([1], np.uint64), gradient, 1))

    weights, _ = rows_by_key(table)[1]
    assert np.abs(weights).max() <= 0.5 * 1.01


def test_nesterov_momentum_takes_its_gradients_a_velocity_ahead() -> None:
    """As Sutskever et al. write it, on f(x) = x^2 / 2: v' = mu v - rate f'(x + mu v), x' = x + v'."""
    rate, mu = 0.125, 0.75
    spec = OptimizerSpec(
        name="momentum", params={"learning_rate": rate, "momentum": mu, "nesterov": 1}
    )
    segments = (DenseSegment(length=1, initializer=InitializerSpec(kind="normal", scale=1.0)),)
    block = DenseTable(DenseSpec(name="d", segments=segments, optimizer=spec))
    x, v = float(pulled(block)[0]), 0.0

    for _ in range(20):
        block.push(DenseGrad(pulled(block), 1))
        v = mu * v - rate * (x + mu * v)
        x += v
        assert pulled(block)[0] == pytest.approx(x + mu * v, rel=1e-4, abs=1e-6)


def test_ftrl_without_penalties_is_gradient_descent_from_the_initial_weights() -> None:
    """With the rate learning_rate / (beta + sqrt(n)): as McMahan shows, AISTATS 2011."""
    rate, beta = 0.5, 0.25
    optimizer = OptimizerSpec(name="ftrl", params={"learning_rate": rate, "beta": beta})
    table = SparseTable(TableSpec(name="t", dim=5, initializer=UNIFORM, optimizer=optimizer))
    keys = np.array([4], np.uint64)
    rng = np.random.default_rng(0)
    weights = table.pull(keys, Missing.INITIAL).astype(np.float64)
    squares = np.zeros((1, 5))

    for _ in range(STEPS):
        gradient = random_gradient(rng, 1, 5)
        table.push(SparseGrad(keys, gradient, 1))
        squares += gradient.astype(np.float64) ** 2
        weights -= rate / (beta + np.sqrt(squares)) * gradient

    close(table.pull(keys, Missing.ZEROS), weights)


@pytest.mark.parametrize("initializer", [InitializerSpec(), InitializerSpec(scale=0.04)])
def test_ftrl_makes_zeros_of_weights_with_little_evidence(initializer: InitializerSpec) -> None:
    """Also of those that did not start at zero."""
    spec = TableSpec(
        name="t",
        dim=2,
        initializer=initializer,
        optimizer=OptimizerSpec(name="ftrl", params={"l1": 1.0}),
    )
    table, keys = SparseTable(spec), np.array([4], np.uint64)

    for _ in range(20):
        table.push(SparseGrad(keys, np.array([[0.01, 3.0]], np.float32), 1))

    weights, _ = rows_by_key(table)[4]
    assert weights[0] == 0.0
    assert weights[1] < 0.0


def test_ftrl_resumes_with_another_rate_from_the_same_weights() -> None:
    keys = np.array([4], np.uint64)
    zeros = SparseGrad(keys, np.zeros((1, 2), np.float32), 1)

    def spec(rate: float) -> TableSpec:
        optimizer = OptimizerSpec(name="ftrl", params={"learning_rate": rate})
        return TableSpec(name="t", dim=2, initializer=UNIFORM, optimizer=optimizer)

    table = SparseTable(spec(0.1))
    for _ in range(5):
        table.push(SparseGrad(keys, np.array([[1.0, -2.0]], np.float32), 1))
    before, _ = rows_by_key(table)[4]

    table.declare(spec(0.01))
    table.push(zeros)

    np.testing.assert_allclose(rows_by_key(table)[4][0], before, rtol=1e-5)


# Learning rates, of the parabola and of the clicks.
RATES = {
    "sgd": (0.5, 10.0),
    "momentum": (0.05, 1.0),
    "adagrad": (0.5, 0.2),
    "adagrad_row": (0.5, 10.0),
    "adam": (0.05, 0.05),
    "adam_row": (0.05, 0.05),
    "ftrl": (5.0, 1.0),
    "sum": (0.5, 10.0),
}
WIDE = InitializerSpec(kind="uniform", scale=1.0)


def spec_of(name: str, learning_rate: float) -> OptimizerSpec:
    has_rate = "learning_rate" in OPTIMIZERS[name].ranges
    return OptimizerSpec(name=name, params={"learning_rate": learning_rate} if has_rate else {})


def pushed(name: str, gradient: np.ndarray, learning_rate: float) -> np.ndarray:
    """Returns what is pushed: with `sum` the pusher makes the step."""
    return -np.float32(learning_rate) * gradient if name == "sum" else gradient


def test_every_optimizer_takes_part() -> None:
    assert OPTIMIZERS.keys() == RATES.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_reach_the_bottom_of_a_parabola(name: str) -> None:
    rate = RATES[name][0]
    table = SparseTable(TableSpec(name="t", dim=4, initializer=WIDE, optimizer=spec_of(name, rate)))
    keys = np.arange(20, dtype=np.uint64)
    target = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)

    for _ in range(400):
        gradient = table.pull(keys, Missing.INITIAL) - target
        table.push(SparseGrad(keys, pushed(name, gradient, rate), 1))

    assert np.abs(table.pull(keys, Missing.ZEROS) - target).max() < 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logistic_regression_on_sparse_rows_beats_the_weights_that_made_the_clicks(
    name: str,
) -> None:
    """The planted weights are not the minimum of a finite sample: the minimum is below them."""
    rng = np.random.default_rng(1)
    planted = rng.normal(size=40)
    features = np.array([rng.choice(40, 5, replace=False) for _ in range(400)])  # [B, S]
    clicks = rng.random(400) < 1 / (1 + np.exp(-planted[features].sum(axis=1)))
    keys = np.arange(40, dtype=np.uint64)
    rate = RATES[name][1]
    spec = TableSpec(name="t", dim=1, initializer=InitializerSpec(), optimizer=spec_of(name, rate))
    table = SparseTable(spec)

    for step in range(200):
        batch = slice(200 * (step % 2), 200 * (step % 2) + 200)
        weights = table.pull(keys, Missing.INITIAL)[:, 0]
        errors = probabilities(weights, features[batch]) - clicks[batch]
        gradient = np.zeros(40)
        np.add.at(gradient, features[batch], errors[:, None])
        values = pushed(name, gradient.astype(np.float32)[:, None], rate)
        table.push(SparseGrad(keys, values, 200))

    learned = log_loss(table.pull(keys, Missing.ZEROS)[:, 0], features, clicks)
    assert learned < log_loss(planted, features, clicks)


def probabilities(weights: np.ndarray, features: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-weights[features].sum(axis=1)))


def log_loss(weights: np.ndarray, features: np.ndarray, clicks: np.ndarray) -> float:
    likelihood = np.where(
        clicks, probabilities(weights, features), 1 - probabilities(weights, features)
    )
    return float(-np.log(likelihood).mean())


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("adam", {"beta1": 0.9, "beta2": 0.9}),
        ("adam_row", {"beta1": 0.9, "beta2": 0.9}),
        ("momentum", {"learning_rate": 0.1, "momentum": 0.9}),
        ("sgd", {"learning_rate": 1.0, "weight_decay": 0.1}),
    ],
)
def test_what_decays_ends_at_zero_not_among_subnormal_numbers(name: str, params: dict) -> None:
    """With these, and a processor of Intel, an update takes ten times as long.

    Rates of .9: the smallest number times .5 is zero without any help, times .9 it is itself.
    """
    optimizer = OptimizerSpec(name=name, params=params)
    table = SparseTable(TableSpec(name="t", dim=4, initializer=UNIFORM, optimizer=optimizer))
    keys = np.arange(3, dtype=np.uint64)
    table.push(SparseGrad(keys, np.ones((3, 4), np.float32), 1))
    for _ in range(1000):
        table.push(SparseGrad(keys, np.zeros((3, 4), np.float32), 1))

    weights, state = table.pull_states(keys)
    found = np.abs(np.concatenate([weights.ravel(), state.ravel()]))
    assert not found[(found > 0) & (found < np.finfo(np.float32).tiny)].size
    decayed = weights if name == "sgd" else state
    assert not decayed.any()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("adam", {"beta1": 0.5}),
        ("adam_row", {"beta1": 0.5}),
        ("momentum", {"learning_rate": 0.1, "momentum": 0.5}),
    ],
)
def test_a_first_moment_is_zero_before_a_learning_rate_makes_it_subnormal(
    name: str, params: dict
) -> None:
    optimizer = OptimizerSpec(name=name, params=params)
    table = SparseTable(TableSpec(name="t", dim=4, initializer=UNIFORM, optimizer=optimizer))
    keys = np.arange(3, dtype=np.uint64)
    table.push(SparseGrad(keys, np.ones((3, 4), np.float32), 1))

    moments = []
    for _ in range(110):
        table.push(SparseGrad(keys, np.zeros((3, 4), np.float32), 1))
        moments.append(table.pull_states(keys)[1][:, :4])

    assert (moments[90] > 1e-30).all()
    assert not moments[-1].any()
