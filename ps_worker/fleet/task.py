"""A script's model, and the job that trains it."""

import logging
from dataclasses import dataclass

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.models.origin import origin_of
from ctr_ps.ps_worker.checkpoints.attachments import attachments_of_model
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.precompile import precompile_script

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model to train, by the sections [train], [optimizer], [life], [strategy] and [cluster] of a job."""

    model: Model
    job: Job

    def __post_init__(self) -> None:
        """Raises UsageError for a model that could not be saved: now, not after hours of training."""
        if not self.attachments():
            logger.warning(
                "checkpoints will have parameters alone, which `ps-worker infer` cannot use: the class %s is "
                "not one of this package, nor a module of PyTorch in a file that can be imported",
                getattr(self.model, "module_class", type(self.model)).__qualname__,
            )

    def precompile(self, *, is_in_process: bool) -> None:
        """Compiles what training runs, for a model that says which columns it was built for."""
        origin = origin_of(self.model)
        if origin is not None:  # a class of the user's own may not say
            precompile_script(
                self.model,
                origin.schema,
                self.job,
                is_in_process=is_in_process,
                new_pass_trainer=new_pass_trainer,
            )

    def attachments(self, values: SlotValues | None = None) -> dict[str, bytes]:
        """Returns the files that `ps-worker infer` reads; none for a model that does not know its options."""
        return attachments_of_model(self.model, self.job, values)
