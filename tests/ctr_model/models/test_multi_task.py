"""Models of several labels against their formulas, and on planted clicks and conversions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ctr_ps.ctr_model.models.multi_task import ENTIRE_SPACE
from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.registry import TASK_MODELS, build_model, with_dropout, with_logit_offset
from ctr_ps.ctr_model.schema import Schema
from tests.reference.models import esmm, esmm_loss, mmoe, mmoe_loss
from tests.support.model_cases import (
    SCHEMA,
    Array,
    ModelCase,
    assert_gradients_agree,
    assert_predictions_agree,
)

TWO = replace(SCHEMA, label="click", other_labels=("bought",))
THREE = replace(SCHEMA, label="click", other_labels=("bought", "returned"))
SMALL: dict[str, dict[str, Any]] = {
    "esmm": {"dim": 2, "hidden": [7, 6]},
    "mmoe": {"dim": 2, "num_experts": 3, "expert": [6, 5], "tower": [4]},
}
ORACLES = {"esmm": (esmm, esmm_loss), "mmoe": (mmoe, mmoe_loss)}

every_model = pytest.mark.parametrize("name", TASK_MODELS)


class TaskCase(ModelCase):
    """A case with several labels, among them every combination."""

    def __init__(self, name: str, schema: Schema = TWO, **options: Any) -> None:
        model = build_model(name, schema, {**SMALL[name], **options})
        super().__init__(model, schema, seed=3, batch_size=8)
        self.loss = ORACLES[name][1]
        bits = np.arange(8)[:, None] >> np.arange(len(schema.labels)) & 1
        self.batch = replace(
            self.batch,
            labels=bits[:, 0].astype(np.float32),
            other_labels=bits[:, 1:].astype(np.float32),
        )

    def oracle_loss(
        self, oracle: Callable[..., Any], params: Array, rows: Mapping[str, Array]
    ) -> float:
        found: Sequence[Any] = self.oracle_probabilities(oracle, params, rows)
        assert self.batch.labels is not None
        labels = np.column_stack([self.batch.labels, self.batch.other_labels])
        weights = np.ones(self.batch.size) if self.batch.weights is None else self.batch.weights
        each = [self.loss(p, y) for p, y in zip(found, labels, strict=True)]
        return float(np.dot(weights, each))


@pytest.mark.parametrize(
    ("name", "schema", "options"),
    [
        ("esmm", TWO, {}),
        ("esmm", TWO, {"hidden": [5]}),
        ("mmoe", TWO, {}),
        ("mmoe", THREE, {}),
        ("mmoe", TWO, {"num_experts": 1, "expert": [4]}),
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_agrees_with_the_oracle(
    name: str, schema: Schema, options: dict[str, Any], is_weighted: bool
) -> None:
    case = TaskCase(name, schema, **options)
    if is_weighted:
        case.weigh()

    assert_predictions_agree(case, ORACLES[name][0])
    assert_gradients_agree(case, ORACLES[name][0])


@every_model
def test_a_step_tells_the_probability_of_a_click(name: str) -> None:
    case = TaskCase(name)
    out = case.outputs()
    workspace = case.model.workspace(8)

    result = case.model.gradient(
        case.params, case.batch, case.lookups, workspace, out.dense, out.sparse
    )
    of_click = result.probabilities.copy()

    np.testing.assert_array_equal(of_click, case.predict()[:, 0])
    assert of_click.shape == (8,)


@every_model
def test_tasks_are_named_by_the_labels(name: str) -> None:
    tasks = build_model(name, TWO, SMALL[name]).tasks

    assert [task.name for task in tasks][:2] == ["click", "bought"]
    if name == "esmm":
        assert [(task.name, task.labels, task.given) for task in tasks[1:]] == [
            ("bought", (1,), (0,)),
            ("click_and_bought", (0, 1), ()),
        ]


@pytest.mark.parametrize("logit", [0.0, 20.0, 90.0, 3000.0, -3000.0])
@pytest.mark.parametrize("other", [0.0, 90.0, 3000.0, -3000.0])
def test_no_logit_is_too_large_for_the_loss(logit: float, other: float) -> None:
    labels = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
    logits = np.tile(np.array([[logit, other]], np.float32), (4, 1))
    probabilities, grad = np.empty((4, 3), np.float32), np.empty((4, 2), np.float32)

    loss = ENTIRE_SPACE.with_gradient(logits, labels, np.ones(4, np.float32), probabilities, grad)

    assert np.isfinite(loss)
    assert np.isfinite(grad).all()
    assert np.all(np.abs(grad) <= 2.0)
    if logit == other == 90.0:  # 1 - p q = 2 exp(-90), of which each logit has half
        np.testing.assert_allclose(grad[2], [0.5, 0.5], rtol=1e-6)


@every_model
def test_no_number_is_too_large_for_a_model(name: str) -> None:
    """As of a column that nobody scaled; the gates are a softmax of it."""
    case = TaskCase(name)
    case.batch = replace(case.batch, dense=case.batch.dense * np.float32(1e6))

    assert np.isfinite(case.predict()).all()
    assert np.isfinite(case.gradient().dense).all()


@every_model
def test_other_labels_must_be_there(name: str) -> None:
    case = TaskCase(name)
    case.batch = replace(case.batch, other_labels=None)

    with pytest.raises(ModelInputError, match="learns 2 labels, but this batch has 1"):
        case.gradient()
    assert case.predict().shape == (8, len(case.model.tasks))


@every_model
def test_one_label_is_too_few(name: str) -> None:
    with pytest.raises(ValueError, match=r'labels = \["click", "conversion"\]'):
        build_model(name, SCHEMA, SMALL[name])


def test_esmm_learns_exactly_two() -> None:
    with pytest.raises(ValueError, match="the schema names 3"):
        build_model("esmm", THREE, {})


def test_a_model_of_one_label_names_those_of_several() -> None:
    with pytest.raises(
        ValueError, match=r"LogisticRegression learns one label.*click, bought.*esmm, mmoe"
    ):
        build_model("lr", TWO, {})


def test_a_model_of_one_label_refuses_examples_of_several() -> None:
    """As scripts may have: the model was built for another schema than the data."""
    case = ModelCase(build_model("lr", SCHEMA, {}), SCHEMA, seed=3, batch_size=8)
    case.batch = replace(case.batch, other_labels=np.ones((8, 1), np.float32))

    with pytest.raises(ModelInputError, match="learns 1 label, but this batch has 2"):
        case.gradient()
    assert case.predict().shape == (8,)


@every_model
def test_an_offset_of_the_logit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="negative_correction = 'weight'"):
        with_logit_offset(build_model(name, TWO, SMALL[name]), 0.5)


@every_model
def test_hidden_layers_have_dropout(name: str) -> None:
    case = TaskCase(name)
    expected = case.predict().copy()
    case.model = with_dropout(case.model, 0.5, seed=1)

    np.testing.assert_array_equal(case.predict(), expected)
    assert np.isfinite(case.gradient().dense).all()


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("esmm", "hidden", [], "hidden is "),
        ("esmm", "dim", 0, "dim is 0"),
        ("mmoe", "num_experts", 0, "num_experts is 0"),
        ("mmoe", "expert", [], "expert is "),
        ("mmoe", "tower", [0], "tower is "),
        ("mmoe", "init_range", -1.0, "init_range is -1"),
    ],
)
def test_wrong_option_is_named(name: str, option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, TWO, {option: value})


@every_model
def test_model_of_biases_alone_predicts_the_rate_of_each_task(name: str) -> None:
    case = TaskCase(name)
    rates = [0.03, 0.4, 0.03 * 0.4][: len(case.model.tasks)]

    biases = case.model.initial_biases(rates)

    values = [
        biases.get(segment.name, np.zeros(segment.shape).ravel()) for segment in case.model.segments
    ]
    case.params = np.concatenate(values).astype(np.float32)
    np.testing.assert_allclose(case.predict(), [rates] * case.batch.size, rtol=1e-5)
