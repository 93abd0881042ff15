"""A whole job: all its sections, checked."""

from typing import Annotated, Any

from pydantic import BeforeValidator, PrivateAttr

from protos.errors import JobError
from ps_worker.job.origin import Origin
from ps_worker.job.sections.checkpoint import CheckpointSection
from ps_worker.job.sections.data import DataSection
from ps_worker.job.sections.device import DeviceSection
from ps_worker.job.sections.life import LifeSection
from ps_worker.job.sections.optimizers import OptimizerSection
from ps_worker.job.sections.section import (
    ClusterSection,
    HeterSection,
    ModelSection,
    Section,
    TrainSection,
)
from ps_worker.job.sections.strategy import StrategySection


def _model_of_name(value: object) -> object:
    """Reads `model = "name"` as `[model] name = "name"`."""
    return {"name": value} if isinstance(value, str) else value


class Job(Section):
    """A whole job. It knows where it was written, to say so in errors; that is no part of its data."""

    model: Annotated[ModelSection, BeforeValidator(_model_of_name)] = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    life: LifeSection = LifeSection()
    strategy: StrategySection = StrategySection()
    device: DeviceSection = DeviceSection()
    checkpoint: CheckpointSection = CheckpointSection()
    heter: HeterSection = HeterSection()
    cluster: ClusterSection = ClusterSection()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def model_post_init(self, context: Any, /) -> None:
        """Keeps the origin that validation was given as its context."""
        if isinstance(context, Origin):
            self._origin = context

    def place_of(self, key: str) -> str:
        """Returns where `section.key` was written: the file, or `--set section.key=value`."""
        return self._origin.of(key.split("."))

    def error(self, key: str, fault: str) -> JobError:
        """Returns the error that says where `section.key` was written, its name, and the fault.

        Args:
            key: `section.key`.
            fault: Prefixed with the key, unless it begins with it.
        """
        named = fault if fault.startswith(key) else f"{key}: {fault}"
        return JobError(f"{self.place_of(key)}: {named}")

    def to_json(self) -> str:
        """Returns the job as JSON, the defaults of all that has a use filled in."""
        return self.model_dump_json(by_alias=True, indent=1)
