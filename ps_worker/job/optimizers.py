"""`[optimizer]`: which optimizer applies gradients to what."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Strict

from protos.spec import OptimizerSpec
from ps_worker.job.sections import Section


class OptimizerChoice(Section):
    """An optimizer by name; all other keys are its hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Strict()]]

    name: str

    def spec(self) -> OptimizerSpec:
        """Returns the spec that servers get."""
        return OptimizerSpec(name=self.name, params=self.__pydantic_extra__)


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
