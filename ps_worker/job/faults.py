"""Messages for invalid keys and values of a job."""

import difflib
import re
from collections.abc import Collection, Sequence

from pydantic_core import ErrorDetails

from ps_worker.job.known_keys import meant_keys, names_in
from ps_worker.job.origin import KeyPath, Origin


def explain(detail: ErrorDetails, origin: Origin) -> str:
    """Returns the message for an invalid key: its place, its name, the fault and a hint."""
    path = origin.as_written([str(part) for part in detail["loc"]])
    is_missing = detail["type"] == "missing"  # what brought the table around it lacks it
    place = origin.places(path[:-1])[-1] if is_missing else origin.of(path)
    return f"{place}: {_fault(detail, path)}"


def first_named(names: Collection[str], error: Exception) -> str | None:
    """Returns the first of `names` in an error's message, which begins with what is wrong."""
    words = re.findall(r"\w+", str(error))
    return next((word for word in words if word in names), None)


def _fault(detail: ErrorDetails, path: KeyPath) -> str:
    key = ".".join(path)
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}{did_you_mean(path)}"
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


def did_you_mean(path: KeyPath) -> str:
    """Returns the end of a sentence about an unknown key: similar keys, or all that exist."""
    if meant := meant_keys(path):
        return f", did you mean {' or '.join(map(repr, meant))}?"
    names = names_in(path[:-1])
    where = f"[{'.'.join(path[:-1])}] has" if len(path) > 1 else "a job has the sections"
    return f": {where} {', '.join(names)}" if names else ""


def _hint(word: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(word, known, 1, cutoff=0.0)
    return f", did you mean {nearest[0]!r}?" if nearest else ""
