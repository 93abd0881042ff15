"""Models of several labels against their formulas, and checkpoints of those that were in numpy before."""

import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps import Predictor, Trainer  # noqa: E402
from ctr_ps.ctr_model.parameters import FlatLayout, ModelInputError  # noqa: E402
from ctr_ps.ctr_model.registry import TASK_MODELS, build_model, name_of, with_logit_offset  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch  # noqa: E402
from ctr_ps.ctr_model.torch.export import ProgramInputs, export  # noqa: E402
from tests.ctr_model.torch.test_export import run_onnx  # noqa: E402
from tests.ctr_model.torch.test_zoo import keys_of  # noqa: E402
from tests.reference.models import esmm, esmm_loss, mmoe, mmoe_loss  # noqa: E402
from tests.reference.task_models import (  # noqa: E402
    log_losses,
    pepnet,
    ple,
    two_towers,
    two_towers_loss,
)
from tests.support.model_cases import (  # noqa: E402
    SCHEMA,
    Array,
    ModelCase,
    assert_predictions_agree,
    assert_slopes_agree,
)

TWO = replace(SCHEMA, label="click", other_labels=("bought",))
THREE = replace(SCHEMA, label="click", other_labels=("bought", "returned"))
SMALL: dict[str, dict[str, Any]] = {
    "esmm": {"dim": 2, "hidden": [7, 6]},
    "mmoe": {"dim": 2, "num_experts": 3, "expert": [6, 5], "tower": [4]},
    "ple": {"dim": 2, "num_experts": 2, "num_shared": 1, "expert": [2], "tower": [2]},
    "pepnet": {
        "dim": 2,
        "hidden": [3, 2],
        "gate_hidden": 2,
        "domain": ["C2"],
        "prior": ["C4", "C1"],
    },
}
ORACLES = {
    "esmm": (esmm, esmm_loss),
    "mmoe": (mmoe, mmoe_loss),
    "ple": (ple, log_losses),
    "pepnet": (partial(pepnet, domain=1, prior=(3, 0)), log_losses),
}

every_model = pytest.mark.parametrize("name", TASK_MODELS)


class TaskCase(ModelCase):
    """A case with several labels, among them every combination."""

    def __init__(self, name: str, schema: Schema = TWO, **options: Any) -> None:
        model = build_model(name, schema, {**SMALL[name], **options})
        super().__init__(model, schema, seed=3, batch_size=8)
        self.oracle, self.loss = ORACLES[name]
        if name == "pepnet":
            self.oracle = partial(self.oracle, frozen={})
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
        ("ple", TWO, {}),
        ("ple", THREE, {"num_levels": 3, "expert": [3, 2]}),
        ("ple", TWO, {"num_levels": 1}),
        ("pepnet", TWO, {}),
        ("pepnet", THREE, {"hidden": [4]}),
    ],
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_agrees_with_the_oracle(
    name: str, schema: Schema, options: dict[str, Any], is_weighted: bool
) -> None:
    case = TaskCase(name, schema, **options)
    if is_weighted:
        case.weigh()

    assert_predictions_agree(case, case.oracle)
    assert_slopes_agree(case, case.oracle)


@pytest.mark.parametrize("name", ["esmm", "mmoe", "ple", "two_towers"])
def test_gradients_agree_in_float64(name: str) -> None:
    """Not those of `pepnet`, which stops some: the slopes above have them."""
    case = TowersCase() if name == "two_towers" else TaskCase(name)
    workspace, (table,) = case.model.workspace(1), case.model.tables
    workspace.take(torch.from_numpy(case.params))
    module = workspace.module.double()
    names = [name for name, _ in module.named_parameters()]
    labels = torch.from_numpy(case.batch.all_labels).double()

    def losses(rows: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        batch = Batch(
            dense=torch.from_numpy(case.batch.dense).double(),
            labels=labels,
            rows={table.name: keys_of(case.lookups[table.name], rows)},
        )
        named = dict(zip(names, values, strict=True))
        output = torch.func.functional_call(module, named, (batch,))
        if not hasattr(module, "loss"):
            return output
        is_towers = name == "two_towers"  # whose second loss stops gradients
        return torch.cat([*output.values()]) if is_towers else module.loss(batch, output)

    values = [torch.from_numpy(case.lookups[table.name].rows), *module.parameters()]
    inputs = [each.detach().double().requires_grad_() for each in values]
    assert torch.autograd.gradcheck(losses, inputs, fast_mode=True)


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
    labels = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    logits = torch.tensor([[logit, other]]).repeat(4, 1).requires_grad_()
    batch = Batch(dense=torch.empty(4, 0), labels=labels, rows={})
    module = build_model("esmm", TWO, SMALL["esmm"]).workspace(1).module

    loss = module.loss(batch, logits).sum()
    loss.backward()

    assert torch.isfinite(loss)
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().max() <= 2.0
    if logit == other == 90.0:  # 1 - p q = 2 exp(-90), of which each logit has half
        np.testing.assert_allclose(logits.grad[2], [0.5, 0.5], rtol=1e-6)


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
        ValueError,
        match=f"LogisticRegression learns one label.*click, bought.*{', '.join(TASK_MODELS)}",
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


@pytest.mark.parametrize("name", ["esmm", "mmoe", "ple"])
def test_hidden_layers_have_dropout(name: str) -> None:
    case, dropping = TaskCase(name), TaskCase(name, dropout=0.5)

    np.testing.assert_array_equal(case.predict(), dropping.predict())
    assert case.gradient().loss != dropping.gradient().loss
    assert np.isfinite(dropping.gradient().dense).all()


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("esmm", "hidden", [], "hidden is "),
        ("esmm", "dim", 0, "dim is 0"),
        ("mmoe", "num_experts", 0, "num_experts is 0"),
        ("mmoe", "expert", [], "expert is "),
        ("mmoe", "tower", [0], "tower is "),
        ("mmoe", "init_range", -1.0, "init_range is -1"),
        ("ple", "num_levels", 0, "num_levels is 0"),
        ("pepnet", "prior", ["C9"], "no slot 'C9'"),
        ("pepnet", "gate_hidden", 0, "gate_hidden is 0"),
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


SAVED = Path(__file__).with_name("saved_by_numpy.tar.xz")
"""An `esmm` and an `mmoe`, trained and saved when they were in numpy, and their predictions for `SAMPLES`."""

SAMPLES = [
    (None, [0.5 * i], [f"v{i % 5}", ["v1", "w0"], f"v{(i + 1) % 5}"])  # a number, three slots
    for i in range(5)
]


@pytest.mark.parametrize("name", ["esmm", "mmoe"])
def test_checkpoint_of_the_model_in_numpy_predicts_and_trains_on(name: str, tmp_path: Path) -> None:
    with tarfile.open(SAVED) as saved:
        saved.extractall(tmp_path, filter="data")
    expected = np.load(tmp_path / f"{name}.npy")

    predictor = Predictor.load(tmp_path / name)
    found = predictor.predict_samples(SAMPLES)
    job = json.loads(next((tmp_path / name).glob("data-*/attachments/job.json")).read_text())
    options = {key: value for key, value in job["model"].items() if key != "name"}
    trainer = Trainer(
        name,
        options,
        schema=predictor.schema,
        optimizer={"sparse": {"name": "adagrad"}, "dense": {"name": "adam"}},
    )
    trainer.load(tmp_path / name)

    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(SAMPLES), expected, rtol=1e-5)
    rows = pa.table(
        {"click": [1, 0], "bought": [1, 0], "I1": [0.5, 1.0]}
        | {slot: ["v1", "v2"] for slot in ("C1", "C2", "C3")}
    )
    assert trainer.train(rows, epochs=20).examples == 40
    assert (trainer.predict(SAMPLES) != expected).any()


TOWERS = {"item": ["C2"], "dim": 2, "hidden": [5], "vector": 3, "log_share": "I2"}


def with_share(**settings: Any) -> Schema:
    first, share, last = SCHEMA.dense
    return replace(SCHEMA, dense=(first, replace(share, **settings), last))


class TowersCase(ModelCase):
    def __init__(self, seed: int = 3) -> None:
        schema = with_share(missing=-12.0)
        model = build_model("two_towers", schema, TOWERS, seed=seed)
        super().__init__(model, schema, seed, batch_size=6)
        self.oracle = partial(two_towers, item=1, share=1)
        u, v = np.split(np.array(self.oracle_probabilities(self.oracle, *self.values())), 2, axis=1)
        self.scores = (u * v).sum(1) / 0.1

    def clicks(self, params: Array) -> Array:
        names = [segment.name for segment in self.model.segments]
        tensors = dict(zip(names, FlatLayout(self.model.segments).views(params), strict=True))
        weight, bias = tensors["calibration.weight"], tensors["calibration.bias"]
        return 1.0 / (1.0 + np.exp(-np.abs(weight[0]) * self.scores - bias))

    def oracle_loss(self, oracle: Any, params: Array, rows: Mapping[str, Array]) -> float:
        vectors: Any = self.oracle_probabilities(oracle, params, rows)
        weights = np.ones(6) if self.batch.weights is None else self.batch.weights
        columns: Any = self.batch.dense, self.batch.labels, weights
        return two_towers_loss(vectors, self.clicks(params), *columns, temperature=0.1, share=1)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_two_towers_learn_by_the_other_items_of_the_batch(is_weighted: bool) -> None:
    case = TowersCase()
    if is_weighted:
        case.weigh()
    params, rows = case.values()

    found = case.model.outputs(case.params, case.batch, case.lookups, case.model.workspace(6))

    u, v = np.split(np.array(case.oracle_probabilities(case.oracle, params, rows)), 2, axis=1)
    np.testing.assert_allclose(found["user"], u, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["item"], v, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(case.predict(), case.clicks(params), rtol=1e-4)
    expected = case.oracle_loss(case.oracle, params, rows)
    np.testing.assert_allclose(case.gradient().loss, expected, rtol=1e-5)
    assert_slopes_agree(case, case.oracle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option 'item'"),
        ({"item": ["C9"]}, "no slot 'C9'"),
        ({"item": []}, r"item is \[\], expected some slots"),
        ({"item": ["C1"], "temperature": 0.0}, "temperature is 0"),
        ({"item": ["C1"], "log_share": "C1"}, "log_share is 'C1', expected a number: I1, I2, I3"),
    ],
)
def test_wrong_options_of_two_towers_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("two_towers", SCHEMA, options)


@pytest.mark.parametrize(
    "settings",
    [
        {"transform": "log1p", "missing": -9.0},
        {"shift": -2.6, "missing": -9.0},
        {"scale": 1.7, "missing": -9.0},
        {"transform": "min_max", "min": -9.0, "max": 0.0, "missing": -9.0},
        {"missing": 0.0},
    ],
)
def test_a_share_that_the_schema_would_change_is_refused(settings: dict[str, Any]) -> None:
    """Subtracted from the scores, a scaled logarithm would be another one, and 0 a share of 1."""
    with pytest.raises(
        ValueError, match=r"log_share is 'I2', with transform .*, expected 'none', 0, 1"
    ):
        build_model("two_towers", with_share(**settings), TOWERS)


@pytest.mark.parametrize("seed", range(6))
def test_fresh_two_towers_predict_the_rate_and_rank_by_score(seed: int) -> None:
    case = TowersCase(seed)
    case.params = case.model.initial_values.copy()
    tensors = FlatLayout(case.model.segments).views(case.params)
    weight, bias = (
        tensors[[segment.name for segment in case.model.segments].index(f"calibration.{name}")]
        for name in ("weight", "bias")
    )
    assert bias == 0.0
    (bias[:],) = case.model.initial_biases([0.2]).values()
    vectors = case.model.outputs(case.params, case.batch, case.lookups, case.model.workspace(6))
    order = (vectors["user"] * vectors["item"]).sum(1).argsort().tolist()

    found = case.predict()

    np.testing.assert_allclose(np.log(found / (1.0 - found)), np.log(0.2 / 0.8), atol=0.11)
    assert found.argsort().tolist() == order
    weight[:] = -1.0  # as an optimizer may make it
    assert case.predict().argsort().tolist() == order


def test_only_modules_that_return_a_dict_have_outputs() -> None:
    case = TaskCase("esmm")

    with pytest.raises(ModelInputError, match=r"returns float32\[8, 2\], expected a dict"):
        case.model.outputs(case.params, case.batch, case.lookups, case.model.workspace(8))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TASK_MODELS, "two_towers"])
def test_onnx_program_predicts_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install 'ctr-ps[onnx]'")
    case = TowersCase() if name == "two_towers" else TaskCase(name)
    export(case.model, case.params, tmp_path / "model.onnx")

    found = run_onnx(
        tmp_path / "model.onnx", ProgramInputs(case.model).of(case.batch, case.lookups)
    )

    np.testing.assert_allclose(found, case.predict(), rtol=1e-4)
    assert name_of(case.model) == name
