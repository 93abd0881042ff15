"""`[device]`: where rows train (docs/devices.md)."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ctr_ps.ps_worker.job.sections.section import Section

_WITHOUT_USE = 'but tables are on the servers: set device.tables = "pass", or remove it'


class DeviceSection(Section):
    """Where rows train."""

    tables: Literal["host", "pass"] = "host"
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_gb: float = Field(0.0, ge=0)
    pass_rows: int = Field(0, ge=0)

    @property
    def memory_bytes(self) -> int | None:
        """The limit of memory in bytes; None: not set."""
        return int(self.memory_gb * 2**30) or None

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        if self.tables == "host":
            without_use = self.non_default(*type(self).model_fields)
            self.refuse_without_use(dict.fromkeys(without_use, _WITHOUT_USE))
        return self
