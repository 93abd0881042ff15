"""`[checkpoint]`: when and where to save, and what to start from."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ctr_ps.ps_worker.job.sections.data import Texts
from ctr_ps.ps_worker.job.sections.section import Section

_WHERE = "but there is no folder for checkpoints: set checkpoint.dir"
_FROM = "but there is no model to take them from: set checkpoint.load"
_WHICH = 'but all checkpoints are full: set checkpoint.mode = "delta"'
_OF_SAVES = ("every_epochs", "every_steps", "every_s", "mode", "keep_last", "resume", "overwrite")


class CheckpointSection(Section):
    """When and where models are saved, and what training starts from."""

    dir: str = ""
    every_epochs: int = Field(1, ge=0)
    every_steps: int = Field(0, ge=0)
    every_s: float = Field(0.0, ge=0)
    mode: Literal["full", "delta"] = "full"
    full_every: int = Field(10, ge=1)
    keep_last: int = Field(0, ge=0)
    resume: bool = False
    overwrite: bool = False
    load: str = ""
    only: Texts = ()

    @property
    def is_within_epochs(self) -> bool:
        """Whether checkpoints are saved within an epoch."""
        return bool(self.every_steps or self.every_s)

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        reasons = {} if self.dir else dict.fromkeys(self.non_default(*_OF_SAVES), _WHERE)
        if self.only and not self.load:
            reasons["only"] = _FROM
        if self.mode == "full" and self.non_default("full_every"):
            reasons["full_every"] = _WHICH
        self.refuse_without_use(reasons)
        return self
