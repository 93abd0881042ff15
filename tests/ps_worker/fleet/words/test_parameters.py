"""Parameters as Paddle's layers name them: distributions of first values, admission of keys."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps import SavedModel, fleet, paddle
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet.running import FLEET
from ctr_ps.ps_worker.fleet.words import program

initializer = paddle.nn.initializer
sigmoid, log_loss = paddle.nn.functional.sigmoid, paddle.nn.functional.log_loss

IN, OUT = 200, 300


@pytest.fixture(autouse=True)
def _own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_PROGRAMS", [program.StaticProgram()])


def first_values(inputs: int, size: int, **attrs: Any) -> Any:
    """Returns those of a program, which begin with the weight and bias of its first layer."""
    numbers = paddle.static.data("numbers", [None, inputs], "float32")
    paddle.static.data("user", [None, 1], "int64")
    click = paddle.static.data("click", [None, 1], "int64")
    hidden = paddle.static.nn.fc(numbers, size, **attrs)
    return (
        log_loss(sigmoid(paddle.static.nn.fc(hidden, 1)), click).model_of_program(0).initial_values
    )


# Formulas of paddle.nn.initializer's pages, for a weight [200, 300]. Normal numbers have the kurtosis 3,
# uniform ones 9/5; of a range r their deviation is r / sqrt(3).
@pytest.mark.parametrize(
    ("start", "mean", "deviation", "kurtosis"),
    [
        (initializer.XavierUniform(), 0.0, math.sqrt(6 / 500) / math.sqrt(3), 1.8),
        (initializer.XavierUniform(fan_in=1, fan_out=5), 0.0, 1 / math.sqrt(3), 1.8),
        (initializer.XavierNormal(), 0.0, math.sqrt(2 / 500), 3.0),
        (initializer.XavierNormal(gain=2), 0.0, 2 * math.sqrt(2 / 500), 3.0),
        (initializer.KaimingUniform(), 0.0, math.sqrt(6 / 200) / math.sqrt(3), 1.8),
        (initializer.KaimingNormal(), 0.0, math.sqrt(2 / 200), 3.0),
        (initializer.KaimingNormal(50, 3.0, "leaky_relu"), 0.0, math.sqrt(0.2 / 50), 3.0),
        (initializer.KaimingNormal(None, 3.0, name="k"), 0.0, math.sqrt(2 / 200), 3.0),
        (initializer.Normal(1, 2), 1.0, 2.0, 3.0),
        (initializer.Uniform(-1, 3), 1.0, 2 / math.sqrt(3), 1.8),
    ],
)
def test_weight_has_the_distribution_of_its_initializer(
    start: Any, mean: float, deviation: float, kurtosis: float
) -> None:
    attr = paddle.ParamAttr(initializer=start)

    first = first_values(IN, OUT, weight_attr=attr)[: IN * OUT].astype(float)

    assert first.mean() == pytest.approx(mean, abs=4 * deviation / math.sqrt(IN * OUT))
    assert first.std() == pytest.approx(deviation, rel=0.02)
    assert np.mean(((first - mean) / deviation) ** 4) == pytest.approx(kurtosis, rel=0.05)
    if kurtosis == 1.8:
        assert abs(first - mean).max() <= deviation * math.sqrt(3) * (1 + 1e-6)


def test_bias_counts_as_a_square_weight() -> None:
    bias = first_values(2, 5000, bias_attr=initializer.XavierUniform())[10_000:15_000]

    limit = math.sqrt(6 / 10_000)  # Paddle: fans of a vector are both its length
    assert 0.99 * limit < abs(bias).max() <= limit * (1 + 1e-6)


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (initializer.XavierUniform(), math.sqrt(6 / 110)),  # size [100, 10]
        (initializer.KaimingNormal(), math.sqrt(2 / 100) * math.sqrt(3)),
        (initializer.Normal(0, 1), math.sqrt(3)),
    ],
)
def test_rows_start_in_the_range_of_the_whole_embedding(start: Any, expected: float) -> None:
    user = paddle.static.data("user", [None, 1], "int64")
    click = paddle.static.data("click", [None, 1], "int64")
    attr = paddle.ParamAttr(initializer=start)
    rows = paddle.static.nn.sparse_embedding(user, size=[100, 10], param_attr=attr)

    (table,) = log_loss(sigmoid(paddle.static.nn.fc(rows, 1)), click).model_of_program(0).tables

    assert table.init_range == pytest.approx(expected)


def trained(path: Path, net: Any, optimizer: Any, **settings: Any) -> SavedModel:
    """Returns what one pass of a script with batches of 2 saves; `net` makes the logit of x and user."""
    fleet.init()
    x = paddle.static.data("x", [None, 2], "float32")
    user = paddle.static.data("user", [None, 1], "int64", lod_level=1)
    click = paddle.static.data("click", [None, 1], "int64")
    loss = log_loss(sigmoid(net(x, user)), click)
    strategy = fleet.DistributedStrategy()
    strategy.mode = "sync"
    trainer = fleet.distributed_optimizer(optimizer, strategy)
    executor = trainer.minimize(loss, **settings)
    try:
        fleet.init_worker()
        dataset = fleet.QueueDataset()
        dataset.init(use_var=[click, x, user], pipe_command="cat", batch_size=2)
        dataset.set_filelist([path])
        executor.train_from_dataset(dataset)
        fleet.save_persistables(executor, path.with_name("model"))
        fleet.stop_worker()
    finally:
        FLEET.abandon()
    return SavedModel.open(path.with_name("model"))


def rows_file(folder: Path, users: list[int]) -> Path:
    """Writes a row for each user: click, x = (0, 0), user."""
    path = folder / "rows"
    path.write_text("".join(f"1 {n % 2} 2 0 0 1 {user}\n" for n, user in enumerate(users)))
    return path


@pytest.mark.parametrize(
    ("life", "expected"),
    [
        ({}, [False, True, True]),
        ({"max_unseen": 3}, [False, True, True]),
        ({"tables": {"users": {"admission": {"policy": "all"}}}}, [True, True, True]),
    ],
)
def test_count_filter_entry_admits_keys_of_its_table(
    life: Any, expected: list[bool], tmp_path: Path
) -> None:
    """Users 7, 8 and 9 occur in 1, 3 and 4 batches; the entry asks for 3."""
    users = [7, 8, 8, 9, 9, 8, 9, 1, 9, 2]  # one of each in a batch, but the second

    def net(x: Any, user: Any) -> Any:
        first, second = (
            paddle.static.nn.sparse_embedding(
                user, [100, 1], param_attr=paddle.ParamAttr(name=name), entry=entry
            )
            for name, entry in (
                ("users", paddle.distributed.CountFilterEntry(3)),
                ("all", None),
            )
        )
        return first + second

    model = trained(rows_file(tmp_path, users), net, fleet.optimizer.SGD(0.1), life=life)

    assert model.find("users", [7, 8, 9])[1].tolist() == expected
    assert model.find("all", [7, 8, 9])[1].tolist() == [True, True, True]


def test_probability_entry_admits_a_share_of_the_keys(tmp_path: Path) -> None:
    def net(x: Any, user: Any) -> Any:
        entry = paddle.distributed.ProbabilityEntry(0.25)
        return paddle.static.nn.sparse_embedding(user, [100, 1], entry=entry)

    path = rows_file(tmp_path, list(range(1, 801)))
    model = trained(path, net, fleet.optimizer.SGD(0.1))

    admitted = model.find("embedding_1", range(1, 801))[1].sum()
    assert abs(admitted - 200) < 4 * math.sqrt(800 * 0.25 * 0.75)


def test_l2_decay_is_added_to_gradients(tmp_path: Path) -> None:
    """Without numbers the gradient of w is 0, and w becomes w - rate * coeff * w in each of 5 steps."""

    def net(x: Any, user: Any) -> Any:
        weight = paddle.ParamAttr(initializer=initializer.Constant(2.0))
        return paddle.static.nn.fc(x, 1, weight_attr=weight) + paddle.static.nn.sparse_embedding(
            user, [100, 1]
        )

    decay = paddle.regularizer.L2Decay(0.5)
    optimizer = paddle.optimizer.SGD(0.1, weight_decay=decay)
    model = trained(rows_file(tmp_path, [*range(10)]), net, optimizer)

    (dense,) = model.dense.values()  # two weights, and a bias
    np.testing.assert_allclose(dense[:2], [2 * 0.95**5] * 2, rtol=1e-5)


@pytest.mark.parametrize("of_program", [True, False])
def test_seed_is_that_of_first_values(
    of_program: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program.StaticProgram, "random_seed", 0)

    def rows(first: int, folder: Path, **settings: Any) -> Any:
        monkeypatch.setattr(program, "_PROGRAMS", [program.StaticProgram()])
        if of_program:
            paddle.static.default_startup_program().random_seed = first
        else:
            paddle.seed(first)
        folder.mkdir()
        start = paddle.ParamAttr(name="users", initializer=initializer.Uniform(-1, 1))
        model = trained(
            rows_file(folder, [1, 2]),
            lambda x, user: paddle.static.nn.sparse_embedding(user, [9, 1], param_attr=start),
            fleet.optimizer.SGD(0.0),
            **settings,
        )
        return model.read("users", [1, 2]).tolist()

    first, again = rows(3, tmp_path / "a"), rows(3, tmp_path / "b")
    other, given = rows(4, tmp_path / "c"), rows(4, tmp_path / "d", seed=3)

    assert first == again == given != other


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(1e-4)),
            r"regularizer of ParamAttr is 0.0001, .*: the optimizer has rates and decays",
        ),
        (lambda: paddle.ParamAttr(learning_rate=0.1), "learning_rate of ParamAttr is 0.1"),
        (lambda: paddle.distributed.CountFilterEntry(1.5), "the entry has 1.5, expected int, 0 to"),
        (lambda: paddle.distributed.ProbabilityEntry(1.5), "has 1.5, expected float, 0 to 1.0"),
        (
            lambda: paddle.optimizer.Adam(0.1, weight_decay=paddle.regularizer.L2Decay(0.5)),
            r"weight_decay of .*Adam is L2Decay.*: only SGD has that. Give .* weight_decay=0.5",
        ),
        (lambda: initializer.XavierNormal(std=1.0), "initializer xavier_normal of .*'std'.* has"),
        (
            lambda: paddle.static.nn.fc(
                paddle.static.data("x", [None, 2]),
                4,
                weight_attr=initializer.KaimingNormal(nonlinearity="gelu"),
            ),
            "nonlinearity is 'gelu', expected relu or",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(build: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


def test_clips_are_the_same_and_a_decay_of_nothing_is_none() -> None:
    assert paddle.nn.ClipGradByGlobalNorm(2.0).clip_norm == 2.0
    decay = paddle.regularizer.L2Decay()
    assert fleet.optimizer.Adam(0.1, weight_decay=decay).choice["weight_decay"] == 0.0
