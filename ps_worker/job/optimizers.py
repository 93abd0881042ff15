"""`[optimizer]`: which optimizer applies gradients to what."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, model_validator

from protos.spec import OptimizerSpec
from ps_worker.job.sections import Section


class OptimizerChoice(Section):
    """An optimizer by name; all other keys are its hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @model_validator(mode="after")
    def _require_numbers(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {value!r}, expected a number")
        return self

    def spec(self) -> OptimizerSpec:
        """Returns the spec that servers get."""
        params = {name: float(value) for name, value in (self.model_extra or {}).items()}
        return OptimizerSpec(name=self.name, params=params)


def _choice(default: str) -> Any:
    """Reads `"name"`, or a table whose name may be left out."""

    def read(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(read)


class OptimizerSection(Section):
    """The optimizers, each `"name"` or `{ name = "...", learning_rate = ... }`.

    Attributes:
        sparse: Of the rows of tables.
        dense: Of the dense parameters.
    """

    sparse: Annotated[OptimizerChoice, _choice("adagrad")] = OptimizerChoice(name="adagrad")
    dense: Annotated[OptimizerChoice, _choice("adam")] = OptimizerChoice(name="adam")
