"""Jobs from TOML files and overrides; what is wrong is told by file and key."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from protos.errors import JobError
from ps_worker.job.job import Job


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Returns the job of a TOML file with overrides of the form `section.key=value`.

    Raises:
        JobError: If the file cannot be read or is not TOML, or a key or value is wrong.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"cannot read job {path}: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"{path} is not TOML: {error}") from error
    return override_job(data, overrides, source=str(path))


def override_job(data: Mapping[str, Any], overrides: Sequence[str], *, source: str) -> Job:
    """Returns the job of nested mappings with overrides; `source` is named in errors."""
    tree = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()
    }
    for override in overrides:
        _set(tree, override)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise JobError("; ".join(_explain(source, detail) for detail in error.errors())) from error


def _set(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise JobError(f"--set {override!r}: expected section.key=value")
    node = tree
    for part in path[:-1]:
        child = node.get(part)
        # `optimizer.sparse = "adam"` is short for `{ name = "adam" }`.
        node[part] = dict(child) if isinstance(child, Mapping) else _named(child)
        node = node[part]
    node[path[-1]] = _value(text.strip())


def _named(value: object) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else {}


def _value(text: str) -> Any:
    """Returns the TOML value that `text` is, or the text itself: quotes around words are optional."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _explain(source: str, detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        nearest = difflib.get_close_matches(location[-1], known, 1, cutoff=0.0)
        hint = f", did you mean {'.'.join([*location[:-1], nearest[0]])!r}?" if nearest else ""
        return f"{source}: unknown key {key!r}{hint}"
    return f"{source}: {key} is {detail['input']!r}: {detail['msg']}"


def _known_keys(path: list[str]) -> list[str]:
    section: type[BaseModel] = Job
    for part in path:
        annotation = section.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return [field.alias or name for name, field in section.model_fields.items()]
