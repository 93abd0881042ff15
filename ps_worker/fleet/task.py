"""A script's model, and the job that trains it."""

import logging
from dataclasses import dataclass
from typing import Any

from ctr_model.models.model import Model
from ctr_model.models.origin import origin_of
from ctr_model.registry import name_of
from protos.errors import UsageError
from ps_worker.checkpoints.attachments import attachments_of
from ps_worker.job import Job
from ps_worker.job.sections.section import ModelSection, require_json
from ps_worker.run.precompile import precompile_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and how to train it.

    Attributes:
        model: What to train.
        job: How; its sections [train], [optimizer], [life], [strategy] and [cluster] count.
    """

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
        for option, value in origin.options.items():
            _require_saveable(name, option, value)
        section = ModelSection.model_validate({"name": name, **origin.options})
        return attachments_of(self.job.model_copy(update={"model": section}), origin.schema)


def _require_saveable(model: str, option: str, value: Any) -> None:
    """Raises UsageError for an option that a job file could not have: `ps-worker infer` reads one."""
    if option == "name":
        raise UsageError(
            f"model {model}: an option cannot be called 'name', which [model] has itself"
        )
    try:
        require_json(value)
    except ValueError as error:
        raise UsageError(f"model {model}: option {option}: {error}") from error
