"""Reading jobs from TOML files and checkpoints, with overrides `section.key=value`.

A wrong key or value raises JobError, which suggests known keys for an unknown one.
"""

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ctr_ps.protos.errors import JobError, did_you_mean
from ctr_ps.protos.runtime.environment import toml_value, with_home
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_worker.job.job import Job, KeyPath, Origin, path_of
from ctr_ps.ps_worker.job.optimizers import OptimizerChoice
from ctr_ps.ps_worker.job.strategy import (
    FLEET_WORDS,
    FleetWordError,
    StrategySection,
    aliases_of,
    translated,
)


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a TOML file; raises JobError if it cannot be read."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read job {path}: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path}: not TOML: {error}") from error
    return _job_of(data, Origin(source=str(path), overrides=tuple(overrides)))


def override_job(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str,
    words: Callable[[str], str] = str,
) -> Job:
    """Returns the job of nested mappings; `source` is its name in errors, `words` renames keys there."""
    return _job_of(data, Origin(source=source, overrides=tuple(overrides), words=words))


def _job_of(data: Mapping[str, Any], origin: Origin) -> Job:
    tree = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()
    }
    for override in origin.overrides:
        _set(tree, override)
    tree = with_home(tree)
    if isinstance(strategy := tree.get("strategy"), Mapping):
        try:
            tree["strategy"] = translated(strategy)
        except FleetWordError as error:
            raise JobError(f"{origin.of(error.key)}: {error}") from error
        origin = replace(origin, aliases=aliases_of(strategy, tree["strategy"].get("mode", "")))
    try:
        return Job.model_validate(tree, context=origin)
    except ValidationError as error:
        faults = [explain(detail, origin) for detail in error.errors()]
        raise JobError("\n".join(faults)) from error


def _set(tree: dict[str, Any], override: str) -> None:
    path = path_of(override)
    _, equals, text = override.partition("=")
    value = toml_value(text)
    is_section = isinstance(value, Mapping) or (path == ("model",) and isinstance(value, str))
    if not equals or not all(path) or not (len(path) > 1 or is_section):
        is_key = equals and len(path) == 1 and path[0] not in Job.model_fields
        raise JobError(
            f"--set {override}: expected section.key=value or section={{ key = value "
            f"}}{hint_for_key(path) if is_key else ''}"
        )
    node = tree
    for part in path[:-1]:
        child = node.get(part)
        # `optimizer.sparse = "adam"` is short for `{ name = "adam" }`, and so is `model = "ctr_dnn"`.
        named = {"name": child} if isinstance(child, str) else {}
        node[part] = dict(child) if isinstance(child, Mapping) else named
        node = node[part]
    node[path[-1]] = value


_NEAR = 0.6  # similarity from which on a name of the same table may be meant, as of `difflib`

_NEAR_ELSEWHERE = 0.75  # the same for a name of another table


def explain(detail: ErrorDetails, origin: Origin) -> str:
    """Returns the message for an invalid key: its place, its name, the fault and a hint."""
    path = origin.as_written([str(part) for part in detail["loc"]])
    is_missing = detail["type"] == "missing"  # what brought the table around it lacks it
    place = origin.places(path[:-1])[-1] if is_missing else origin.of(path)
    return f"{place}: {origin.words(_fault(detail, path))}"


def first_named(names: Collection[str], error: Exception) -> str | None:
    """Returns the first of `names` in an error's message, which begins with what is wrong."""
    words = re.findall(r"\w+", str(error))
    return next((word for word in words if word in names), None)


def _fault(detail: ErrorDetails, path: KeyPath) -> str:
    key = ".".join(path)
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}{hint_for_key(path)}"
        case "literal_error":
            known = re.findall("'([^']+)'", detail["ctx"]["expected"])
            hint = did_you_mean(str(value), known, likeness=0)
            return f"{key} is {value!r}{hint} known: {', '.join(known)}"
        case "missing":
            return f"{key} is missing"
        case "model_type" | "dict_type":
            return f"{key} is {value!r}, expected a table of keys (see docs/job.md)"
        case "setting_without_use":
            return f"{key} is {value!r}, {detail['msg']}"
        case _:
            return f"{key} is {value!r}: {detail['msg']}"


def hint_for_key(path: KeyPath) -> str:
    """Returns the end of a sentence about an unknown key: similar keys, or all that exist."""
    if meant := _meant_keys(path):
        return f", did you mean {' or '.join(map(repr, meant))}?"
    names = _names_in(path[:-1])
    where = f"[{'.'.join(path[:-1])}] has" if len(path) > 1 else "a job has the sections"
    return f": {where} {', '.join(names)}" if names else ""


def _meant_keys(path: KeyPath) -> list[str]:
    """Returns the known keys that an unknown one may mean, or none.

    Those of the same name in other sections come first, then the nearest name of its own section, then the
    nearest of all: `train.learning_rate` may mean `optimizer.sparse.learning_rate` or that of `dense`.
    """
    table, name = path[:-1], path[-1]
    everywhere = list(_below((), Job))
    if same := [key for key in everywhere if key[-1] == name]:
        return list(map(".".join, same))
    own = [(*table, each) for each in _names_in(table)]
    nearest = _nearest(name, own, _NEAR) or _nearest(name, everywhere, _NEAR_ELSEWHERE)
    return list(map(".".join, nearest))


def _names_in(table: Sequence[str]) -> list[str]:
    """Returns the names of the keys in a section or table, in order; none if any name is allowed."""
    section: type[BaseModel] | None = Job
    for part in table:
        fields = {} if section is None else _fields(section)
        # In a table of tables, as life.tables, every name goes.
        section = _table_of(fields[part]) if part in fields else section
    return [] if section is None else _names_of(section)


def _names_of(section: type[BaseModel]) -> list[str]:
    if issubclass(section, OptimizerChoice):
        names = (name for optimizer in OPTIMIZERS.values() for name in optimizer.ranges)
        return list(dict.fromkeys(["name", *names]))
    return [*_fields(section), *(FLEET_WORDS if section is StrategySection else ())]


def _below(path: KeyPath, section: type[BaseModel]) -> Iterator[KeyPath]:
    """Yields all keys in a section and its tables, except in tables with free names."""
    fields = {} if issubclass(section, OptimizerChoice) else _fields(section)
    for name in _names_of(section):
        yield (*path, name)
        table = _table_of(fields[name]) if name in fields else None
        if table is not None and get_origin(fields[name].annotation) is not Mapping:
            yield from _below((*path, name), table)


def _fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the type of a table, or of the tables in it; None for other values."""
    kinds = [field.annotation, *get_args(field.annotation)]
    kinds = [get_args(kind)[0] if get_args(kind) else kind for kind in kinds]
    tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return tables[0] if tables else None


def _nearest(name: str, keys: Sequence[KeyPath], cutoff: float) -> list[KeyPath]:
    found = difflib.get_close_matches(name, [key[-1] for key in keys], 1, cutoff=cutoff)
    return [key for key in keys if found and key[-1] == found[0]]
