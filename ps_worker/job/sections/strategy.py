"""`[strategy]`: the training mode and its settings (docs/consistency.md).

A setting that the mode has no use for is an error when a job gives it, and is left
out when a job is written.
"""

from typing import Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ps_worker.job.sections.section import Section

Mode = Literal["sync", "half_async", "async", "geo", "bounded_staleness"]

_SENDING = frozenset(
    {
        "max_merge_var_num",
        "max_merge_dense_num",
        "send_queue_size",
        "max_delay_ms",
    }
)

SETTINGS: dict[str, frozenset[str]] = {
    "sync": frozenset(),
    "half_async": frozenset(),
    "async": _SENDING,
    "geo": frozenset({"k_steps", "max_replica_mb"}),
    "bounded_staleness": _SENDING | {"max_staleness"},
}
"""The settings that each mode has a use for."""


class StrategySection(Section):
    """The training mode and its settings.

    Attributes:
        mode: "sync": all workers step together; "half_async": the threads of each worker do; "async": each
            worker by itself; "geo": on a replica of its own, exchanged from time to time;
            "bounded_staleness": async, with a bound on how far a worker gets ahead.
        max_merge_var_num: Async: batches whose sparse gradients are averaged before they are sent.
        max_merge_dense_num: Async: the same for dense gradients.
        send_queue_size: Async: batches that may wait to be sent before training waits.
        max_delay_ms: Async: no gradient waits longer for others to be merged with.
        k_steps: Geo: batches of a worker between two exchanges.
        max_replica_mb: Geo: memory that a worker's replica may take before the job ends with an error.
        max_staleness: Bounded staleness: steps that a worker may be ahead of the slowest.
    """

    mode: Mode = "async"
    max_merge_var_num: int = Field(1, ge=1)
    max_merge_dense_num: int = Field(4, ge=1)
    send_queue_size: int = Field(4, ge=1)
    max_delay_ms: float = Field(100.0, gt=0)
    k_steps: int = Field(100, ge=1)
    max_replica_mb: int = Field(8192, ge=1)
    max_staleness: int = Field(8, ge=0)

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        without_use = self.model_fields_set - SETTINGS[self.mode] - {"mode"}
        if without_use:
            raise ValidationError.from_exception_data(
                "strategy", [self._without_use(name) for name in sorted(without_use)]
            )
        return self

    def _without_use(self, name: str) -> InitErrorDetails:
        modes = " or ".join(f'"{mode}"' for mode, settings in SETTINGS.items() if name in settings)
        message = f'but mode is "{self.mode}": set strategy.mode = {modes}, or remove {name}'
        # The message is a value: braces in a template would be placeholders.
        error = PydanticCustomError(
            "setting_without_use", "{message}", {"message": message, "mode": self.mode}
        )
        return InitErrorDetails(type=error, loc=(name,), input=getattr(self, name))

    @model_serializer(mode="wrap")
    def _with_settings_of_mode(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        kept = SETTINGS[self.mode] | {"mode"}
        return {name: value for name, value in dump(self).items() if name in kept}
