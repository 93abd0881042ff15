"""A whole job: all its sections, checked."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job.origin import Origin
from ctr_ps.ps_worker.job.sections.checkpoint import CheckpointSection
from ctr_ps.ps_worker.job.sections.data import DataSection
from ctr_ps.ps_worker.job.sections.device import DeviceSection
from ctr_ps.ps_worker.job.sections.life import LifeSection
from ctr_ps.ps_worker.job.sections.optimizers import OptimizerSection
from ctr_ps.ps_worker.job.sections.run import RunSection
from ctr_ps.ps_worker.job.sections.section import (
    ClusterSection,
    HeterSection,
    ModelSection,
    Section,
    TrainSection,
    is_utf8,
)
from ctr_ps.ps_worker.job.sections.strategy import StrategySection
from ctr_ps.ps_worker.job.sections.valid import ValidSection


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

    @model_validator(mode="after")
    def _refuse_validation_without_use(self) -> Self:
        faults = {}
        if not self.data.valid:
            why = "but there are no rows to validate on: set data.valid"
            faults = dict.fromkeys(self.valid.settings(), why)
        elif not self.valid.every_epochs and not self.valid.every_steps:
            faults["every_epochs"] = (
                "and so is valid.every_steps, so that data.valid has no use: set one of them, or remove it"
            )
        elif self.valid.final_model == "best" and not self.checkpoint.dir:
            faults["final_model"] = "but no models are saved: set checkpoint.dir"
        self.valid.refuse_without_use(faults, "valid")
        return self

    def place_of(self, key: str) -> str:
        """Returns where `section.key` was written: the file, or `--set section.key=value`."""
        return self._origin.of(key.split("."))

    def error(self, key: str, fault: str) -> JobError:
        """Returns the error with the origin of `section.key`, its name, and the fault."""
        named = fault if fault.startswith(key) else f"{key}: {fault}"
        return JobError(f"{self.place_of(key)}: {named}")

    def to_json(self) -> str:
        """Returns the job as JSON, with the defaults of all settings in use."""
        return self.model_dump_json(by_alias=True, indent=1)
