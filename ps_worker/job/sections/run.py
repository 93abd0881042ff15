"""`[run]`: the record of a run."""

from typing import Self

from pydantic import model_validator

from ctr_ps.ps_worker.job.sections.section import Section

_WHERE = "but nothing is written: set run.dir"


class RunSection(Section):
    """The record of a run."""

    dir: str = ""
    overwrite: bool = False

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        if not self.dir:
            self.refuse_without_use(dict.fromkeys(self.non_default("overwrite"), _WHERE))
        if "://" in self.dir:
            self.refuse_without_use({"dir": "but lines are appended to a local file: name a path"})
        return self
