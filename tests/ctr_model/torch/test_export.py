"""A program for other runtimes computes what its module does."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_ps.ctr_model.torch import Batch, SlotEmbedding, TorchModel  # noqa: E402
from ctr_ps.ctr_model.torch.export import ProgramInputs, export  # noqa: E402
from tests.support.model_cases import SCHEMA, SMALL, ModelCase  # noqa: E402
from tests.support.torch_models import TWINS  # noqa: E402

Arrays = Mapping[str, Any]


class Attention(nn.Module):
    """Rows of a slot are weighted, so that their number is another input's dimension."""

    def __init__(self, schema: Any) -> None:
        super().__init__()
        self.history = SlotEmbedding(["C2"], dim=4, pooling="none")
        self.score = nn.Linear(4, 1)
        self.out = nn.Linear(4 + schema.num_dense, 1)

    def forward(self, batch: Batch) -> Tensor:
        rows, is_there = self.history(batch)
        scores = self.score(rows).squeeze(-1).masked_fill(~is_there, -1e9)
        pooled = (scores.softmax(2).unsqueeze(-1) * rows).sum(2)
        return self.out(torch.cat([pooled.flatten(1), batch.dense], dim=1))


class CountsExamples(Attention):
    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) * len(batch.dense)


class CountsKeys(Attention):
    """An average over the places of a slot, of which the program would have the first number for ever."""

    def forward(self, batch: Batch) -> Tensor:
        rows, _ = self.history(batch)
        return super().forward(batch) / float(rows.shape[2])


class LimitsKeys(Attention):
    def forward(self, batch: Batch) -> Tensor:
        rows, _ = self.history(batch)
        return super().forward(batch) if rows.shape[2] < 3 else super().forward(batch) * 2


class LimitsManyKeys(Attention):
    def forward(self, batch: Batch) -> Tensor:
        rows, _ = self.history(batch)
        return super().forward(batch) if rows.shape[2] < 300 else super().forward(batch) * 2


class Bessel(Attention):
    """PyTorch has this function, ONNX has not."""

    def forward(self, batch: Batch) -> Tensor:
        return torch.special.i1(super().forward(batch))


def run_pt2(path: Path, inputs: Arrays) -> Any:
    program = torch.export.load(str(path)).module()
    return program(*(torch.from_numpy(each) for each in inputs.values())).detach().numpy()


def run_onnx(path: Path, inputs: Arrays) -> Any:
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx, and onnxruntime")
    session = runtime.InferenceSession(str(path))
    assert [each.name for each in session.get_inputs()] == list(inputs)
    (found,) = session.run(["probabilities"], dict(inputs))
    return found


@pytest.mark.parametrize(("suffix", "run"), [(".pt2", run_pt2), (".onnx", run_onnx)])
@pytest.mark.parametrize("name", [*TWINS, "attention"])
def test_program_predicts_what_the_module_predicts(
    name: str,
    suffix: str,
    run: Callable[[Path, Arrays], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install 'ctr-ps[onnx]'")
    options = SMALL[name].options if name in SMALL else {}
    model = TorchModel(SCHEMA, TWINS.get(name, Attention), options, seed=1)
    cases = [ModelCase(model, SCHEMA, seed, batch_size=size) for seed, size in ((1, 4), (2, 9))]

    with caplog.at_level(logging.INFO):
        export(model, cases[0].params, tmp_path / f"model{suffix}")

    assert not caplog.records
    for case in cases:
        case.params = cases[0].params
        inputs = ProgramInputs(model).of(replace(case.batch, labels=None), case.lookups)
        expected = case.predict()
        np.testing.assert_allclose(run(tmp_path / f"model{suffix}", inputs), expected, rtol=1e-5)
        one = {name: np.ascontiguousarray(each[:1]) for name, each in inputs.items()}
        np.testing.assert_allclose(run(tmp_path / f"model{suffix}", one), expected[:1], rtol=1e-5)


def test_program_has_the_calibration_of_fake_negatives(tmp_path: Path) -> None:
    model = TorchModel(SCHEMA, Attention, seed=1).with_delay("fnc")
    case = ModelCase(model, SCHEMA, seed=1, batch_size=9)
    expected = case.predict()
    export(model, case.params, tmp_path / "model.pt2")

    found = run_pt2(tmp_path / "model.pt2", ProgramInputs(model).of(case.batch, case.lookups))

    assert 0 < (expected == 1).sum() < 9
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_inputs_are_named_and_their_free_dimensions_too(tmp_path: Path) -> None:
    model = TorchModel(SCHEMA, Attention)

    shapes = export(model, model.initial_values, tmp_path / "model.pt2")

    assert shapes == {
        "dense": ["batch", SCHEMA.num_dense],
        "history:0": ["batch", 1, "keys", 4],
        "history:1": ["batch", 1, "keys"],
    }


def test_program_has_parameters_of_its_own(tmp_path: Path) -> None:
    model = TorchModel(SCHEMA, Attention)
    case = ModelCase(model, SCHEMA, seed=1)
    expected = case.predict().copy()
    export(model, case.params, tmp_path / "model.pt2")

    case.params[:] = 0

    inputs = ProgramInputs(model).of(case.batch, case.lookups)
    np.testing.assert_allclose(run_pt2(tmp_path / "model.pt2", inputs), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (CountsExamples, "model.pt2", "CountsExamples"),
        (LimitsManyKeys, "model.onnx", r"LimitsManyKeys .* at most 299 keys"),
        (Attention, "model.pb", r"model\.pb' does not end with \.onnx or \.pt2"),
    ],
    ids=["counts-in-python", "decides-by-many-keys", "other-format"],
)
def test_what_has_no_program_is_refused(
    module: type[nn.Module], name: str, message: str, tmp_path: Path
) -> None:
    model = TorchModel(SCHEMA, module)

    with pytest.raises(ValueError, match=message):
        export(model, model.initial_values, tmp_path / name)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
@pytest.mark.parametrize(
    ("module", "guard"),
    [(CountsKeys, r"history:\d\.size\(\)\[2\] == 2"), (LimitsKeys, r"history:\d\.size\(\)\[2\]")],
)
def test_module_for_some_numbers_of_keys_is_refused(
    module: type[nn.Module], guard: str, suffix: str, tmp_path: Path
) -> None:
    model = TorchModel(SCHEMA, module)

    message = rf"program of {module.__name__} .* history:0 \[5, 1, 4, 4\], .*{guard}.*the mask"
    with pytest.raises(ValueError, match=message):
        export(model, model.initial_values, tmp_path / f"model{suffix}")

    assert not list(tmp_path.iterdir())


def test_what_onnx_lacks_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install 'ctr-ps[onnx]'")
    model = TorchModel(SCHEMA, Bessel)

    with pytest.raises(ValueError, match=r"Bessel .* ONNX .*bessel_i1.*\.pt2"):
        export(model, model.initial_values, tmp_path / "model.onnx")

    assert not list(tmp_path.iterdir())
    export(model, model.initial_values, tmp_path / "model.pt2")


def test_program_drops_nothing(tmp_path: Path) -> None:
    class Dropped(Attention):
        def forward(self, batch: Batch) -> Tensor:
            return nn.functional.dropout(super().forward(batch), 1.0, training=self.training)

    case = ModelCase(TorchModel(SCHEMA, Dropped), SCHEMA, seed=1)
    export(case.model, case.params, tmp_path / "model.pt2")

    inputs = ProgramInputs(case.model).of(case.batch, case.lookups)
    found = run_pt2(tmp_path / "model.pt2", inputs)
    np.testing.assert_allclose(found, case.predict(), rtol=1e-5)


def test_module_that_computes_something_else_each_time_is_refused(tmp_path: Path) -> None:
    class Counting(Attention):
        times = 0

        def forward(self, batch: Batch) -> Tensor:
            Counting.times += 1
            return super().forward(batch) + Counting.times

    model = TorchModel(SCHEMA, Counting)

    with pytest.raises(ValueError, match="differs from the module"):
        export(model, model.initial_values, tmp_path / "model.pt2")
