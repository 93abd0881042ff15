"""The models of the zoo: formulas by an oracle in numpy."""

import math
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.models.model import initial_biases_of  # noqa: E402
from ctr_ps.ctr_model.parameters import Lookup  # noqa: E402
from ctr_ps.ctr_model.registry import ZOO, build_model, name_of  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch  # noqa: E402
from ctr_ps.ctr_model.torch.batch import Rows  # noqa: E402
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
    module = found.model.workspace(1).module.double()
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
        ("final_mlp", {"heads": 3}, "heads is 3, expected a divisor of"),
        ("final_mlp", {"context1": ["C9"]}, "no slot 'C9'"),
        ("final_mlp", {"hidden": []}, "hidden is .*, expected"),
    ],
)
def test_what_is_unknown_or_wrong_is_named(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, Schema.numbered(2, 3), options)
