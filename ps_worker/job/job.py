"""A whole job: all its sections, checked."""

from ps_worker.job.optimizers import OptimizerSection
from ps_worker.job.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    ModelSection,
    Section,
    TrainSection,
)
from ps_worker.job.strategy import StrategySection


class Job(Section):
    """A whole job."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    strategy: StrategySection = StrategySection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()

    def to_json(self) -> str:
        """Returns the job as JSON, the defaults of all that has a use filled in."""
        return self.model_dump_json(by_alias=True, indent=1)
