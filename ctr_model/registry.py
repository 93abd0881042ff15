"""Models by name."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ctr_model.models.ctr_dnn import CtrDnn, CtrDnnConfig
from ctr_model.models.model import Model

MODELS = {"ctr_dnn": (CtrDnn, CtrDnnConfig)}


def build_model(name: str, *, num_dense: int, num_slots: int, options: Mapping[str, Any]) -> Model:
    """Returns the model `name` for batches with these columns.

    Args:
        name: A key of `MODELS`.
        num_dense: Dense columns of a batch.
        num_slots: Slots of a batch.
        options: Fields of the model's config.

    Raises:
        ValueError: If name or an option is unknown, naming the nearest known one, or has a wrong value.
    """
    if name not in MODELS:
        raise ValueError(_unknown("model", name, list(MODELS)))
    model, config = MODELS[name]
    sizes = {"num_dense": num_dense, "num_slots": num_slots}
    known = {field.name for field in fields(config)} - sizes.keys()
    for option in options:
        if option not in known:
            raise ValueError(_unknown(f"option of model {name!r}:", option, sorted(known)))
    try:
        values = TypeAdapter(config).validate_python({**options, **sizes})
    except ValidationError as error:
        detail = error.errors()[0]
        option = ".".join(str(part) for part in detail["loc"])
        raise ValueError(
            f"model {name!r}: {option or 'options'} {detail['input']!r}: {detail['msg']}"
        ) from error
    return model(values)


def _unknown(what: str, name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
    return f"unknown {what} {name!r}, did you mean {nearest!r}? known: {', '.join(known)}"
