"""The sections of a job, each checked by itself; docs/job.md has the meaning of all keys.

`[life]`, `[optimizer]` and `[strategy]` have modules of their own.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from ctr_ps.ctr_model.layers.delayed_labels import Delay
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


_OF_MULTISLOT = (
    'but files are not multi-slot text: set data.format = "multislot", or data.pipe_command'
)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _without_empty(texts: tuple[str, ...]) -> tuple[str, ...]:
    if "" in texts:
        raise PydanticCustomError("empty_text", "an empty text is not a name; for none, write []")
    return texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_without_empty)]


class DataSection(Section):
    """The data to read; the key of `schema_source` is `schema`."""

    train: Texts = ()
    stream: str = ""
    pass_every: str = "10 min"
    test: Texts = ()
    valid: Texts = ()
    schema_source: str = Field("criteo", alias="schema")
    format: str = ""
    bad_row_limit: int = Field(100, ge=0)
    deal: Literal["fixed", "queue"] = "fixed"
    reader_num: int = Field(1, ge=1)
    shuffle_files: bool = False
    in_memory: bool = False
    shuffle: Literal["none", "local", "global"] = "none"
    pipe_command: str = ""
    columns: Texts = ()
    values: Literal["keys", "text"] = "keys"
    negative_rate: float = Field(1.0, gt=0, le=1)
    negative_correction: Literal["weight", "logit"] = "logit"

    @property
    def has_order(self) -> bool:
        """Whether a run can resume in the middle of an epoch."""
        return self.reader_num == 1 or self.in_memory

    @property
    def logit_offset(self) -> float:
        """Addend to the logit of a click in training."""
        return -math.log(self.negative_rate) if self.negative_correction == "logit" else 0.0

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        is_multislot = bool(self.pipe_command) or self.format == "multislot"
        faults = {}
        if self.shuffle != "none" and not self.in_memory:
            faults["shuffle"] = (
                "but rows are not in memory: set data.in_memory = true, or data.shuffle_files"
            )
        if self.in_memory and self.shuffle_files:
            faults["shuffle_files"] = 'but rows are in memory: set data.shuffle = "local"'
        if self.pipe_command and self.format:
            faults["format"] = "but data.pipe_command prints multi-slot text: remove one of them"
        if self.columns and not is_multislot and not (self.stream and self.format == "csv"):
            faults["columns"] = _OF_MULTISLOT
        if self.negative_correction != "logit" and self.negative_rate == 1:
            faults["negative_correction"] = (
                "but no rows are left out of training: set data.negative_rate"
            )
        if self.values != "keys" and not is_multislot:
            faults["values"] = _OF_MULTISLOT
        if self.stream and not self.train:
            for name in self.non_default("in_memory", "shuffle", "shuffle_files", "reader_num"):
                faults[name] = "but there are no files to read: a stream has an order of its own"
        if self.deal == "queue" and (not self.train or self.stream):
            faults["deal"] = (
                "but only files are dealt by a queue: set data.train, and no data.stream"
            )
        elif self.deal == "queue" and (self.in_memory or self.reader_num > 1):
            faults["deal"] = (
                "but files of a queue are streamed in order: set data.in_memory = false, data.reader_num = 1"
            )
        if self.stream and self.pipe_command:
            faults["pipe_command"] = "but data.stream has messages, which no command reads"
        if not self.stream and self.non_default("pass_every"):
            faults["pass_every"] = "but passes over files are epochs: set data.stream"
        self.refuse_without_use(faults)
        return self


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


def _row_dtype(value: Any) -> Any:
    dtypes = list(value.values()) if isinstance(value, Mapping) else [value]
    if not all(each in get_args(Compute) for each in dtypes):
        raise PydanticCustomError(
            "not_row_dtype",
            'expected "float32" or "bfloat16", or one of them for single tables, as in '
            '{ embedding = "bfloat16" }',
        )
    return value


RowDtype = Annotated[str | Mapping[str, str], BeforeValidator(_row_dtype)]


class TrainSection(Section):
    """How to go through the data."""

    batch_size: int = Field(128, ge=1)
    epochs: int = Field(1, ge=1)
    thread_num: int = Field(1, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    log_every_s: float = Field(5.0, gt=0)
    non_finite: Literal["fail", "skip"] = "fail"
    compute: Compute = "float32"
    row_dtype: RowDtype = "float32"
    clip_norm: float = Field(0.0, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    base_rate: Rates = "data"
    delay: Delay = "none"

    def has_bfloat16_rows(self, table: str) -> bool:
        """Whether servers keep a table's weights as bfloat16."""
        dtype = self.row_dtype
        return (dtype if isinstance(dtype, str) else dtype.get(table)) == "bfloat16"


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

    def settings(self) -> list[str]:
        """Returns the names of the keys that are not at their defaults and need `data.valid`."""
        of_test_too = ("group_by", "slices", "calibration_buckets")
        return self.non_default(
            *(each for each in type(self).model_fields if each not in of_test_too)
        )


_ON_THE_CPU = 'but the device is the CPU: set device.kind = "cuda", or remove it'
_ON_SERVERS = 'but tables are on the servers: set device.tables = "pass", or remove it'


class DeviceSection(Section):
    """Where rows train."""

    tables: Literal["host", "pass"] = "host"
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_gb: float = Field(0.0, ge=0)
    pass_rows: int = Field(0, ge=0)
    cuda_graph: bool = False

    @property
    def memory_bytes(self) -> int | None:
        """The limit of memory in bytes; None: not set."""
        return int(self.memory_gb * 2**30) or None

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        if self.tables == "host":
            without_use = self.non_default(*type(self).model_fields)
            self.refuse_without_use(dict.fromkeys(without_use, _ON_SERVERS))
        elif self.kind == "cpu" and self.cuda_graph:
            self.refuse_without_use({"cuda_graph": _ON_THE_CPU})
        return self


_WHERE = "but there is no folder for checkpoints: set checkpoint.dir"
_FROM = "but no model is loaded: set checkpoint.load"
_WHICH = 'but all checkpoints are full: set checkpoint.mode = "delta"'
_OF_SAVES = ("every_epochs", "every_steps", "every_s", "mode", "keep_last", "resume", "overwrite")


class CheckpointSection(Section):
    """When and where models are saved, and what training starts from."""

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
        """Whether checkpoints are saved within an epoch."""
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


class PublishSection(Section):
    """What a pass has to be for readers to take its checkpoint; without limits they take each."""

    max_log_loss: float = Field(0.0, ge=0)
    max_ne: float = Field(0.0, ge=0)
    margin: float = Field(0.0, ge=0)
    sample_rows: int = Field(20_000, ge=0)
    notify: str = ""

    @property
    def is_gated(self) -> bool:
        """Whether there is a limit."""
        return bool(self.max_log_loss or self.max_ne or self.margin)


class RunSection(Section):
    """The record of a run."""

    dir: str = ""
    overwrite: bool = False

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        if self.overwrite and not self.dir:
            self.refuse_without_use({"overwrite": "but nothing is written: set run.dir"})
        if "://" in self.dir:
            self.refuse_without_use({"dir": "but lines are appended to a local file: name a path"})
        return self


class HeterSection(Section):
    """Heter trainers, in a job that has some."""

    max_joined: int = Field(8, ge=1)


class ClusterSection(Section):
    """How long to wait, in seconds, and what to do without a worker."""

    connect_timeout_s: float = Field(120.0, gt=0)
    rpc_timeout_s: float = Field(60.0, gt=0)
    wait_timeout_s: float = Field(600.0, gt=0)
    retry_s: float | None = Field(None, ge=0)
    stream: bool = True
    lease_s: float = Field(30.0, gt=0, le=86_400)
    on_worker_loss: Literal["fail", "wait", "continue"] = "fail"
