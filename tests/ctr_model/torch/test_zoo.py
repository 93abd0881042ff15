"""The models of the zoo: formulas by an oracle in numpy."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.models.model import initial_biases_of  # noqa: E402
from ctr_ps.ctr_model.parameters import Lookup  # noqa: E402
from ctr_ps.ctr_model.registry import ZOO, build_model, name_of, with_compute  # noqa: E402
from ctr_ps.ctr_model.schema import DenseColumn, Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch, TorchModel  # noqa: E402
from ctr_ps.ctr_model.torch.batch import Rows  # noqa: E402
from ctr_ps.ctr_model.torch.export import ProgramInputs, export  # noqa: E402
from ctr_ps.ps_worker.predict import Predictor  # noqa: E402
from ctr_ps.ps_worker.trainer import Trainer  # noqa: E402
from tests.reference import models, zoo  # noqa: E402
from tests.support.model_cases import (  # noqa: E402
    SCHEMA,
    ModelCase,
    Oracle,
    assert_predictions_agree,
    assert_slopes_agree,
)

DIN = {"dim": 2, "hidden": [7, 6], "attention_hidden": [5], "max_length": 2}
BST = {"dim": 4, "hidden": [6], "feed_forward": 5, "max_length": 2}
MASK_NET = {"dim": 3, "blocks": [5, 4], "hidden": [4]}
GDCN = {"dim": 2, "num_cross_layers": 2, "hidden": [5, 4]}
AUTO_INT = {"dim": 3, "layers": 2, "head_dim": 2}
WUKONG = {"dim": 3, "fm_fields": 2, "linear_fields": 3, "rank": 2, "fm_hidden": [6], "hidden": [4]}

# By name, and a word for a variant; C3 is a history of C1.
CASES: dict[str, tuple[Oracle, dict[str, Any]]] = {
    "auto_int": (partial(zoo.auto_int, heads=2), {**AUTO_INT, "hidden": [5]}),
    "auto_int alone": (partial(zoo.auto_int, heads=1), {**AUTO_INT, "heads": 1, "hidden": []}),
    "bst": (partial(zoo.bst, history=2, target=0, max_length=2, heads=2), BST),
    "bst deep": (
        partial(zoo.bst, history=2, target=0, max_length=50, heads=1),
        {**BST, "layers": 2, "heads": 1, "max_length": 50},
    ),
    "din": (partial(models.din, histories={2: 0}, max_length=2), DIN),
    "final_mlp": (
        zoo.final_mlp,
        {"dim": 2, "hidden": [5, 4], "gate_hidden": [3], "context2": ["C2", "C4"]},
    ),
    "gdcn": (zoo.gdcn, GDCN),
    "gdcn parallel": (zoo.gdcn, {**GDCN, "structure": "parallel"}),
    "mask_net": (partial(zoo.mask_net, serial=False), MASK_NET),
    "mask_net serial": (partial(zoo.mask_net, serial=True), {**MASK_NET, "structure": "serial"}),
    "wukong": (zoo.wukong, WUKONG),
    "wukong same": (zoo.wukong, {**WUKONG, "layers": 3, "linear_fields": 5}),
}

FAST = ("din", "final_mlp")

every_case = pytest.mark.parametrize("case", CASES)


def of(case: str, seed: int = 1, batch_size: int = 5) -> tuple[ModelCase, Oracle]:
    oracle, options = CASES[case]
    model = build_model(case.partition(" ")[0], SCHEMA, options, seed=seed)
    return ModelCase(model, SCHEMA, seed, batch_size), oracle


def test_every_model_has_a_case() -> None:
    assert {case.partition(" ")[0] for case in CASES} == set(ZOO)


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_predictions_and_gradients_are_those_of_the_formula(case: str, seed: int) -> None:
    found, oracle = of(case, seed)

    assert_predictions_agree(found, oracle)
    assert_slopes_agree(found, oracle)


@every_case
def test_gradients_agree_in_float64(case: str) -> None:
    found, _ = of(case)
    workspace = found.model.workspace(1)
    workspace.take(torch.from_numpy(found.params))  # the same ones at each run
    module = workspace.module.double()
    names = [name for name, _ in module.named_parameters()]

    def logits(*values: torch.Tensor) -> torch.Tensor:
        rows = zip(found.model.tables, values, strict=False)
        batch = Batch(
            dense=torch.from_numpy(found.batch.dense).double(),
            labels=None,
            rows={table.name: keys_of(found.lookups[table.name], each) for table, each in rows},
        )
        parameters = dict(zip(names, values[-len(names) :], strict=True))
        return torch.func.functional_call(module, parameters, (batch,))

    rows = [found.lookups[table.name].rows for table in found.model.tables]
    values = [*map(torch.from_numpy, rows), *module.parameters()]
    inputs = [each.detach().double().requires_grad_() for each in values]
    assert torch.autograd.gradcheck(logits, inputs, fast_mode=True)


@every_case
def test_bfloat16_changes_little(case: str) -> None:
    found, _ = of(case)
    expected = found.gradient()

    found.model = with_compute(found.model, "bfloat16")

    in_bfloat16 = found.gradient()
    assert in_bfloat16.loss == pytest.approx(expected.loss, rel=0.05)
    difference = np.linalg.norm(in_bfloat16.dense - expected.dense)
    assert difference < 0.1 * np.linalg.norm(expected.dense)


def keys_of(lookup: Lookup, rows: torch.Tensor) -> Rows:
    """Returns the rows of each key of the slots, as on a device, where their sum has another function."""
    weights = rows[torch.from_numpy(lookup.inverse)]
    offsets = torch.from_numpy(lookup.offsets)
    return Rows(weights=weights, inverse=None, offsets=offsets, num_slots=lookup.num_slots)


@every_case
def test_model_is_built_again_by_its_name(case: str) -> None:
    found, _ = of(case)

    assert name_of(found.model) == case.partition(" ")[0]


@every_case
def test_fresh_model_predicts_the_rate(case: str) -> None:
    found, _ = of(case)

    (values,) = initial_biases_of(found.model, [0.2]).values()

    assert values == (math.log(0.2 / 0.8),)


def test_options_of_tables_reach_those_of_the_gates() -> None:
    options = {"context1": ["C2"], "context2": ["C1", "C3"], "init_range": 0.3, "pooling": "max"}
    model = build_model("final_mlp", Schema.numbered(1, 3), options)
    case = ModelCase(model, model.schema, seed=1, batch_size=4)
    before = case.predict()
    doubled = {}
    for name, lookup in case.lookups.items():
        pairs = zip(lookup.offsets[:-1], lookup.offsets[1:], strict=True)
        twice = [np.tile(lookup.inverse[start:stop], 2) for start, stop in pairs]
        doubled[name] = lookup._replace(
            inverse=np.concatenate(twice), offsets=(2 * lookup.offsets).astype(np.int64)
        )
    case.lookups = doubled

    assert {table.name: table.init_range for table in model.tables} == dict.fromkeys(
        ("embedding", "context1", "context2"), 0.3
    )
    np.testing.assert_array_equal(case.predict(), before)  # of the largest, not of sums


INTERACTION = Schema(dense=(DenseColumn(name="noise"),), slots=("a", "b"))
HISTORY = Schema(dense=(), slots=("item", "history"), shares={"history": "item"})
OF_HISTORIES = ("bst", "din")


def planted(name: str, rows: int, seed: int) -> Iterator[tuple[int, list[float], list[Any]]]:
    """Yields samples of which no value matters in itself, only with another; the best AUC is 0.9.

    `din` may see whether the item is in the history, `bst` what the last key of the history is.
    """
    rng = np.random.default_rng(seed)
    for _ in range(rows):
        item, other = rng.integers(8, size=2)
        is_likely = (item + other) % 2
        numbers, slots = [float(rng.normal())], [f"{item}", f"{other}"]
        if name in OF_HISTORIES:
            history = rng.choice(8, rng.integers(1, 5), replace=False)
            is_likely = item in history if name == "din" else (item + history[-1]) % 2
            numbers, slots = [], [f"{item}", [f"{each}" for each in history]]
        yield int(rng.random() < (0.9 if is_likely else 0.1)), numbers, slots


def trainer_of(name: str) -> Trainer:
    return Trainer(
        name,
        {"dim": 8, "hidden": [32], "init_range": 0.1},
        schema=HISTORY if name in OF_HISTORIES else INTERACTION,
        optimizer={
            "sparse": {"name": "adagrad", "learning_rate": 0.2},
            "dense": {"name": "adam", "learning_rate": 0.005},
        },
        train={"batch_size": 32},
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ZOO]
)
def test_it_learns_and_a_predictor_agrees(name: str, tmp_path: Path) -> None:
    trainer, test = trainer_of(name), list(planted(name, 1000, seed=2))

    trainer.train(list(planted(name, 2000, seed=1)), epochs=3)

    auc = trainer.evaluate(test)["auc"]
    assert auc is not None
    assert auc > 0.85
    trainer.save(str(tmp_path / "model"))
    predictor = Predictor.load(tmp_path / "model")
    np.testing.assert_allclose(predictor.predict_samples(test), trainer.predict(test), rtol=1e-5)


@pytest.mark.slow
@every_case
def test_onnx_program_predicts_the_same(case: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx, and onnxruntime")
    cases = [of(case)[0], of(case, seed=2, batch_size=9)[0]]
    model = cases[0].model
    assert isinstance(model, TorchModel)

    export(model, cases[0].params, tmp_path / "model.onnx")

    session = runtime.InferenceSession(str(tmp_path / "model.onnx"))
    for each in cases:
        each.model, each.params = model, cases[0].params
        inputs = ProgramInputs(model).of(replace(each.batch, labels=None), each.lookups)
        (found,) = session.run(["probabilities"], dict(inputs))
        np.testing.assert_allclose(found, each.predict(), rtol=1e-4)


def test_without_pytorch_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ctr_ps.ctr_model.registry import build_model\n"
        "from ctr_ps.ctr_model.schema import Schema\n"
        "build_model('final_mlp', Schema.numbered(1, 2), {})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert (
        "model 'final_mlp' needs PyTorch, which is not installed: pip install 'ctr-ps[torch]'"
        in (done.stderr)
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("final_mpl", {}, "did you mean 'final_mlp'"),
        ("final_mlp", {"dimm": 3}, "did you mean 'dim'"),
        ("program", {"operations": []}, "operations is empty, expected those of a network"),
        ("final_mlp", {"heads": 3}, "heads is 3, expected a divisor of"),
        ("final_mlp", {"context1": ["C9"]}, "no slot 'C9'"),
        ("final_mlp", {"hidden": []}, "hidden is .*, expected"),
    ],
)
def test_what_is_unknown_or_wrong_is_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, Schema.numbered(2, 3), options)
