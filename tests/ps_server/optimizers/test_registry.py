"""Optimizers by name: what is accepted, how refusals help, and what docs/optimizers.md says."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS, hyper_of, initial_state

LIMITS = [
    pytest.param(name, parameter, low, high, id=f"{name}-{parameter}")
    for name, optimizer in OPTIMIZERS.items()
    for parameter, (low, high) in optimizer.ranges.items()
]


def test_parameter_of_an_optimizer_without_any_is_refused() -> None:
    spec = OptimizerSpec(name="sum", params={"learning_rate": 0.1})

    with pytest.raises(SpecError, match="'sum' has no parameters, but is given 'learning_"):
        hyper_of(spec)


@pytest.mark.parametrize(("name", "parameter", "low", "high"), LIMITS)
def test_parameter_outside_its_range_is_refused(
    name: str, parameter: str, low: float, high: float
) -> None:
    required = dict.fromkeys(OPTIMIZERS[name].required, 0.1)
    outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]

    for value in [*outside, math.nan, math.inf, -math.inf]:
        with pytest.raises(SpecError, match=f"{parameter} of optimizer '{name}' is {value!r}"):
            hyper_of(OptimizerSpec(name=name, params={**required, parameter: value}))


@pytest.mark.parametrize("value", [0.5, 1e-30, 0.9999])
def test_switch_that_is_neither_0_nor_1_is_refused(value: float) -> None:
    spec = OptimizerSpec(name="momentum", params={"learning_rate": 0.1, "nesterov": value})

    with pytest.raises(SpecError, match=f"nesterov of .* is {value!r}, expected 0 or 1"):
        hyper_of(spec)


@pytest.mark.parametrize(("name", "parameter", "low", "high"), LIMITS)
def test_limits_of_a_range_are_in_it(name: str, parameter: str, low: float, high: float) -> None:
    required = dict.fromkeys(OPTIMIZERS[name].required, 0.1)
    for value in (low, high):
        hyper = hyper_of(OptimizerSpec(name=name, params={**required, parameter: value}))

        assert getattr(hyper, parameter) == np.float32(value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_hyper_parameter_has_a_range_that_holds_its_default(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    required = dict.fromkeys(optimizer.required, 0.1)
    defaults = optimizer.hyper(**required)

    assert optimizer.name == name
    of_push = {"staleness"}
    assert {*optimizer.ranges, optimizer.scheduled} - {""} == set(defaults._fields) - of_push
    given = {parameter: getattr(defaults, parameter) for parameter in optimizer.ranges}
    assert hyper_of(OptimizerSpec(name=name, params=given)) == hyper_of(
        OptimizerSpec(name=name, params=required)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_get_float32(name: str) -> None:
    """A float64 among them would double the width of every product."""
    required = dict.fromkeys(OPTIMIZERS[name].required, 0.1)
    hyper = hyper_of(OptimizerSpec(name=name, params=required))

    assert all(type(value) is np.float32 for value in hyper)


def test_state_starts_where_the_optimizer_says() -> None:
    adagrad = OptimizerSpec(name="adagrad", params={"initial_accumulator": 0.5})

    assert initial_state(OptimizerSpec(name="sgd", params={"learning_rate": 0.1}), 3).tolist() == []
    assert initial_state(adagrad, 3).tolist() == [0.5, 0.5, 0.5]
    assert initial_state(OptimizerSpec(name="adagrad_row"), 3).tolist() == [0.0]
    assert initial_state(OptimizerSpec(name="adam"), 2).tolist() == [0.0] * 4 + [1.0, 1.0]
    assert initial_state(OptimizerSpec(name="adam_row"), 2).tolist() == [0.0] * 3 + [1.0, 1.0]


PAGE = (Path(__file__).parents[3] / "docs/optimizers.md").read_text()


def rows(text: str) -> list[list[str]]:
    """Returns the cells of the rows that begin with a name."""
    lines = re.findall(r"^\|( `.*)\|$", text, re.MULTILINE)
    return [[cell.strip("` ") for cell in line.split("|")] for line in lines]


OVERVIEW, HYPER_PARAMETERS = (rows(part) for part in PAGE.split("## Hyper-parameters"))


def test_every_optimizer_has_its_row() -> None:
    assert [name for name, *_ in OVERVIEW] == list(OPTIMIZERS)


@pytest.mark.parametrize(("name", "state", "purpose"), [(n, s, p) for n, _, s, p in OVERVIEW])
def test_state_and_purpose_are_those_of_the_optimizer(name: str, state: str, purpose: str) -> None:
    optimizer = OPTIMIZERS[name]

    assert int(state) == 4 * optimizer.state_width(10)
    assert purpose == ("rows and dense" if optimizer.is_elementwise else "rows")


def test_defaults_and_ranges_are_those_of_the_optimizers() -> None:
    expected = [
        [name, parameter, default_of(name, parameter), f"{low:g}", f"{high:g}"]
        for name, optimizer in OPTIMIZERS.items()
        for parameter, (low, high) in optimizer.ranges.items()
    ]

    assert [cells[:5] for cells in HYPER_PARAMETERS] == expected


def default_of(name: str, parameter: str) -> str:
    optimizer = OPTIMIZERS[name]
    if parameter in optimizer.required:
        return "none"
    return f"{optimizer.hyper._field_defaults[parameter]:g}"
