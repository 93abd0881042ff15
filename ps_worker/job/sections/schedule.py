"""`[optimizer] schedule`: how a learning rate changes with the steps (docs/optimizers.md#schedules).

A setting that the kind has no use for is an error when a job gives it, and is left out when a job is written.
"""

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from protos.spec import ScheduleSpec
from ps_server.optimizers.schedule import SETTINGS
from ps_worker.job.sections.section import Section

_COMMON = ("kind", "warmup_steps")


class ScheduleSection(Section):
    """The factor of a learning rate at each step, which is a batch of any worker.

    Attributes:
        kind: What follows the warm-up: "constant"; "linear" and "cosine", down to `end_factor`; "step", times
            `gamma` every `step_size` steps.
        warmup_steps: Steps in which the factor grows to 1.
        total_steps: The step from which on the factor is `end_factor`.
        end_factor: Factor in the end.
        step_size: Steps from one multiplication to the next.
        gamma: By what is multiplied.
    """

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup_steps: int = Field(0, ge=0, lt=2**53)
    total_steps: int = Field(0, ge=0, lt=2**53)
    end_factor: float = Field(0.0, ge=0, le=1)
    step_size: int = Field(0, ge=0, lt=2**53)
    gamma: float = Field(0.1, gt=0, le=1)

    def spec(self) -> ScheduleSpec | None:
        """Returns the schedule; None: the learning rate stays as it is."""
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
