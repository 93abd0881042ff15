"""`[checkpoint]`: when and where to save, and what to start from."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ps_worker.job.sections.data import Texts
from ps_worker.job.sections.section import Section

_WHERE = "but there is no folder for checkpoints: set checkpoint.dir"
_FROM = "but there is no model to take them from: set checkpoint.load"
_WHICH = 'but all checkpoints are full: set checkpoint.mode = "delta"'
_OF_SAVES = ("every_epochs", "every_steps", "every_s", "mode", "keep_last", "resume", "overwrite")


class CheckpointSection(Section):
    """When models are saved, where to, and what training starts from.

    Attributes:
        dir: Folder for checkpoints, a path or a URL; empty: nothing is saved.
        every_epochs: Epochs from one checkpoint to the next; the last epoch always ends with one, with 0 it
            alone.
        every_steps: Steps of worker 0 from one checkpoint to the next within an epoch; 0: none.
        every_s: Seconds from one checkpoint to the next within an epoch; 0: none.
        mode: "full": every checkpoint has all rows; "delta": most have only those that changed since the one
            before.
        full_every: In mode "delta" every `full_every`-th checkpoint has all rows, and the first of a run.
        keep_last: Checkpoints of this run that stay, the newest, with those that they need; 0: all.
        resume: Whether to resume from the newest checkpoint of `dir`; without one, a run starts fresh.
        overwrite: Whether a fresh run replaces the checkpoints of an earlier run in `dir`, which are removed
            when it has saved its first; without it such a folder is refused. A run that resumes has no use
            for it.
        load: Checkpoint, or folder of checkpoints, whose model to start from; empty: from what the servers
            hold, which are initial values unless they stayed after another job.
        only: Of `load` only these tables, and `dense` for the dense parameters; others get initial values.
            Empty: all, and all must be there and fit.
    """

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
        """Whether checkpoints are taken in the middle of an epoch."""
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
