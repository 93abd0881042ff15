"""Gradients in bfloat16: those of float32 as exactly as 8 bits allow, of built-in models and modules."""

from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import nn  # noqa: E402

from ctr_ps.ctr_model.layers.products import float32_product  # noqa: E402
from ctr_ps.ctr_model.models.model import Model  # noqa: E402
from ctr_ps.ctr_model.parameters import FlatLayout  # noqa: E402
from ctr_ps.ctr_model.registry import MODELS, build_model, with_compute  # noqa: E402
from ctr_ps.ctr_model.torch import Batch, SlotEmbedding, TorchModel, bfloat16  # noqa: E402
from tests.support.model_cases import SCHEMA, Gradients, ModelCase  # noqa: E402
from tests.support.torch_models import TWINS  # noqa: E402

UNIT = 2.0**-8
"""Largest relative error of a number that is rounded to bfloat16: it has 8 bits of precision."""

WIDE: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"dim": 4},
    "ctr_dnn": {"dim": 8, "hidden": [32, 24]},
    "wide_deep": {"dim": 8, "hidden": [32, 24], "crosses": [["C1", "C2"]]},
    "deepfm": {"dim": 8, "hidden": [32, 24]},
    "dcn_v2": {"dim": 8, "hidden": [32, 24], "cross_rank": 16},
}
NARROW = ("lr", "fm")


def rounded(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the nearest numbers whose last 16 bits are zero, to even ones from half-way between."""
    bits = values.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))
    kept = (bits & np.uint64(0xFFFF0000)).astype(np.uint32)
    return kept.view(np.float32).astype(np.float64)


def test_product_rounds_what_it_multiplies_and_sums_in_float32() -> None:
    rng = np.random.default_rng(1)
    product = bfloat16.bfloat16_product(40, 24, 64)
    for size in (64, 1, 17):
        x, weight, grad = (
            rng.normal(size=shape).astype(np.float32)
            for shape in ((size, 40), (40, 24), (size, 24))
        )
        out, weight_grad, x_grad = np.empty_like(grad), np.empty_like(weight), np.empty_like(x)
        for array in (x, weight, grad):
            array.flags.writeable = False  # as parameters that are lent

        product.forward(x, weight, out)
        product.backward(x, weight, grad, weight_grad, x_grad)

        exact_x, exact_weight, exact_grad = rounded(x), rounded(weight), rounded(grad)
        for found, of, with_ in (
            (out, exact_x, exact_weight),
            (weight_grad, exact_x.T, exact_grad),
            (x_grad, exact_grad, exact_weight.T),
        ):
            # The result is rounded, too; sums of bfloat16 numbers in bfloat16 would be off by far more.
            slack = 1e-5 * np.abs(of) @ np.abs(with_)
            assert (np.abs(found - of @ with_) <= UNIT * np.abs(of @ with_) + slack).all()
            assert (rounded(found) == found).all()


def test_narrow_product_is_that_of_float32() -> None:
    assert bfloat16.bfloat16_product(400, 2, 8) is float32_product(400, 2, 8)
    assert bfloat16.bfloat16_product(8, 400, 8) is float32_product(8, 400, 8)


def case_of(model: Model, seed: int) -> ModelCase:
    """Returns a case in which rounding turns no unit of a hidden layer on or off.

    A unit that is near zero in an example turns its whole gradient there on or off, which is no measure of
    how exact a product is.
    """
    case = ModelCase(model, SCHEMA, seed, batch_size=64)
    rng = np.random.default_rng(seed)
    views = FlatLayout(model.segments).views(case.params)
    for segment, values in zip(model.segments, views, strict=True):
        size = {(32,): 12.0, (24,): 36.0}.get(segment.shape)  # biases of the hidden layers
        if size is not None:
            values[:] = size * rng.choice([-1, 1], segment.shape)
        else:
            scale = 0.02 if min(segment.shape) <= 2 else 0.5 * max(segment.shape) ** -0.5
            values[:] = rng.normal(scale=scale, size=segment.shape)
    return case


def in_bfloat16(case: ModelCase) -> Gradients:
    """Returns the same gradients of the same case, in bfloat16."""
    model = case.model
    case.model = with_compute(model, "bfloat16")
    try:
        return case.gradient()
    finally:
        case.model = model


def errors(found: Gradients, expected: Gradients, model: Model) -> dict[str, float]:
    """Returns the largest error of each tensor, relative to its largest element."""
    views = FlatLayout(model.segments).views
    names = [segment.name for segment in model.segments]
    pairs = dict(
        zip(names, zip(views(found.dense), views(expected.dense), strict=True), strict=True)
    )
    pairs |= {f"table {name}": (found.sparse[name], grad) for name, grad in expected.sparse.items()}
    return {
        name: float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        for name, (ours, theirs) in pairs.items()
    }


@pytest.mark.parametrize("name", WIDE)
def test_gradients_of_built_in_models_are_those_of_float32(name: str) -> None:
    """Each went through up to seven products, with three roundings each."""
    assert WIDE.keys() == MODELS.keys()
    worst: dict[str, float] = {}
    for seed in range(10):
        case = case_of(build_model(name, SCHEMA, WIDE[name]), seed)

        expected, found = case.gradient(), in_bfloat16(case)

        assert found.loss == pytest.approx(expected.loss, rel=UNIT)
        for tensor, error in errors(found, expected, case.model).items():
            worst[tensor] = max(worst.get(tensor, 0.0), error)
    print({tensor: f"{error / UNIT:.2f} units" for tensor, error in worst.items()})
    # The gradients of attention's weights, scalar products of rows and gradients, nearly cancel in sums.
    limits = {tensor: 24 if tensor.startswith("attention") else 8 for tensor in worst}
    assert all(error < limits[tensor] * UNIT for tensor, error in worst.items())
    assert (max(worst.values()) > UNIT / 4) == (name not in NARROW)


@pytest.mark.parametrize("name", TWINS)
def test_gradients_of_modules_are_those_of_float32(name: str) -> None:
    """As a whole and on average: PyTorch rounds logits, too, and units of hidden layers turn on and off."""
    options = {each: value for each, value in WIDE[name].items() if each != "cross_rank"}
    dense, rows = [], []
    for seed in range(10):
        case = ModelCase(TorchModel(SCHEMA, TWINS[name], options), SCHEMA, seed, batch_size=64)
        case.params *= np.float32(0.3)

        expected, found = case.gradient(), in_bfloat16(case)

        assert found.loss == pytest.approx(expected.loss, rel=UNIT)
        dense.append(relative(found.dense, expected.dense))
        rows += [relative(found.sparse[table], grad) for table, grad in expected.sparse.items()]
    print(f"{np.mean(dense) / UNIT:.2f} and {np.mean(rows) / UNIT:.2f} units")
    assert UNIT / 4 < np.mean(dense) < 16 * UNIT
    assert np.mean(rows) < 16 * UNIT


def relative(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", ["dcn_v2", "torch"])
def test_predictions_stay_those_of_float32(name: str) -> None:
    options = {"dim": 8, "hidden": [32, 24]}
    model = TorchModel(SCHEMA, TWINS["ctr_dnn"], options) if name == "torch" else None
    case = case_of(model or build_model(name, SCHEMA, options), seed=1)
    expected = case.predict()

    in_bfloat16(case)
    with_gradients = case.predict()

    assert with_gradients.tobytes() == expected.tobytes()
    case.model = with_compute(case.model, "bfloat16")
    if name == "torch":
        assert case.predict().tobytes() == expected.tobytes()


class Watched(nn.Module):
    """Notes in which precision its layers and its loss compute."""

    seen: ClassVar[dict[str, Any]] = {}

    def __init__(self, schema: Any) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=8, init_range=0.1)
        self.layer = nn.Linear(8, 16)

    def forward(self, batch: Batch) -> Any:
        pooled = self.embedding(batch).sum(1)
        hidden = self.layer(pooled)
        self.seen.update(pooled=pooled.dtype, hidden=hidden.dtype)
        return {"logits": hidden.sum(1), "parts": (hidden, [hidden])}

    def loss(self, batch: Batch, output: Any) -> Any:
        hidden, (again,) = output["parts"]
        self.seen["loss"] = {each.dtype for each in (output["logits"], hidden, again)}
        return (output["logits"] - batch.labels) ** 2

    def probabilities(self, batch: Batch, output: Any) -> Any:
        return output["logits"].sigmoid()


def test_layers_compute_in_bfloat16_and_losses_in_float32() -> None:
    case = ModelCase(TorchModel(SCHEMA, Watched), SCHEMA, seed=1)
    case.gradient()
    assert Watched.seen["hidden"] == torch.float32

    in_bfloat16(case)

    assert Watched.seen["pooled"] == torch.float32
    assert Watched.seen["hidden"] == torch.bfloat16
    assert Watched.seen["loss"] == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    case.model = with_compute(case.model, "bfloat16")
    case.predict()
    assert Watched.seen["hidden"] == torch.float32


def test_model_that_rounds_nothing_is_told_and_trains_in_float32(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bfloat16._warn_of_no_use.cache_clear()
    case = case_of(build_model("ctr_dnn", SCHEMA, {"dim": 2, "hidden": [7, 6]}), seed=1)

    assert in_bfloat16(case).as_bytes() == case.gradient().as_bytes()

    assert "CtrDnn trains in float32: it computes no product of" in caplog.text


def test_model_with_arithmetic_of_its_own_is_refused() -> None:
    class Own:
        pass

    with pytest.raises(ValueError, match="Own cannot compute in bfloat16: only PyTorch modules"):
        with_compute(Own(), "bfloat16")  # type: ignore[arg-type]


def test_processor_without_bfloat16_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bfloat16, "_capabilities", lambda: ["avx2", "avx512_vl"])
    bfloat16._warn_if_slow.cache_clear()

    for _ in range(2):
        with_compute(build_model("ctr_dnn", SCHEMA, WIDE["ctr_dnn"]), "bfloat16")

    (warning,) = caplog.messages
    assert warning.startswith("this processor has no instructions for bfloat16")


@pytest.mark.parametrize(
    ("capabilities", "has_it"),
    [
        (["fma", "avx2"], False),
        (["avx512_bf16", "avx2"], True),
        (["amx_bf16"], True),
        (["asimd", "bf16"], True),  # ARM
        ([], True),  # not known
    ],
)
def test_processors_that_multiply_in_bfloat16(capabilities: list[str], has_it: bool) -> None:
    assert bfloat16.has_bfloat16(capabilities) == has_it


def test_this_processor_says_what_it_is_capable_of() -> None:
    assert bfloat16._capabilities()
