"""`[optimizer]`: which optimizer applies gradients to what."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, Strict

from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_worker.job.sections.schedule import ScheduleSection
from ctr_ps.ps_worker.job.sections.section import Section


class OptimizerChoice(Section):
    """An optimizer by name, and its schedule, by default that of all; other keys are hyper-parameters."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Strict()]]

    name: str
    schedule: ScheduleSection | None = None

    def spec(self, schedule: ScheduleSection | None = None) -> OptimizerSpec:
        """Returns the spec for servers; `schedule` is that of all optimizers."""
        chosen = self.schedule or schedule
        return OptimizerSpec(
            name=self.name,
            params=self.__pydantic_extra__,
            schedule=None if chosen is None else chosen.spec(),
        )


def _choice(default: str | None) -> Any:
    """Reads `"name"`, or a table, whose name is optional if there is a default."""
    named = {} if default is None else {"name": default}

    def read(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {**named, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(read)


class OptimizerSection(Section):
    """The optimizers, each `"name"` or `{ name = "...", learning_rate = ... }`."""

    sparse: Annotated[OptimizerChoice, _choice("adagrad")] = OptimizerChoice(name="adagrad")
    dense: Annotated[OptimizerChoice, _choice("adam")] = OptimizerChoice(name="adam")
    tables: Mapping[str, Annotated[OptimizerChoice, _choice(None)]] = Field(default_factory=dict)
    schedule: ScheduleSection = ScheduleSection()

    def of_table(self, name: str, default: OptimizerSpec | None) -> OptimizerSpec:
        """Returns the optimizer of a table: the job's for it, the model's `default`, the job's for all."""
        if name in self.tables:
            return self.tables[name].spec(self.schedule)
        if default is not None:
            return replace(default, schedule=self.schedule.spec())
        return self.sparse.spec(self.schedule)

    @property
    def has_schedule(self) -> bool:
        """Whether a learning rate changes while a job trains."""
        choices = (self.sparse, self.dense, *self.tables.values())
        return any(each.spec(self.schedule).schedule is not None for each in choices)

    def of_dense(self) -> OptimizerSpec:
        """Returns the optimizer of the dense parameters."""
        return self.dense.spec(self.schedule)

    def key_of_table(self, name: str, default: OptimizerSpec | None) -> str:
        """Returns the job's key as read by `of_table`, or the key that overrides the model."""
        is_of_all = name not in self.tables and default is None
        return "optimizer.sparse" if is_of_all else f"optimizer.tables.{name}"
