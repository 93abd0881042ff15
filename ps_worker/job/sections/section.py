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

from ctr_ps.ctr_model.models.model import Compute


class Section(BaseModel):
    """One section of a job."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )

    def refuse_without_use(self, reasons: Mapping[str, str], *within: str) -> None:
        """Refuses settings without an effect beside the others; `reasons` are "but ...", by name.

        `within` is the path of this section, from the section that is validated.
        """
        # The reason is a value: braces in a template would be placeholders.
        errors = [
            InitErrorDetails(
                type=PydanticCustomError("setting_without_use", "{reason}", {"reason": reason}),
                loc=(*within, name),
                input=getattr(self, name),
            )
            for name, reason in reasons.items()
        ]
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)

    def non_default(self, *names: str) -> list[str]:
        """Returns those of the settings `names` that differ from their default."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].default]


def is_utf8(text: str) -> bool:
    """Whether job.json can hold a text: not a file name in other bytes, or half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_json(value: Any) -> Any:
    """Returns an option of a model; raises ValueError if JSON would not restore it."""
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
    """The model; all keys except `name` are its options, which are saved with it as JSON."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(require_json)]]

    name: str = "ctr_dnn"

    @property
    def options(self) -> dict[str, Any]:
        """The model's own options."""
        return dict(self.model_extra or {})


def _rates(value: Any) -> Any:
    """Returns "data", or a tuple of rates; a single rate becomes a tuple."""
    rates = tuple(value) if isinstance(value, list | tuple) else (value,)
    are_rates = all(isinstance(each, int | float) and 0 < each < 1 for each in rates)
    if value != "data" and not (rates and are_rates):
        raise PydanticCustomError(
            "not_rates", 'expected "data", or one number or several, above 0 and below 1'
        )
    return value if value == "data" else rates


Rates = Annotated[Literal["data"] | tuple[float, ...], BeforeValidator(_rates)]


class TrainSection(Section):
    """How to go through the data."""

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
    """Heter trainers, in a job that has some."""

    max_joined: int = Field(8, ge=1)


class ClusterSection(Section):
    """How long to wait, in seconds, and what to do without a worker."""

    connect_timeout_s: float = Field(120.0, gt=0)
    rpc_timeout_s: float = Field(60.0, gt=0)
    wait_timeout_s: float = Field(600.0, gt=0)
    retry_s: float | None = Field(None, ge=0)
    lease_s: float = Field(30.0, gt=0, le=86_400)
    on_worker_loss: Literal["fail", "wait", "continue"] = "fail"
