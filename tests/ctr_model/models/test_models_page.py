"""docs/models.md lists all models and options."""

import inspect
import json
import re
from pathlib import Path

import pytest

from ctr_ps.ctr_model.registry import MODELS, TASK_MODELS, ZOO, class_named
from tests.support.model_cases import small_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/models.md").read_text()
MODEL_ROWS, OPTION_ROWS, ZOO_ROWS = 0, 1, 3


def rows(part: int) -> dict[str, list[str]]:
    """Returns the cells of each row of a part's table, by its first cell."""
    lines = [
        line.strip("|").split(" | ")
        for line in PAGE.split("\n## ")[part].splitlines()
        if line.startswith("| `") and not line.startswith("| `model.name`")
    ]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def options_of(model: str) -> dict[str, object]:
    return {
        name: list(parameter.default) if type(parameter.default) is tuple else parameter.default
        for name, parameter in inspect.signature(class_named(model)).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def test_every_model_is_listed_with_its_tables() -> None:
    listed = {model: names(cells[1]) for model, cells in rows(MODEL_ROWS).items()}

    tables = {model: [table.name for table in small_model(model).tables] for model in MODELS}
    assert list(listed.items()) == list(tables.items())


def test_every_option_is_listed_with_its_models_and_its_default() -> None:
    listed: dict[str, dict[str, object]] = {model: {} for model in MODELS}
    for option, (models, default, _) in rows(OPTION_ROWS).items():
        named = names(models)
        having = [m for m in MODELS if m not in named] if models.startswith("all but") else named
        for model in having:
            listed[model][option] = None if default == "none" else json.loads(default.strip("`"))

    assert listed == {model: options_of(model) for model in MODELS}


def given(text: str) -> dict[str, object]:
    """Returns the options in a text, each with its default."""
    return {name: json.loads(value) for name, value in re.findall(r"`(\w+)=([^`]+)`", text)}


def test_every_option_of_several_labels_is_listed_with_its_default() -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    part = PAGE.split("\n## Several labels\n")[1].split("\n## ")[0]
    (of_all,) = re.findall(r"^All (have .*)\.$", part, re.M)
    for model in (*TASK_MODELS, "two_towers"):
        (own,) = re.findall(rf"^- `{model}` .*$", part, re.M)
        listed = given(own)
        for options in of_all.split("; all but "):
            if not options.startswith(f"`{model}`"):
                listed |= given(options)
        if model == "two_towers":
            listed["item"] = inspect.Parameter.empty
        assert listed == options_of(model), model


def test_every_option_of_the_zoo_is_listed_with_its_default() -> None:
    """Those that all have are below the table, with the exceptions."""
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    assert list(rows(ZOO_ROWS)) == list(ZOO)

    part = PAGE.split("\n## Zoo\n")[1]
    line = next(line for line in part.splitlines() if line.startswith("All have "))
    of_all, of_histories = (given(part) for part in line.split("`bst` and `din` also"))
    for name, (_, own, _) in rows(ZOO_ROWS).items():
        listed = {**of_all, **given(own)}
        if name in ("bst", "din"):
            listed |= {**of_histories, "histories": None}
        if name == "din":
            listed["hidden"] = [400, 400, 400]
            assert "`din`: `[400,400,400]`" in line
        assert listed == options_of(name), name


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", PAGE))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / "docs" / link.partition("#")[0]).exists()
