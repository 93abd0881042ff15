"""docs/optimizers.md says what the registry does."""

import re
from pathlib import Path

import pytest

from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS

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
