"""A whole job: all its sections, checked, and the place where each key was written."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job.life import LifeSection
from ctr_ps.ps_worker.job.optimizers import OptimizerSection
from ctr_ps.ps_worker.job.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    DeviceSection,
    HeterSection,
    ModelSection,
    PublishSection,
    RunSection,
    Section,
    TrainSection,
    ValidSection,
    is_utf8,
)
from ctr_ps.ps_worker.job.strategy import StrategySection

KeyPath = tuple[str, ...]
"""A key from the top on; the elements of an array have their index as key: ("data", "train", "0")."""


KEPT_OF_STREAM = 5
"""Checkpoints that are kept beside the bases of deltas, if the job trains on a stream and says no number."""


def path_of(override: str) -> KeyPath:
    """Returns the key that `section.key=value` sets."""
    return tuple(override.partition("=")[0].strip().split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The texts that a job was read from. All are equal: a job is its values, wherever they were written."""

    source: str = field(default="job", compare=False)  # path of the file, or another name
    overrides: tuple[str, ...] = field(default=(), compare=False)  # `section.key=value`, in order
    # Keys as written under another name, by their name in the job.
    aliases: Mapping[KeyPath, KeyPath] = field(default_factory=dict, compare=False)
    words: Callable[[str], str] = field(
        default=str, compare=False
    )  # a message as its readers say it

    def as_written(self, key: Sequence[str]) -> KeyPath:
        """Returns the key under the name with which it was written."""
        return self.aliases.get(tuple(key), tuple(key))

    def of(self, key: Sequence[str]) -> str:
        """Returns all places of a key, for messages."""
        return ", ".join(self.places(key))

    def places(self, key: Sequence[str]) -> list[str]:
        """Returns where a key was written: the source, `--set section.key=value`, or both.

        Both, where overrides changed a part of the value.
        """
        path = self.as_written(key)
        places = [self.source]
        for text in self.overrides:
            if _is_within(path, path_of(text)):
                places = [f"--set {text}"]  # it replaced the value before
            elif _is_within(path_of(text), path):
                places.append(f"--set {text}")
        return places


def _is_within(path: KeyPath, table: KeyPath) -> bool:
    return path[: len(table)] == table


def _model_of_name(value: object) -> object:
    """Reads `model = "name"` as `[model] name = "name"`."""
    return {"name": value} if isinstance(value, str) else value


def _texts(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key, path)
            yield from _texts(each, (*path, key))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, path)


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


class Job(Section):
    """A whole job. It knows its origin, for errors; that is no part of its data."""

    model: Annotated[ModelSection, BeforeValidator(_model_of_name)] = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    valid: ValidSection = ValidSection()
    optimizer: OptimizerSection = OptimizerSection()
    life: LifeSection = LifeSection()
    strategy: StrategySection = StrategySection()
    device: DeviceSection = DeviceSection()
    checkpoint: CheckpointSection = CheckpointSection()
    publish: PublishSection = PublishSection()
    run: RunSection = RunSection()
    heter: HeterSection = HeterSection()
    cluster: ClusterSection = ClusterSection()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def model_post_init(self, context: Any, /) -> None:
        """Keeps the origin, which is the context of validation."""
        if isinstance(context, Origin):
            self._origin = context

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_utf8(cls, data: object) -> object:
        error = PydanticCustomError("not_utf8", "expected text that can be written as UTF-8")
        faults = [
            InitErrorDetails(type=error, loc=path, input=text)
            for path, text in _texts(data)
            if not is_utf8(text)
        ]
        if faults:
            raise ValidationError.from_exception_data("job", faults)
        return data

    @model_validator(mode="before")
    @classmethod
    def _keep_few_checkpoints_of_a_stream(cls, data: object) -> object:
        # Checkpoints of a stream, which has no end, would fill any disk.
        match data:
            case {"data": {"stream": str(stream)}, "checkpoint": {"dir": str(folder)} as given}:
                if stream and folder and isinstance(data, Mapping):
                    return {**data, "checkpoint": {"keep_last": KEPT_OF_STREAM, **given}}
        return data

    @model_validator(mode="after")
    def _refuse_validation_without_use(self) -> Self:
        faults = {}
        if not self.data.valid:
            why = "but there are no rows to validate on: set data.valid"
            faults = dict.fromkeys(self.valid.settings(), why)
        elif not self.valid.every_epochs and not self.valid.every_steps:
            faults["every_epochs"] = (
                "but valid.every_steps is also 0, so data.valid is never used: set one of them, or remove "
                "data.valid"
            )
        elif self.valid.final_model == "best" and not self.checkpoint.dir:
            faults["final_model"] = "but no checkpoints are saved: set checkpoint.dir"
        if self.data.stream and self.strategy.mode == "bounded_staleness":
            reason = "but a worker without messages would hold back all others: use another mode"
            self.strategy.refuse_without_use({"mode": reason}, "strategy")
        if self.data.stream and self.valid.every_steps:
            faults["every_steps"] = "but a stream is validated between passes: set data.pass_every"
        if self.publish.is_gated and self.valid.final_model == "best":
            faults["final_model"] = "but [publish] says what is published: leave it at 'last'"
        self.valid.refuse_without_use(faults, "valid")
        gate, has_places = self.publish, self.data.stream and self.checkpoint.dir
        needed = {
            "a gate needs a stream, checkpoints and a limit: set data.stream, checkpoint.dir": (
                gate.is_gated and has_places
            ),
            "passes are judged, and there is one without an end: set data.pass_every": self.data.pass_every,
            "no pass ends with a checkpoint: set checkpoint.every_epochs = 1": self.checkpoint.every_epochs,
            "a margin compares rows: set sample_rows above 0": gate.sample_rows or not gate.margin,
        }
        why = next((f"but {need}" for need, has in needed.items() if not has), "")
        used = [each for each in type(gate).model_fields if each != "notify"] if why else []
        reasons = dict.fromkeys(gate.non_default(*used), why)
        if gate.notify and not self.checkpoint.dir:
            reasons["notify"] = "but nothing is saved: set checkpoint.dir"
        gate.refuse_without_use(reasons, "publish")
        return self

    @model_validator(mode="after")
    def _refuse_queue_without_use(self) -> Self:
        why = {
            'strategy.mode = "async" or "half_async", as others deal with all workers': (
                self.strategy.mode in ("async", "half_async")
            ),
            'device.tables = "host", as passes have one worker': self.device.tables == "host",
            "valid.every_steps = 0, as workers end at different steps": not self.valid.every_steps,
        }
        need = next((need for need, has in why.items() if not has), "")
        if self.data.deal == "queue" and need:
            self.data.refuse_without_use(
                {"deal": f"but files are dealt by a queue: set {need}"}, "data"
            )
        return self

    @property
    def saves_when_told(self) -> bool:
        """Whether worker 0 saves a checkpoint when it is told to end by SIGTERM."""
        is_within = bool(self.data.stream) or self.checkpoint.is_within_epochs
        return is_within and bool(self.checkpoint.dir)

    def place_of(self, key: str) -> str:
        """Returns where `section.key` was written: the file, or `--set section.key=value`."""
        return self._origin.of(key.split("."))

    def error(self, key: str, fault: str) -> JobError:
        """Returns the error with the origin of `section.key`, its name, and the fault."""
        named = fault if fault.startswith(key) else f"{key}: {fault}"
        return JobError(f"{self.place_of(key)}: {self.in_words(named)}")

    def in_words(self, message: str) -> str:
        """Returns a message that names keys, with what they are called where the job was written."""
        return self._origin.words(message)

    @contextmanager
    def errors(self, key: str, *kinds: type[Exception]) -> Iterator[None]:
        """Turns errors of some kinds into those of `section.key`."""
        try:
            yield
        except kinds as error:
            raise self.error(key, str(error)) from error

    def settings(self) -> dict[str, Any]:
        """Returns the settings of `to_json` by key, as `section.key`."""
        return dict(_flat("", json.loads(self.to_json())))

    def to_json(self) -> str:
        """Returns the job as JSON, with the defaults of all settings in use."""
        return self.model_dump_json(by_alias=True, indent=1)
