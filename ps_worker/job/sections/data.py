"""`[data]`: the files to read, and how."""

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ps_worker.job.sections.section import Section

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
    """The data to read.

    Attributes:
        train: Patterns of files to train on; the workers share them out.
        test: Patterns of files to evaluate on after training; empty: no evaluation.
        valid: Patterns of files to evaluate on while training, as `[valid]` says; empty: no validation.
        schema_source: Path of a schema, or "criteo"; the key is `schema`.
        format: Of the files; empty: the end of a file's name tells.
        bad_row_limit: Malformed rows that a worker skips in a pass over its files, before it stops.
        reader_num: Threads of a worker that read files to train on; with more than 1 the order is free.
        shuffle_files: Whether each epoch goes through a worker's files in another order, by train.seed.
        in_memory: Whether a worker keeps the rows that it trains on in memory.
        shuffle: What is done with rows in memory before each epoch: each worker shuffles its own, or all rows
            are distributed among all workers again.
        pipe_command: A command that reads a file from stdin and prints multi-slot text; empty: none.
        columns: The order of columns in multi-slot text; empty: numbers, slots, label.
        negative_rate: Probability that a row without a click is trained on; the rows that are left out are
            chosen by `train.seed`, the same in each epoch. Test data is evaluated as a whole.
        negative_correction: How predictions stay calibrated where rows are left out: those that stay have the
            weight 1 / negative_rate, or training adds -log(negative_rate) to the logit.
        values: What the values of slots are in multi-slot text: keys, or text that is hashed.
    """

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
        """What training adds to the logit of a click."""
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
