"""Reading jobs from TOML files and checkpoints, with overrides `section.key=value`.

A wrong key or value raises JobError.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ctr_ps.protos.errors import JobError
from ctr_ps.protos.runtime.environment import with_home
from ctr_ps.ps_worker.job.faults import explain, hint_for_key
from ctr_ps.ps_worker.job.fleet_words import FleetWordError, aliases_of, translated
from ctr_ps.ps_worker.job.job import Job
from ctr_ps.ps_worker.job.origin import Origin, path_of
from ctr_ps.ps_worker.job.sections.strategy import SETTINGS


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a TOML file; raises JobError if it cannot be read."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read job {path}: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path}: not TOML: {error}") from error
    return _job_of(data, Origin(source=str(path), overrides=tuple(overrides)))


def override_job(data: Mapping[str, Any], overrides: Sequence[str], *, source: str) -> Job:
    """Returns the job of nested mappings; `source` is its name in errors."""
    return _job_of(data, Origin(source=source, overrides=tuple(overrides)))


def saved_job(data: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str) -> Job:
    """Returns the job of a checkpoint or a run, also of an older release."""
    strategy = data.get("strategy")
    if isinstance(strategy, Mapping):
        data = {**data, "strategy": _with_table_of_mode(strategy)}
    return override_job(data, overrides, source=source)


def _with_table_of_mode(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """Moves the mode's settings of a saved `[strategy]` into its table, if they are beside it."""
    kept = dict(strategy)
    for mode, table in SETTINGS.items():
        flat = strategy.keys() & table.model_fields
        if flat and strategy.get("mode") == mode:
            kept[mode] = {key: kept.pop(key) for key in flat}
    return kept


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
    value = _value(text.strip())
    is_section = isinstance(value, Mapping) or (path == ("model",) and isinstance(value, str))
    if not equals or not all(path) or not (len(path) > 1 or is_section):
        is_key = equals and len(path) == 1 and path[0] not in Job.model_fields
        raise JobError(
            f"--set {override}: expected section.key=value, or section={{ key = value }}"
            f"{hint_for_key(path) if is_key else ''}"
        )
    node = tree
    for part in path[:-1]:
        child = node.get(part)
        # `optimizer.sparse = "adam"` is short for `{ name = "adam" }`, and so is `model = "ctr_dnn"`.
        named = {"name": child} if isinstance(child, str) else {}
        node[part] = dict(child) if isinstance(child, Mapping) else named
        node = node[part]
    node[path[-1]] = value


def _value(text: str) -> Any:
    """Returns a TOML value, or the text itself: quotes around words are optional."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text
