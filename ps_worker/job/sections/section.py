"""`[model]`, `[train]`, `[heter]` and `[cluster]`: sections without checks of their own."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ctr_model.models.model import Compute


class Section(BaseModel):
    """One section of a job."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )

    def refuse_without_use(self, reasons: Mapping[str, str]) -> None:
        """Refuses settings that change nothing beside the others.

        Args:
            reasons: By the setting's name: "but ...", and what to do. Empty: nothing is refused.

        Raises:
            ValidationError: With an error for each setting.
        """
        if reasons:
            errors = [self._without_use(name, reason) for name, reason in reasons.items()]
            raise ValidationError.from_exception_data(type(self).__name__, errors)

    def non_default(self, *names: str) -> list[str]:
        """Returns which of the settings `names` differ from their default."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]

    def _without_use(self, name: str, reason: str) -> InitErrorDetails:
        # The reason is a value: braces in a template would be placeholders.
        error = PydanticCustomError("setting_without_use", "{reason}", {"reason": reason})
        return InitErrorDetails(type=error, loc=(name,), input=getattr(self, name))


def is_utf8(text: str) -> bool:
    """Returns whether a text has a place in job.json: no file name that is not UTF-8, no half of a pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_json(value: Any) -> Any:
    """Returns an option of a model; raises ValueError if a checkpoint's job.json would not give it back."""
    match value:
        case None | bool() | int():
            pass
        case str() if is_utf8(value):
            pass
        case float() if math.isfinite(value):
            pass
        case list() | tuple():
            for each in value:
                require_json(each)
        case dict() if all(isinstance(key, str) and is_utf8(key) for key in value):
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


def _rates(value: Any) -> Any:
    """Returns "data", or a tuple of rates; one rate may stand for a tuple of it."""
    rates = tuple(value) if isinstance(value, list | tuple) else (value,)
    if value != "data" and not (rates and all(map(_is_rate, rates))):
        raise PydanticCustomError(
            "not_rates", 'expected "data", or one number or several, above 0 and below 1'
        )
    return value if value == "data" else rates


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < 1


Rates = Annotated[Literal["data"] | tuple[float, ...], BeforeValidator(_rates)]


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
        clip_norm: Largest norm of a batch's mean gradient, of rows and dense parameters together, to which a
            larger one is scaled down; 0: any.
        dropout: Probability of each output of a hidden layer to be left out of a batch's training.
        weight_decay: Weight decay of all optimizers that take one and give none of their own.
        base_rate: Click rate that a fresh model predicts, of a model of several tasks one of each: the biases
            of its logits start there. "data": that of the first rows to train on.
    """

    batch_size: int = Field(128, ge=1)
    epochs: int = Field(1, ge=1)
    thread_num: int = Field(1, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    log_every_s: float = Field(5.0, gt=0)
    non_finite: Literal["fail", "skip"] = "fail"
    compute: Compute = "float32"
    clip_norm: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    base_rate: Rates = "data"


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
