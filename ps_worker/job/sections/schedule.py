"""`[optimizer] schedule`: the learning rate by step (docs/optimizers.md#schedules).

A setting without use in the kind is an error in a job as read, and is omitted from a job as written.
"""

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ctr_ps.protos.spec import ScheduleSpec
from ctr_ps.ps_server.optimizers.registry import SETTINGS
from ctr_ps.ps_worker.job.sections.section import Section

_COMMON = ("kind", "warmup_steps")


class ScheduleSection(Section):
    """The factor of a learning rate at each step, which is a batch of any worker."""

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
        return f'but kind is "{self.kind}": set kind = {kinds}, or remove {name}'

    @model_serializer(mode="wrap")
    def _with_settings_of_kind(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        kept = {*_COMMON, *SETTINGS[self.kind]}
        return {name: value for name, value in dump(self).items() if name in kept}
