"""`[model]`, `[train]`, `[heter]` and `[cluster]`: sections without checks of their own."""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ctr_model.models.model import Compute


class Section(BaseModel):
    """One section of a job."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )


def require_json(value: Any) -> Any:
    """Returns an option of a model; raises ValueError if a checkpoint's job.json would not give it back."""
    match value:
        case None | bool() | int() | str():
            pass
        case float() if math.isfinite(value):
            pass
        case list() | tuple():
            for each in value:
                require_json(each)
        case dict() if all(isinstance(key, str) for key in value):
            for each in value.values():
                require_json(each)
        case _:
            raise PydanticCustomError(
                "not_json",
                "{value} cannot be saved with the model, expected finite numbers, text, true and false, "
                "lists, and tables whose keys are text",
                {"value": repr(value)},
            )
    return value


class ModelSection(Section):
    """Which model; all keys but `name` are the model's own options, which are saved with it as JSON.

    Attributes:
        name: Of a model of this package, or "my_model.py:MyModel": a class in the user's file.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(require_json)]]

    name: str = "ctr_dnn"

    @property
    def options(self) -> dict[str, Any]:
        """The model's own options."""
        return dict(self.model_extra or {})


class TrainSection(Section):
    """How to go through the data.

    Attributes:
        batch_size: Examples of one step of one thread.
        epochs: Passes over the data.
        thread_num: Training threads of one worker.
        seed: Of the initial values of all parameters, and of the order of files and rows.
        log_every_s: Seconds between lines of progress.
        non_finite: What becomes of a batch whose loss or gradient is infinite or not a number: "fail" ends
            the run, "skip" trains on without it, until more than half of the last 100 were skipped.
        compute: Precision of matrix products in training; predictions are in float32.
    """

    batch_size: int = Field(512, ge=1)
    epochs: int = Field(1, ge=1)
    thread_num: int = Field(1, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    log_every_s: float = Field(5.0, gt=0)
    non_finite: Literal["fail", "skip"] = "fail"
    compute: Compute = "float32"


class HeterSection(Section):
    """Heter trainers, in a job that has some.

    Attributes:
        max_joined: Batches of CPU trainers that one trains on together, unless training is synchronous: then
            a step has one of each.
    """

    max_joined: int = Field(8, ge=1)


class ClusterSection(Section):
    """How long to wait, in seconds, and what to do without a worker.

    Attributes:
        connect_timeout_s: For servers that are not up yet.
        rpc_timeout_s: For an answer to a pull or a push.
        wait_timeout_s: For other workers, at a step or a barrier.
        retry_s: For a server that went away in the middle of the job; None: 120 if the servers keep an update
            log, with which one that is restarted goes on, else 30.
        lease_s: A worker of which a server hears nothing for so long is lost.
        on_worker_loss: "fail": the job ends; "wait": the others wait for a process in its place; "continue":
            they go on without it.
    """

    connect_timeout_s: float = Field(120.0, gt=0)
    rpc_timeout_s: float = Field(60.0, gt=0)
    wait_timeout_s: float = Field(600.0, gt=0)
    retry_s: float | None = Field(None, ge=0)
    lease_s: float = Field(30.0, gt=0, le=86_400)
    on_worker_loss: Literal["fail", "wait", "continue"] = "fail"
