"""The models of the zoo: formulas by an oracle in numpy."""

import math
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.models.model import initial_biases_of  # noqa: E402
from ctr_ps.ctr_model.registry import ZOO, build_model, name_of  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from tests.reference import zoo  # noqa: E402
from tests.support.model_cases import (  # noqa: E402
    SCHEMA,
    ModelCase,
    Oracle,
    assert_gradients_agree,
    assert_predictions_agree,
)

CASES: dict[str, tuple[Oracle, dict[str, Any]]] = {
    "final_mlp": (
        zoo.final_mlp,
        {"dim": 2, "hidden": [5, 4], "gate_hidden": [3], "context2": ["C2", "C4"]},
    ),
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
    assert_gradients_agree(found, oracle)


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
