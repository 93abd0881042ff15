"""A module of several tasks: its loss by the formula, its predictions, and what it may not declare."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from ctr_ps import Trainer  # noqa: E402
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn  # noqa: E402
from ctr_ps.ctr_model.models.model import Task  # noqa: E402
from ctr_ps.ctr_model.parameters import ModelInputError  # noqa: E402
from ctr_ps.ctr_model.registry import build_model, with_compute, with_logit_offset  # noqa: E402
from ctr_ps.ctr_model.torch import Batch, SlotEmbedding, TorchModel  # noqa: E402
from ctr_ps.ctr_model.torch.device import DeviceBatch, DeviceModel, slots_of  # noqa: E402
from ctr_ps.ctr_model.torch.export import ProgramInputs, export  # noqa: E402
from tests.ctr_model.torch.test_device import slot_rows  # noqa: E402
from tests.ctr_model.torch.test_export import run_onnx, run_pt2  # noqa: E402
from tests.ctr_model.torch.test_halves import in_halves  # noqa: E402
from tests.reference.models import pooled, sigmoid  # noqa: E402
from tests.support.model_cases import (  # noqa: E402
    SCHEMA,
    Array,
    ModelCase,
    assert_gradients_agree,
    assert_predictions_agree,
)
from tests.support.task_modules import SharedBottom  # noqa: E402

ONE = replace(SCHEMA, label="click")
TWO = replace(SCHEMA, label="click", other_labels=("bought",))
THREE = replace(SCHEMA, label="click", other_labels=("bought", "returned"))


class Conditional(SharedBottom):
    """Buys are learnt of clicked rows alone."""

    def __init__(self, schema: Any) -> None:
        super().__init__(schema)
        self.tasks = [
            "click",
            Task("bought", labels=(1,), given=(0,)),
            Task("returned", labels=(1, 2), given=(0,)),
        ]


class OwnLoss(SharedBottom):
    """The default loss, in the way that `kind` says."""

    def __init__(self, schema: Any, *, kind: str) -> None:
        super().__init__(schema)
        self.kind = kind

    def loss(self, batch: Batch, output: Tensor) -> Any:
        losses = functional.binary_cross_entropy_with_logits(output, batch.labels, reduction="none")
        return {
            "by task": losses,
            "by name": {"click": losses[:, 0], "bought": losses[:, 1]},
            "summed": losses.sum(1),
            "mean": losses.sum(1).mean(),
        }[self.kind]


class Both(OwnLoss):
    """As many probabilities as tasks, which are more than logits."""

    def __init__(self, schema: Any) -> None:
        super().__init__(schema, kind="summed")
        self.tasks = ["click", "bought", Task("both", labels=(0, 1))]

    def probabilities(self, batch: Batch, output: Tensor) -> Tensor:
        found = output.sigmoid()
        return torch.cat([found, found.prod(1, keepdim=True)], dim=1)


def oracle(dense: Array, slots: Mapping[str, Any], tensors: Mapping[str, Array]) -> list[float]:
    x = pooled(dense, slots["embedding"])
    hidden = np.maximum(tensors["bottom.weight"] @ x + tensors["bottom.bias"], 0.0)
    return [sigmoid(logit) for logit in tensors["heads.weight"] @ hidden + tensors["heads.bias"]]


class TaskCase(ModelCase):
    """A case whose examples have every combination of the labels."""

    def __init__(self, module: type[nn.Module], schema: Any = TWO, **options: Any) -> None:
        super().__init__(TorchModel(schema, module, options), schema, seed=3, batch_size=8)
        bits = (np.arange(8)[:, None] >> np.arange(len(schema.labels)) & 1).astype(np.float32)
        self.batch = replace(self.batch, labels=bits[:, 0], other_labels=bits[:, 1:])
        self.bits = bits

    def oracle_loss(self, oracle: Callable[..., Any], params: Array, rows: Any) -> float:
        found = np.array(self.oracle_probabilities(oracle, params, rows))
        weights = np.ones(8) if self.batch.weights is None else self.batch.weights
        loss = 0.0
        for b, row in enumerate(self.bits):
            for k, task in enumerate(self.model.tasks):
                if all(row[label] for label in task.given):
                    happens = all(row[label] for label in task.labels)
                    loss -= weights[b] * np.log(found[b, k] if happens else 1.0 - found[b, k])
        return float(loss)


@pytest.mark.parametrize(
    ("module", "schema"), [(SharedBottom, TWO), (SharedBottom, THREE), (Conditional, THREE)]
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_default_loss_is_the_sum_of_the_tasks(
    module: type[nn.Module], schema: Any, is_weighted: bool
) -> None:
    case = TaskCase(module, schema)
    if is_weighted:
        case.weigh()

    assert [task.name for task in case.model.tasks] == list(schema.labels)
    assert_predictions_agree(case, oracle)
    assert_gradients_agree(case, oracle)


@pytest.mark.parametrize("kind", ["by task", "by name", "summed", "mean"])
def test_own_loss_may_be_by_task(kind: str) -> None:
    expected = TaskCase(SharedBottom).gradient()

    found = TaskCase(OwnLoss, kind=kind).gradient()

    assert found.loss == pytest.approx(expected.loss)
    np.testing.assert_allclose(found.dense, expected.dense, rtol=1e-4, atol=1e-6)


def test_own_probabilities_are_those_of_the_tasks() -> None:
    case = TaskCase(Both)
    out, workspace = case.outputs(), case.model.workspace(8)

    result = case.model.gradient(
        case.params, case.batch, case.lookups, workspace, out.dense, out.sparse
    )
    found = case.predict()

    assert found.shape == (8, 3)
    np.testing.assert_allclose(found[:, 0] * found[:, 1], found[:, 2], rtol=1e-6)
    np.testing.assert_array_equal(result.probabilities, found[:, 0])


@pytest.mark.parametrize("module", [SharedBottom, Both])
def test_halves_and_devices_compute_what_the_whole_does(module: type[nn.Module]) -> None:
    case = TaskCase(module)
    expected = case.gradient()

    dense, (sparse,), (result,) = in_halves([case], case.model)
    device, out = DeviceModel(case.model, torch.device("cpu")), torch.empty(case.model.num_params)
    slots = {slots_of(table): slot_rows(case.lookups[table.name]) for table in case.model.tables}
    there = DeviceBatch.of(case.batch, slots, torch.device("cpu"), num_labels=2)
    copies = {
        name: torch.tensor(lookup.rows[lookup.inverse]) for name, lookup in case.lookups.items()
    }
    on_device, _ = device.gradient(torch.tensor(case.params), there, copies, out)

    for found, loss, clicks in (
        (dense, result.loss, result.probabilities),
        (out.numpy(), on_device.loss.item(), on_device.probabilities.numpy()),
    ):
        np.testing.assert_allclose(found, expected.dense, rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(expected.loss)
        np.testing.assert_allclose(clicks, case.predict()[:, 0], rtol=1e-6)
    np.testing.assert_allclose(
        sparse["embedding"], expected.sparse["embedding"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("suffix", "run"), [(".pt2", run_pt2), (".onnx", run_onnx)])
@pytest.mark.parametrize("module", [SharedBottom, Both])
def test_programs_predict_every_task(
    module: type[nn.Module], suffix: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install 'ctr-ps[onnx]'")
    case = TaskCase(module)
    export(case.model, case.params, tmp_path / f"model{suffix}")

    inputs = ProgramInputs(case.model).of(case.batch, case.lookups)

    found = run(tmp_path / f"model{suffix}", inputs)
    np.testing.assert_allclose(found, case.predict(), rtol=1e-5, atol=1e-6)


def test_gradients_in_bfloat16_are_close() -> None:
    case = TaskCase(SharedBottom, dim=8, hidden=32)
    expected = case.gradient()
    case.model = with_compute(case.model, "bfloat16")

    found = case.gradient()

    assert found.loss == pytest.approx(expected.loss, rel=0.02)
    assert 0 < np.abs(found.dense - expected.dense).max() < 0.1 * np.abs(expected.dense).max()


def test_one_label_is_a_task_like_none() -> None:
    case = ModelCase(TorchModel(ONE, SharedBottom), ONE, seed=3)

    assert case.model.tasks == ()
    assert case.predict().shape == (5,)
    assert np.isfinite(case.gradient().dense).all()


class OneLogit(SharedBottom):
    def __init__(self, schema: Any) -> None:
        super().__init__(replace(schema, other_labels=()))
        self.tasks = None


def test_a_module_of_one_label_is_refused_where_it_is_made() -> None:
    way_out = r"OneLogit learns one label, but the schema has click, bought.*self\.tasks"

    with pytest.raises(ValueError, match=way_out):
        TorchModel(TWO, OneLogit)
    with pytest.raises(ValueError, match=r"tasks has 'bought', expected one of the labels click"):
        TorchModel(ONE, Both, {})


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["click", "buy"], r"has 'buy', expected one of the labels click, bought"),
        (["bought"], r"begins with 'bought', expected 'click'"),
        ([Task("click", (0,), given=(1,))], r"begins with 'click'"),
        (["click", "click"], r"a name twice: click, click"),
        (["click", Task("x", labels=(2,))], r"numbers of labels below 2"),
        (["click", Task("x", labels=())], r"numbers of labels below 2"),
        (["click", 1], r"has 1, expected one of the labels"),
        (["click", Task("x", labels=1)], r"labels=1.*a Task with tuples of numbers"),
        ([Task("click", [0])], r"labels=\[0\].*a Task with tuples of numbers of labels below 2"),
        ([Task("click", (0,), given=[])], r"given=\[\].*a Task with tuples of numbers"),
        ("click", r"tasks is 'click', expected a list of labels or Tasks"),
        (3, r"Declares\.tasks is 3, expected a list of labels or Tasks"),
    ],
)
def test_other_tasks_are_refused(tasks: Any, message: str) -> None:
    class Declares(SharedBottom):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.tasks = tasks

    with pytest.raises(ValueError, match=message):
        TorchModel(TWO, Declares)


def test_other_outputs_are_refused() -> None:
    class Flat(SharedBottom):
        def forward(self, batch: Batch) -> Tensor:
            return super().forward(batch)[:, 0]

    class TwoOfThree(Both):
        def probabilities(self, batch: Batch, output: Tensor) -> Tensor:
            return output.sigmoid()

    for module, message in (
        (Flat, r"float32\[8\] for B = 8.*logits float32\[B, 2\] of the tasks click, bought"),
        (TwoOfThree, r"float32\[8, 2\] for B = 8.*expected float32\[B, 3\] of the tasks"),
    ):
        for call in (TaskCase(module).gradient, TaskCase(module).predict):
            with pytest.raises(ModelInputError, match=message):
                call()


@pytest.mark.parametrize("others", [None, np.ones((8, 2), np.float32)])
def test_other_numbers_of_labels_are_refused(others: Any) -> None:
    case = TaskCase(SharedBottom)
    case.batch = replace(case.batch, other_labels=others)

    with pytest.raises(ModelInputError, match=r"learns 2 labels, but this batch has [13]"):
        case.gradient()
    with pytest.raises(ModelInputError, match=r"learns 2 labels, but this batch has [13]"):
        DeviceBatch.of(case.batch, {}, torch.device("cpu"), num_labels=2)
    assert case.predict().shape == (8, 2)


def test_an_offset_of_the_logit_is_refused() -> None:
    with pytest.raises(ValueError, match="negative_correction = 'weight'"):
        with_logit_offset(TorchModel(TWO, SharedBottom), 0.5)


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_probabilities_instead_of_logits_are_warned_of(
    join: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Sigmoids(SharedBottom):
        def forward(self, batch: Batch) -> Tensor:
            found = super().forward(batch).sigmoid()
            first, second = found[:, 0], found[:, 1]
            if join is torch.stack:
                return torch.stack([first, second], dim=1)
            return torch.cat([first.unsqueeze(1), second.unsqueeze(1)], dim=1)

    with caplog.at_level(logging.WARNING):
        TaskCase(Sigmoids).gradient()

    assert "logits are expected" in caplog.text


def test_an_error_names_the_class_of_a_model_that_was_given() -> None:
    trainer = Trainer(TorchModel(TWO, SharedBottom))

    with pytest.raises(Exception, match=r"model 'SharedBottom': .* learns 2 labels"):
        trainer.train([ModelCase(TorchModel(ONE, SharedBottom), ONE, seed=3).batch])


def test_built_in_models_of_one_label_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="CtrDnn learns one label"):
        CtrDnn(TWO)
    with pytest.raises(ValueError, match="learns one label"):
        build_model("ctr_dnn", TWO, {})


class Histories(nn.Module):
    def __init__(self, schema: Any, *, pooling: Any = "sum") -> None:
        super().__init__()
        self.embedding = SlotEmbedding(
            dim=2, init_range=0.1, pooling=pooling, histories=["C3", "C2"]
        )

    def forward(self, batch: Batch) -> Tensor:
        fields, *histories = self.embedding(batch)
        return _sum_of(fields, histories)


class Apart(nn.Module):
    """The same by three embeddings of one table."""

    def __init__(self, schema: Any, *, pooling: Any = "sum") -> None:
        super().__init__()
        same: dict[str, Any] = {"dim": 2, "init_range": 0.1, "table": "embedding"}
        self.fields = SlotEmbedding(["C1", "C4"], pooling=pooling, **same)
        self.histories = SlotEmbedding(["C3"], pooling="none", **same)
        self.others = SlotEmbedding(["C2"], pooling="none", **same)

    def forward(self, batch: Batch) -> Tensor:
        of_c3, of_c2 = self.histories(batch), self.others(batch)
        return _sum_of(self.fields(batch), [each.squeeze(1) for each in (*of_c3, *of_c2)])


def _sum_of(fields: Tensor, histories: list[Tensor]) -> Tensor:
    third, is_third, second, is_second = histories
    assert fields.shape[1:] == (2, 2)
    assert third.shape[:2] == is_third.shape
    weights = torch.arange(3.0, 3.0 + third.shape[1]).unsqueeze(1)
    total = (third * weights).sum((1, 2)) + 5 * (second[..., 0] ** 2).sum(1)
    counts = is_third.sum(1) + 3 * is_second.sum(1)
    return total + counts + fields[:, 0].sum(1) - 2 * fields[:, 1].sum(1)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_fields_and_histories_come_of_one_table(pooling: str) -> None:
    found, expected = (
        ModelCase(TorchModel(SCHEMA, module, {"pooling": pooling}), SCHEMA, seed=3)
        for module in (Histories, Apart)
    )
    expected.lookups = found.lookups

    assert found.model.tables == expected.model.tables
    np.testing.assert_array_equal(found.predict(), expected.predict())
    grad, other = found.gradient(), expected.gradient()
    np.testing.assert_allclose(grad.sparse["embedding"], other.sparse["embedding"], rtol=1e-6)


def test_histories_cross_the_cut(tmp_path: Path) -> None:
    case = ModelCase(TorchModel(SCHEMA, Histories), SCHEMA, seed=3)
    shapes = export(case.model, case.params, tmp_path / "model.pt2")

    found = run_pt2(tmp_path / "model.pt2", ProgramInputs(case.model).of(case.batch, case.lookups))

    assert shapes == {
        "dense": ["batch", 3],
        "embedding:0": ["batch", 2, 2],
        "embedding:1": ["batch", "keys", 2],
        "embedding:2": ["batch", "keys"],
        "embedding:3": ["batch", "keys", 2],
        "embedding:4": ["batch", "keys"],
    }
    np.testing.assert_allclose(found, case.predict(), rtol=1e-5, atol=1e-6)


def test_wrong_histories_are_refused() -> None:
    with pytest.raises(ValueError, match="pooling is 'none' beside histories"):
        SlotEmbedding(dim=2, pooling="none", histories=["C3"])
    with pytest.raises(ValueError, match="histories 'C3', expected lists"):
        SlotEmbedding(dim=2, histories="C3")
