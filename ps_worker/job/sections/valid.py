"""`[valid]`: evaluation on `data.valid` while training, its consequences, and its metrics."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from ctr_ps.ps_worker.job.sections.data import Texts
from ctr_ps.ps_worker.job.sections.section import Section

Metric = Literal["log_loss", "auc"]


class ValidSection(Section):
    """When the model is validated, and what follows."""

    every_epochs: int = Field(1, ge=0)
    every_steps: int = Field(0, ge=0)
    metric: Metric = "log_loss"
    patience: int = Field(0, ge=0)
    group_by: str = ""
    slices: Texts = ()
    calibration_buckets: int = Field(10, ge=0)
    final_model: Literal["last", "best"] = "last"

    def settings(self) -> Iterator[str]:
        """Yields the names of the keys that are not at their defaults and need `data.valid`."""
        for name, field in type(self).model_fields.items():
            # These are of data.test, too.
            if name in ("group_by", "slices", "calibration_buckets"):
                continue
            if getattr(self, name) != field.get_default(call_default_factory=True):
                yield name
