"""Messages for invalid keys and values of a job."""

import difflib
import re
from collections.abc import Collection, Sequence

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ps_worker.job.fleet_words import FLEET_WORDS
from ps_worker.job.job import Job
from ps_worker.job.origin import KeyPath, Origin


def explain(detail: ErrorDetails, origin: Origin) -> str:
    """Returns the message for an invalid key: its place, its name, the fault and a hint.

    Args:
        detail: Of the validation of a job.
        origin: Of the job.
    """
    path = origin.as_written([str(part) for part in detail["loc"]])
    is_missing = detail["type"] == "missing"  # what brought the table around it lacks it
    place = origin.places(path[:-1])[-1] if is_missing else origin.of(path)
    return f"{place}: {_fault(detail, path)}{_way_out(detail, origin)}"


def first_named(names: Collection[str], error: Exception) -> str | None:
    """Returns the first of `names` in an error's message, which begins with what is wrong."""
    words = re.findall(r"\w+", str(error))
    return next((word for word in words if word in names), None)


def _fault(detail: ErrorDetails, path: KeyPath) -> str:
    key = ".".join(path)
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            known = [".".join([*path[:-1], name]) for name in _known_keys(path[:-1])]
            return f"unknown key {key!r}{_hint(key, known)}"
        case "literal_error":
            known = re.findall("'([^']+)'", detail["ctx"]["expected"])
            return f"{key} is {value!r}{_hint(str(value), known)} known: {', '.join(known)}"
        case "missing":
            return f"{key} is missing"
        case "model_type" | "dict_type":
            return f"{key} is {value!r}: expected a table of keys, as docs/job.md lists them"
        case "setting_without_use":
            return f"{key} is {value!r}, {detail['msg']}"
        case _:
            return f"{key} is {value!r}: {detail['msg']}"


def _way_out(detail: ErrorDetails, origin: Origin) -> str:
    """Returns how to override the mode of a file that has settings for another."""
    path = [str(part) for part in detail["loc"]]
    is_of_file = origin.is_overridden(["strategy", "mode"]) and not origin.is_overridden(path)
    if detail["type"] != "setting_without_use" or path[0] != "strategy" or not is_of_file:
        return ""
    return f", or replace the section: --set \"strategy={{mode='{detail['ctx']['mode']}'}}\""


def _hint(word: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(word, known, 1, cutoff=0.0)
    return f", did you mean {nearest[0]!r}?" if nearest else ""


def _known_keys(path: Sequence[str]) -> list[str]:
    section: type[BaseModel] = Job
    for part in path:
        annotation = section.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    known = [field.alias or name for name, field in section.model_fields.items()]
    return [*known, *FLEET_WORDS] if tuple(path) == ("strategy",) else known
