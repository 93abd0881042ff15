"""docs/job.md leaves nothing out."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ctr_ps.ps_server.optimizers.registry import SETTINGS as SCHEDULES
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.life import AdmissionSection, TableLife
from ctr_ps.ps_worker.job.optimizers import OptimizerChoice, ScheduleSection
from ctr_ps.ps_worker.job.strategy import IGNORED, SETTINGS, TRANSLATED

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/job.md").read_text()
SECTIONS = list(Job.model_fields)
TYPES = {int: "integer", float: "number", str: "text", bool: "`true` or `false`"}


def part(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def rows(text: str) -> dict[str, list[str]]:
    """Returns the cells of each row whose first cell is a key."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def fields_of(section: str) -> dict[str, FieldInfo]:
    model = Job.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return {field.alias or name: field for name, field in model.model_fields.items()}


def type_of(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        *names, last = (f"`{name}`" for name in get_args(field.annotation))
        return f"{', '.join(names)} or {last}"
    if field.annotation is OptimizerChoice:
        return "optimizer"
    if field.annotation is AdmissionSection:
        return "admission"
    if field.annotation is ScheduleSection:
        return "schedule"
    if get_origin(field.annotation) is Mapping:
        return (
            "table of tables" if TableLife in get_args(field.annotation) else "table of optimizers"
        )
    if get_origin(field.annotation) is tuple:
        return "text or list of text"
    if field.annotation in SETTINGS.values():
        return "settings"
    if field is fields_of("train")["base_rate"]:
        return "`data`, or numbers > 0 and < 1"
    if field is fields_of("train")["row_dtype"]:
        return "`float32` or `bfloat16`, or a table of them"
    kind = field.annotation
    if get_origin(kind) is UnionType:
        (kind,) = set(get_args(kind)) - {NoneType}
    return TYPES[kind] + " and".join(filter(None, map(bound, field.metadata)))


def bound(limit: object) -> str:
    match limit:
        case Ge(ge=low):
            return f" ≥ {low}"
        case Gt(gt=low):
            return f" > {low}"
        case Le(le=high):
            return f" ≤ {high}"
        case Lt(lt=high):
            return f" < {high}" if high == 1 else f" < 2^{int(high).bit_length() - 1}"
    raise AssertionError(f"a bound that the page has no words for: {limit!r}")


def plain(default: Any) -> Any:
    if isinstance(default, OptimizerChoice):
        return default.name
    if isinstance(default, BaseModel):
        return default.model_dump(exclude_unset=True)
    return list(default) if isinstance(default, tuple) else default


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_its_row_and_every_row_its_key(section: str) -> None:
    keys = rows(part(section).partition("###")[0])

    assert keys.keys() == fields_of(section).keys()


@pytest.mark.parametrize("section", SECTIONS)
def test_types_and_defaults_are_those_of_the_job(section: str) -> None:
    compare(rows(part(section).partition("###")[0]), fields_of(section))


def test_keys_of_admission_are_those_of_the_job() -> None:
    keys = rows(part("life").partition("### Admission")[2])

    assert keys.keys() == AdmissionSection.model_fields.keys()
    compare(keys, AdmissionSection.model_fields)


def test_keys_of_a_schedule_are_those_of_the_job() -> None:
    keys = rows(part("optimizer").partition("### Schedules")[2])

    assert keys.keys() == ScheduleSection.model_fields.keys()
    compare(
        {name: [kind, default] for name, (_, kind, default, _) in keys.items()},
        ScheduleSection.model_fields,
    )
    for name, (kinds, *_) in keys.items():
        using = [f"`{kind}`" for kind, settings in SCHEDULES.items() if name in settings]
        assert kinds == (", ".join(using) or "all")


def compare(keys: Mapping[str, list[str]], fields: Mapping[str, FieldInfo]) -> None:
    """Compares types and defaults of the page with those of the job."""
    for name, field in fields.items():
        kind, default, *_ = keys[name]
        value = (
            None if default == "none" else tomllib.loads(f"value = {default.strip('`')}")["value"]
        )
        assert kind == type_of(field), name
        assert (type(value), value) == (
            type(plain(field.get_default(call_default_factory=True))),
            plain(field.get_default(call_default_factory=True)),
        ), name


def test_sections_stand_in_the_order_of_the_job() -> None:
    assert re.findall(r"^## (.*)", PAGE, re.MULTILINE) == SECTIONS


def test_settings_of_modes_are_those_of_the_job() -> None:
    keys = rows(part("strategy").partition("### Settings of a mode")[2].partition("###")[0])

    assert keys.keys() == {name for table in SETTINGS.values() for name in table.model_fields}
    for mode, table in SETTINGS.items():
        used = {name: cells for name, cells in keys.items() if f"`{mode}`" in cells[2]}
        assert used.keys() == table.model_fields.keys()
        compare(used, table.model_fields)


def test_every_word_of_fleet_is_there() -> None:
    fleet = part("strategy").partition("### In Fleet's words")[2]

    for word in (*TRANSLATED, *IGNORED):
        assert re.search(f"[`.]{word}`", fleet), word


def test_examples_of_the_page_are_jobs() -> None:
    for example in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        override_job(tomllib.loads(example), [], source="docs/job.md")
