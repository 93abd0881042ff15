"""`[device]`: where rows train (docs/devices.md)."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ps_worker.job.sections.section import Section

_WITHOUT_USE = 'but tables are on the servers: set device.tables = "pass", or remove it'


class DeviceSection(Section):
    """Where rows train.

    Attributes:
        tables: "host": servers apply gradients to them; "pass": those of a pass train on a device of the
            only worker, and go back to the servers with its end.
        kind: The device of passes.
        memory_gb: Memory of the device for tables and dense parameters, in GiB; 0: four fifths of what is
            free on a GPU, and without a limit on the CPU.
        pass_rows: Rows of data that make up a pass, at most; 0: those of an epoch.
    """

    tables: Literal["host", "pass"] = "host"
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_gb: float = Field(0.0, ge=0)
    pass_rows: int = Field(0, ge=0)

    @property
    def memory_bytes(self) -> int | None:
        """The limit of memory in bytes; None: none was set."""
        return int(self.memory_gb * 2**30) or None

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        if self.tables == "host":
            without_use = self.non_default(*type(self).model_fields)
            self.refuse_without_use(dict.fromkeys(without_use, _WITHOUT_USE))
        return self
