"""Training on a device: the rows of a pass go there with their optimizer state, train, and come back.

Its modules need PyTorch, and are imported by a job with `device.tables = "pass"` alone.
"""

from typing import TYPE_CHECKING, cast

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.store import Store
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.job.model import ModelSpecs
from ctr_ps.ps_worker.run.guests import PassTrainer
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches

if TYPE_CHECKING:
    from ctr_ps.ctr_model.torch import TorchModel


def new_pass_trainer(
    model: Model,
    specs: ModelSpecs,
    store: Store,
    push_ids: PushIds,
    *,
    progress: Progress,
    non_finite: NonFiniteBatches,
) -> PassTrainer:
    """Returns the trainer of passes that `job.device` asks for; a `NewPassTrainer`."""
    from ctr_ps.ps_worker.extras.device_pass import pass_trainer  # late: it needs PyTorch

    module = cast("TorchModel", model)
    return pass_trainer.PassTrainer(
        module, specs, store, push_ids, progress=progress, non_finite=non_finite
    )
