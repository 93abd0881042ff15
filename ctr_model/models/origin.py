"""Constructor arguments of models, with which a model of a script is saved as name and options."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.schema import Schema

ModelClass = TypeVar("ModelClass", bound=type[Any])


@dataclass(frozen=True, slots=True)
class Origin:
    """Constructor arguments of a model."""

    schema: Schema
    options: Mapping[str, Any]


def keeps_origin(model_class: ModelClass) -> ModelClass:
    """Makes instances of a class, not of its subclasses, keep their constructor arguments."""
    init = model_class.__init__

    @functools.wraps(init)
    def keeping_init(self: Any, schema: Schema, **options: Any) -> None:
        if type(self) is model_class:
            self._origin = Origin(schema, options)
        init(self, schema, **options)

    model_class.__init__ = keeping_init
    return model_class


def origin_of(model: Model) -> Origin | None:
    """Returns the constructor arguments of a model; None if its class does not keep them."""
    return getattr(model, "_origin", None)
