"""What is wrong with a key of a job, as a sentence."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from ps_worker.job.fleet_words import FLEET_WORDS, written_as
from ps_worker.job.job import Job


def explain(detail: ErrorDetails, strategy: Mapping[str, Any]) -> str:
    """Returns what is wrong with which key, and what the job may have meant.

    Args:
        detail: Of the validation of a job.
        strategy: Its `[strategy]` as written, maybe in Fleet's words.
    """
    path = [str(part) for part in detail["loc"]]
    if path[0] == "strategy" and len(path) > 1:
        path[1:] = written_as(strategy, path[1])
    key = ".".join(path)
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            known = [".".join([*path[:-1], name]) for name in _known_keys(path[:-1])]
            return f"unknown key {key!r}{_hint(key, known)}"
        case "literal_error":
            known = re.findall("'([^']+)'", detail["ctx"]["expected"])
            return f"{key} is {value!r}{_hint(str(value), known)} known: {', '.join(known)}"
        case "setting_without_use":
            return f"{key} is {value!r}, {detail['msg']}"
        case _:
            return f"{key} is {value!r}: {detail['msg']}"


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
    return [*known, *FLEET_WORDS] if path == ["strategy"] else known
