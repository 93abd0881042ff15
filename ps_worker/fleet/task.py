"""A script's model, and the job that trains it."""

from dataclasses import dataclass

from ctr_model.models.model import Model
from ctr_model.models.origin import origin_of
from ctr_model.registry import name_of
from ps_worker.checkpoints.attachments import attachments_of
from ps_worker.job import Job
from ps_worker.job.sections.section import ModelSection
from ps_worker.run.precompile import precompile_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and how to train it.

    Attributes:
        model: What to train.
        job: How; its sections [train], [optimizer], [life], [strategy] and [cluster] count.
    """

    model: Model
    job: Job

    def precompile(self) -> None:
        """Compiles what training runs, for a model that says which columns it was built for."""
        origin = origin_of(self.model)
        if origin is not None:  # a class of the user's own may not say
            precompile_model(self.model, origin.schema, self.job)

    def attachments(self) -> dict[str, bytes]:
        """Returns the files that `ps-worker infer` reads; none for a model that does not know its options."""
        origin, name = origin_of(self.model), name_of(self.model)
        if origin is None or name is None:
            return {}
        section = ModelSection.model_validate({"name": name, **origin.options})
        return attachments_of(self.job.model_copy(update={"model": section}), origin.schema)
