"""`[strategy]`: the training mode, and a table of settings for each mode that has some (docs/consistency.md).

Tables of other modes than `mode` are checked, but not used, and omitted when the job is written.
"""

from typing import Any, Literal

from pydantic import Field, model_serializer

from ctr_ps.ps_worker.job.sections.section import Section

Mode = Literal["sync", "half_async", "async", "geo", "bounded_staleness"]


class AsyncSettings(Section):
    """`[strategy.async]`: when a worker's gradients are sent, and in which precision.

    The first batches of a fresh model are not merged (docs/consistency.md#the-first-steps).
    """

    max_merge_var_num: int = Field(1, ge=1)
    max_merge_dense_num: int = Field(4, ge=1)
    send_queue_size: int = Field(4, ge=1)
    max_delay_ms: float = Field(100.0, gt=0)
    wire_dtype: Literal["float32", "bfloat16"] = "float32"


class BoundedStalenessSettings(AsyncSettings):
    """`[strategy.bounded_staleness]`: those of `async`, with values of their own, and the bound in steps."""

    max_staleness: int = Field(8, ge=0)


class GeoSettings(Section):
    """`[strategy.geo]`: exchanges of a worker's replica with the servers."""

    k_steps: int = Field(100, ge=1)
    max_replica_mb: int = Field(8192, ge=1)


SETTINGS: dict[Mode, type[Section]] = {
    "async": AsyncSettings,
    "geo": GeoSettings,
    "bounded_staleness": BoundedStalenessSettings,
}
"""The settings of each mode that has some."""


class StrategySection(Section):
    """The training mode, and the settings of modes; the key of `async_` is `async`."""

    mode: Mode = "async"
    async_: AsyncSettings = Field(AsyncSettings(), alias="async")
    geo: GeoSettings = GeoSettings()
    bounded_staleness: BoundedStalenessSettings = BoundedStalenessSettings()

    @property
    def settings(self) -> Section | None:
        """The settings of the current mode, or None."""
        tables: dict[Mode, Section] = {
            "async": self.async_,
            "geo": self.geo,
            "bounded_staleness": self.bounded_staleness,
        }
        return tables.get(self.mode)

    def in_use(self) -> dict[str, Any]:
        """Returns the mode and its settings, by their keys within the section: "geo.k_steps"."""
        settings = {} if self.settings is None else self.settings.model_dump(mode="json")
        return {"mode": self.mode, **{f"{self.mode}.{key}": settings[key] for key in settings}}

    @model_serializer
    def _with_settings_of_mode(self) -> dict[str, Any]:
        if self.settings is None:
            return {"mode": self.mode}
        return {"mode": self.mode, self.mode: self.settings.model_dump()}
