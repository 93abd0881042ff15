"""`[data]`: the files to read, and how."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ctr_ps.ps_worker.job.sections.section import Section

_OF_MULTISLOT = (
    'but files are not multi-slot text: set data.format = "multislot", or data.pipe_command'
)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _without_empty(texts: tuple[str, ...]) -> tuple[str, ...]:
    if "" in texts:
        raise PydanticCustomError("empty_text", "an empty text names nothing; write [] for none")
    return texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_without_empty)]


class DataSection(Section):
    """The data to read; the key of `schema_source` is `schema`."""

    train: Texts = ()
    test: Texts = ()
    valid: Texts = ()
    schema_source: str = Field("criteo", alias="schema")
    format: str = ""
    bad_row_limit: int = Field(100, ge=0)
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
        if self.columns and not is_multislot:
            faults["columns"] = _OF_MULTISLOT
        if self.negative_correction != "logit" and self.negative_rate == 1:
            faults["negative_correction"] = "but all rows are trained on: set data.negative_rate"
        if self.values != "keys" and not is_multislot:
            faults["values"] = _OF_MULTISLOT
        self.refuse_without_use(faults)
        return self
