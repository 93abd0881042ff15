"""`[valid]`: evaluation on `data.valid` while training, what follows from it, and what is measured."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from ps_worker.job.sections.data import Texts
from ps_worker.job.sections.section import Section

Metric = Literal["log_loss", "auc"]


class ValidSection(Section):
    """When the model is validated, and what follows.

    Attributes:
        every_epochs: Epochs from one validation to the next; the last epoch always ends with one. 0: none
            between epochs.
        every_steps: Steps of a worker from one validation to the next within an epoch, at which all workers
            wait; 0: none.
        metric: What tells which of two models is better.
        patience: Training stops after this number of validations in a row that were not better than the best
            one; 0: it does not.
        group_by: Slot, or column of the evaluated files, whose values are the groups of GAUC; empty: no GAUC.
        slices: Slots of whose most frequent values AUC and calibration are told.
        calibration_buckets: Buckets of about equally many examples by ascending prediction, of which the
            predicted and the actual click rate are told; 0: none.
        final_model: What is evaluated on data.test in the end: the model of the last step, or the best one.
    """

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
