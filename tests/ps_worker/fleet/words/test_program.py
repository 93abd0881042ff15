"""Static programs: what they compute, by a formula in numpy; their columns; and what they refuse."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps import Predictor, fleet, paddle
from ctr_ps.ctr_model.models.model import origin_of
from ctr_ps.ctr_model.registry import build_model, name_of
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet.running import FLEET
from ctr_ps.ps_worker.fleet.words import program
from tests.reference.models import Array, Slots, Tensors, sigmoid
from tests.support.model_cases import (
    ModelCase,
    assert_gradients_agree,
    assert_predictions_agree,
)

functional = paddle.nn.functional
initializer = paddle.nn.initializer


@pytest.fixture(autouse=True)
def _own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_PROGRAMS", [program.StaticProgram()])


def columns() -> tuple[Any, list[Any], Any]:
    """Returns three numbers, four slots and the label."""
    numbers = paddle.static.data("dense_input", [None, 3], "float32")
    slots = [paddle.static.data(f"C{i}", [None, 1], "int64", lod_level=1) for i in range(1, 5)]
    return numbers, slots, paddle.static.data("click", [None, 1], "int64")


def embedding(slot: Any, size: int, name: str | None = None, start: Any = None) -> Any:
    attr = paddle.ParamAttr(name=name, initializer=start)
    return paddle.static.nn.sparse_embedding(input=slot, size=[100, size], param_attr=attr)


def loss_of_everything() -> Any:
    """Returns the loss of a network that has every operation."""
    numbers, (first, second, third, fourth), click = columns()
    one = embedding(first, 4, "a.shared")
    two = paddle.static.nn.sequence_pool(embedding(second, 4, "a.shared"), "average")
    three, four = embedding(third, 4), embedding(fourth, 4)
    pairs = 0.5 * paddle.square(one + two + three) * 2.0 - functional.tanh(
        paddle.multiply(one, four)
    )
    interaction = paddle.sum(pairs, axis=1, keepdim=True)
    hidden = paddle.static.nn.fc(x=[one, numbers], size=5, activation="relu")
    hidden = functional.dropout(hidden, 0.0)
    gate = functional.sigmoid(paddle.static.nn.fc(numbers, size=5, bias_attr=False))
    both = paddle.concat([paddle.add(hidden, gate), functional.softmax(three), interaction], axis=1)
    predict = paddle.static.nn.fc(x=both, size=2, activation="softmax")
    return paddle.mean(functional.cross_entropy(input=predict, label=click))


def probability(dense: Array, slots: Slots, tensors: Tensors) -> float:
    """Returns what `loss_of_everything` computes for an example."""
    layers = [name.split(".")[1] for name in tensors if name.endswith("weight")]
    first, second, last = [tensors[f"layers.{each}.weight"] for each in layers]
    one, two = (slots["a.shared"][0].sum(axis=0), slots["a.shared"][1])
    two = two.mean(axis=0) if len(two) else np.zeros(4)
    three, four = slots["embedding_3"][0].sum(axis=0), slots["embedding_4"][0].sum(axis=0)
    interaction = ((one + two + three) ** 2 - np.tanh(one * four)).sum()
    hidden = np.maximum(
        first @ np.concatenate([one, dense]) + tensors[f"layers.{layers[0]}.bias"], 0
    )
    exponentials = np.exp(three - three.max())
    gate = np.array([sigmoid(value) for value in second @ dense])
    both = np.concatenate([hidden + gate, exponentials / exponentials.sum(), [interaction]])
    logits = last @ both + tensors[f"layers.{layers[2]}.bias"]
    return float(np.exp(logits[1]) / np.exp(logits).sum())


@pytest.mark.parametrize("seed", range(3))
def test_program_computes_what_its_operations_say(seed: int) -> None:
    model = loss_of_everything().model_of_program(seed)
    case = ModelCase(model, model.schema, seed)

    assert_predictions_agree(case, probability)
    assert_gradients_agree(case, probability)


def test_program_is_built_again_by_its_name_and_options() -> None:
    model = loss_of_everything().model_of_program(0)

    origin = origin_of(model)
    assert (name_of(model), origin.schema) == ("program", model.schema)

    again = build_model("program", model.schema, json.loads(json.dumps(origin.options)), seed=0)

    case = ModelCase(model, model.schema, 1)
    twin = ModelCase(again, model.schema, 1)
    np.testing.assert_array_equal(case.predict(), twin.predict())


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, 0.01),
        (initializer.Uniform(), 1.0),
        (initializer.Uniform(low=-0.25, high=0.25), 0.25),
        (initializer.Normal(std=0.1), 0.1 * 3**0.5),  # the deviation of [-r, r) is r / sqrt(3)
        # of a normal number within 2 deviations: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1))
        (initializer.TruncatedNormal(0.0, 0.2), 0.2 * 0.8796 * 3**0.5),
        (initializer.Constant(0.0), 0.0),
    ],
)
def test_initializer_of_rows_is_a_uniform_one(start: Any, expected: float) -> None:
    _, slots, click = columns()
    rows = embedding(slots[0], 4, start=start)
    logit = functional.sigmoid(paddle.static.nn.fc(rows, 1))

    (table,) = functional.log_loss(logit, click).model_of_program(0).tables

    assert table.init_range == pytest.approx(expected)


def test_initializer_of_a_layer_is_its_own() -> None:
    numbers, _, click = columns()
    attr = paddle.ParamAttr(initializer=initializer.Uniform(0.5, 0.75))
    hidden = paddle.static.nn.fc(numbers, 500, weight_attr=attr)
    logit = functional.sigmoid(paddle.static.nn.fc(hidden, 1))

    model = functional.log_loss(logit, click).model_of_program(0)

    weight = model.initial_values[: 500 * 3]
    assert 0.5 <= weight.min() < 0.51
    assert 0.74 < weight.max() < 0.75


def test_bias_has_its_initializer_and_that_of_the_logit_starts_at_the_rate() -> None:
    numbers, _, click = columns()
    attr = paddle.ParamAttr(initializer=initializer.Constant(-3.5))
    hidden = paddle.static.nn.fc(numbers, 2, bias_attr=attr)

    own = functional.cross_entropy(paddle.static.nn.fc(hidden, 2, bias_attr=attr), click)
    plain = functional.log_loss(functional.sigmoid(paddle.static.nn.fc(hidden, 1)), click)

    assert own.model_of_program(0).initial_values[-2:].tolist() == [-3.5, -3.5]
    (start,) = plain.model_of_program(0).initial_biases([0.2]).values()
    assert start == (math.log(0.2 / 0.8),)


def test_losses_of_one_logit_are_the_same() -> None:
    numbers, slots, click = columns()
    rows = embedding(slots[0], 1)
    two = paddle.static.nn.fc(
        numbers, 2, activation="softmax", weight_attr=initializer.Constant(1.0)
    )

    losses = [
        functional.log_loss(functional.sigmoid(rows), click),
        functional.binary_cross_entropy_with_logits(rows, click),
    ]
    losses.append(functional.binary_cross_entropy_with_logits(rows, click, reduction="none"))
    classes = [
        functional.cross_entropy(input=two, label=click, use_softmax=use) for use in (True, False)
    ]

    assert losses[0] == losses[1] == paddle.mean(losses[2])
    assert [each.logit.inputs[0].op for each in classes] == ["fc", "fc"]


def test_label_may_be_a_number() -> None:
    x = paddle.static.data("x", [None, 1], "float32")
    user = paddle.static.data("user", [None, 1], "int64")
    click = paddle.static.data("click", [None, 1], "float32")
    loss = functional.log_loss(functional.sigmoid(x + embedding(user, 1)), click)

    schema = loss.model_of_program(0).schema

    assert ([each.name for each in schema.dense], schema.slots) == (["x"], ("user",))
    assert schema.label == "click"


def test_constants_of_rows_other_than_zero_are_refused() -> None:
    _, slots, _ = columns()
    with pytest.raises(UsageError, match=r"initializer of rows is \('constant', 0\.5\), expected"):
        embedding(slots[0], 4, start=initializer.Constant(0.5))
    with pytest.raises(UsageError, match=r"initializer of rows is \('uniform', 0\.0, 1\.0\)"):
        embedding(slots[0], 4, start=initializer.Uniform(0.0))
    with pytest.raises(UsageError, match=r"initializer normal of .*'deviation'.* it has"):
        initializer.Normal(deviation=1.0)


def test_columns_are_those_of_the_variables_in_any_order(tmp_path: Path) -> None:
    numbers, slots, click = columns()
    model = loss_of(numbers, slots[:2], click).model_of_program(0)
    assert model.schema.slots == ("C1", "C2", "C3", "C4")  # those that the network leaves out, too
    assert [each.name for each in model.schema.dense] == [f"dense_input_{i}" for i in range(3)]
    made = fleet.QueueDataset()
    made.init(use_var=[click, slots[2], numbers, *slots[:2], slots[3]], pipe_command="cat")
    path = tmp_path / "rows"
    path.write_text("1 1 1 33 3 0.1 0.2 0.3 1 11 1 22 1 44\n")
    (batch,) = (made.set_filelist([path]), *made)[1:]

    assert made.schema == model.schema
    assert batch.keys.tolist() == [11, 22, 33, 44]
    np.testing.assert_allclose(batch.dense, [[0.1, 0.2, 0.3]])


def loss_of(numbers: Any, slots: list[Any], click: Any, *, logit: bool = False) -> Any:
    rows = [embedding(each, 2, start=initializer.Uniform(-0.5, 0.5)) for each in slots]
    x = paddle.concat([numbers, *rows])
    if logit:
        predict = functional.sigmoid(paddle.static.nn.fc(x, 1))
        return paddle.mean(functional.log_loss(input=predict, label=paddle.cast(click, "float32")))
    weight = paddle.ParamAttr(initializer=initializer.Constant(0.0))
    predict = paddle.static.nn.fc(x, 2, activation="softmax", weight_attr=weight)
    return paddle.mean(functional.cross_entropy(input=predict, label=click))


@pytest.mark.parametrize("logit", [True, False])
def test_script_trains_saves_and_predicts(
    logit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The click is whether C2 is 7; the label comes first in the files."""
    monkeypatch.delenv("TRAINING_ROLE", raising=False)
    path = tmp_path / "rows"
    lines = [f"1 {int(i % 2)} 3 0.5 0.5 0.5 1 {i} 2 {7 if i % 2 else 8} 9 0 0" for i in range(400)]
    path.write_text("".join(f"{line}\n" for line in lines))
    fleet.init()
    numbers, slots, click = columns()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.2))
    optimizer.minimize(loss_of(numbers, slots[:2], click, logit=logit))
    try:
        fleet.init_worker()
        executor = paddle.static.Executor(paddle.CPUPlace())
        assert executor.run(paddle.static.default_startup_program()) == []
        dataset = fleet.DatasetFactory().create_dataset()
        dataset.init(use_var=[click, numbers, *slots], pipe_command="cat", batch_size=20)
        dataset.set_filelist([path])
        for _ in range(3):
            executor.train_from_dataset(paddle.static.default_main_program(), dataset)
        assert executor.infer_from_dataset(dataset).auc() == 1.0
        fleet.save_persistables(executor, tmp_path / "model")
        fleet.stop_worker()
    finally:
        FLEET.abandon()

    predictor = Predictor.load(tmp_path / "model")
    sample = [(None, [0.5] * 3, [[1], [key, 9], [], []]) for key in (7, 8)]
    clicked, not_clicked = predictor.predict_samples(sample)
    assert clicked > 0.8 > 0.2 > not_clicked


def test_variables_have_shapes_and_metrics_are_variables() -> None:
    numbers, slots, click = columns()
    predict = paddle.static.nn.fc(paddle.concat([numbers, embedding(slots[0], 4)]), 2)
    area, batch_area, states = paddle.static.auc(input=predict, label=click, num_thresholds=4095)

    shapes = [each.shape for each in (numbers, slots[0], predict, area, batch_area)]
    assert shapes == [(-1, 3), (-1, 1), (-1, 2), (-1, 1), (-1, 1)]
    assert (len(states), paddle.static.accuracy(predict, click).shape) == (4, (-1, 1))


def test_programs_have_their_own_columns(tmp_path: Path) -> None:
    """Of a script that makes its network in a program to train and once more in one to test."""
    main, test, startup = (paddle.static.Program() for _ in range(3))
    startup.random_seed = 5

    def built(of: Any) -> tuple[Any, list[Any], Any]:
        with paddle.static.program_guard(of, startup):
            numbers, slots, click = columns()
            loss = loss_of(numbers, slots[:2], click)
            assert paddle.static.default_main_program() is of is of.clone(for_test=True)
            assert paddle.static.default_startup_program() is startup
        return loss, [click, numbers, *slots], of

    first, second = built(main), built(test)

    schemas = []
    for _, columns_of_one, _ in (first, second):
        dataset = fleet.QueueDataset()
        dataset.init(use_var=columns_of_one, pipe_command="cat")
        schemas.append(dataset.schema)
    models = [loss.model_of_program(loss.label.program.seed) for loss, _, _ in (first, second)]
    assert schemas == [each.schema for each in models]
    assert schemas[0] == schemas[1]
    assert models[0].tables == models[1].tables
    assert main.seed == 5
    assert paddle.static.default_main_program().columns == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda n, s, c: embedding(n, 4), "input of sparse_embedding is .*dense_input.*int64"),
        (
            lambda n, s, c: paddle.static.data("x", [None, 1], "float64"),
            "dtype of 'x' is 'float64'",
        ),
        (lambda n, s, c: paddle.static.data("x", [None, None]), "shape of 'x' is"),
        (
            lambda n, s, c: paddle.static.nn.sparse_embedding(s[0], [9, 4], entry="count"),
            "entry of sparse_embedding is 'count'.*CountFilterEntry.*life=",
        ),
        (
            lambda n, s, c: paddle.static.nn.sparse_embedding(s[0], [9, 4], padding_idx=0),
            "padding_idx of sparse_embedding is 0",
        ),
        (
            lambda n, s, c: [loss_of(n, s, c), loss_of(n, s, paddle.static.data("buy", [None, 1]))],
            "the label is 'buy', expected one column for all losses",
        ),
        (
            lambda n, s, c: loss_of(n, s, functional.sigmoid(n)),
            "the label is 'sigmoid', expected one column",
        ),
        (
            lambda n, s, c: loss_of(paddle.static.accuracy(n, c), [], c).model_of_program(0),
            "the metric '' are no part of the network",
        ),
        (lambda n, s, c: paddle.concat([n, n], axis=0), "axis of concat is 0, expected 1"),
        (lambda n, s, c: paddle.sum(n, axis=0), "axis of sum is 0, expected 1"),
        (lambda n, s, c: functional.cross_entropy(n, c), "cross_entropy of 3 classes, expected 2"),
        (
            lambda n, s, c: functional.log_loss(paddle.static.nn.fc(n, 1), c),
            "input is the result of fc, 1 wide, expected that of a sigmoid",
        ),
        (
            lambda n, s, c: functional.cross_entropy(paddle.static.nn.fc(n, 2), c, soft_label=True),
            "soft_label of cross_entropy is True, but is not supported",
        ),
        (
            lambda n, s, c: functional.log_loss(paddle.static.nn.fc(n, 1), c, weight=[1.0]),
            r"weight of binary_cross_entropy is \[1.0\]",
        ),
        (
            lambda n, s, c: functional.cross_entropy(
                paddle.static.nn.fc(n, 2), c, use_softmax=False
            ),
            "use_softmax of cross_entropy is False",
        ),
        (
            lambda n, s, c: functional.cross_entropy(paddle.static.nn.fc(n, 2), c, reduction="sum"),
            "reduction of cross_entropy is 'sum'",
        ),
        (lambda n, s, c: functional.dropout(n, p=2), "p of dropout is 2"),
        (lambda n, s, c: paddle.static.nn.fc(n, 2, weight_attr=[]), "expected one ParamAttr each"),
        (
            lambda n, s, c: functional.binary_cross_entropy_with_logits(n, c),
            "the logit is 3 wide, expected 1",
        ),
        (lambda n, s, c: functional.softmax(n, axis=0), "softmax of .* axis 0: expected"),
        (lambda n, s, c: n + 0.5, "add of .*0.5.*: expected variables"),
        (
            lambda n, s, c: embedding(s[0], 2) + embedding(s[1], 4),
            r"add of widths \[2, 4\], expected equal ones, or 1",
        ),
        (
            lambda n, s, c: paddle.static.nn.fc(n, 2, activation="gelu"),
            "activation of fc is 'gelu'",
        ),
        (
            lambda n, s, c: paddle.static.nn.fc(n, 2, num_flatten_dims=2),
            "num_flatten_dims of fc is 2",
        ),
        (
            lambda n, s, c: [embedding(s[0], 4, "t"), embedding(s[1], 8, "t")],
            r"table 't' has width, range and entry \(8, 0.01, None\), and \(4, 0.01, None\) elsewhere",
        ),
        (
            lambda n, s, c: [
                paddle.static.nn.fc(n, 2, weight_attr=paddle.ParamAttr(name="w")) for _ in "ab"
            ],
            "two layers have the parameter 'w'",
        ),
        (
            lambda n, s, c: paddle.static.Executor().run(fetch_list=[n]),
            "executor.run.. makes no steps",
        ),
        (
            lambda n, s, c: [
                loss_of(n, s[:1], c).model_of_program(0),
                fleet.QueueDataset().init(use_var=[n, *s[::-1], c]),
            ],
            "has the slots C4, C3, C2, C1, expected them as declared",
        ),
        (lambda n, s, c: paddle.mean(n), "mean of Variable.*, expected a loss"),
        (lambda n, s, c: paddle.static.Executor().run(feed={}), r"train_from_dataset\(dataset\)"),
        (
            lambda n, s, c: fleet.QueueDataset().init(use_var=[n, *s, c]),
            "is known from the loss: make it before",
        ),
        (
            lambda n, s, c: fleet.QueueDataset().init(use_var=[n, *s]),
            "use_var of .* has dense_input, C1, .* each variable of static.data once: .*click",
        ),
        (
            lambda n, s, c: loss_of(s[0], [], c).model_of_program(0),
            "the keys 'C1' are used without a sparse_embedding",
        ),
        (
            lambda n, s, c: loss_of(paddle.static.data("y", [None, 1]), s, c).model_of_program(0),
            "several columns of numbers, dense_input, y",
        ),
    ],
)
def test_what_cannot_be_is_refused(build: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(*columns())


def test_unknown_name_shows_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"no 'matmul': there are CPUPlace, .*static"):
        _ = paddle.matmul
    with pytest.raises(AttributeError, match="no 'conv2d': there are embedding, fc"):
        _ = paddle.static.nn.conv2d
