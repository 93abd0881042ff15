"""`[optimizer]`: which optimizer applies gradients to what, and its learning rate by step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    Strict,
    model_serializer,
    model_validator,
)

from ctr_ps.protos.spec import OptimizerSpec, ScheduleSpec
from ctr_ps.ps_server.optimizers.registry import SETTINGS
from ctr_ps.ps_worker.job.sections import Section

_COMMON = ("kind", "warmup_steps")


class ScheduleSection(Section):
    """The factor of a learning rate at each step, which is a batch of any worker.

    A setting without use in the kind is an error in a job as read, and is omitted from a job as written.
    """

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup_steps: int = Field(0, ge=0, lt=2**53)
    total_steps: int = Field(0, ge=0, lt=2**53)
    end_factor: float = Field(0.0, ge=0, le=1)
    step_size: int = Field(0, ge=0, lt=2**53)
    gamma: float = Field(0.1, gt=0, le=1)

    def spec(self) -> ScheduleSpec | None:
        """Returns the schedule; None: the learning rate is constant."""
        if self.kind == "constant" and not self.warmup_steps:
            return None
        return ScheduleSpec(**self.model_dump())

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        without_use = self.model_fields_set.difference(_COMMON, SETTINGS[self.kind])
        self.refuse_without_use({name: self._way_out(name) for name in sorted(without_use)})
        return self

    def _way_out(self, name: str) -> str:
        kinds = " or ".join(f'"{kind}"' for kind, settings in SETTINGS.items() if name in settings)
        return f'but kind is "{self.kind}", which does not use it: set kind = {kinds}, or remove {name}'

    @model_serializer(mode="wrap")
    def _with_settings_of_kind(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        kept = {*_COMMON, *SETTINGS[self.kind]}
        return {name: value for name, value in dump(self).items() if name in kept}


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
