"""Parts of training that the core does not have; who starts a run passes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.store import ReduceOp, Store
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.data.blocks import Batches
from ctr_ps.ps_worker.job.model import ModelSpecs
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches


class DenseTrainers(Protocol):
    """Other processes that train the dense parameters for this worker (`extras/heter`)."""

    def attend(self, number: int, name: str, *, size: int = 0, op: ReduceOp | None = None) -> None:
        """Announces barrier `number` of the job; `size` numbers of an all-reduce are reduced by `op`."""

    def close(self) -> None:
        """Closes the connections."""


class PassTrainer(Protocol):
    """Trains passes on a device (`extras/device_pass`)."""

    # the store may have a part of a pass: a write back began and did not end
    is_partly_written: bool

    def train(
        self,
        batches: Batches,
        after_pass: Callable[[], None] | None = None,
        is_told_to_end: Callable[[], bool] | None = None,
    ) -> None:
        """Trains on each batch once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassParts:
    """What a run has for a trainer of passes."""

    model: Model  # computes the gradients
    specs: ModelSpecs
    store: Store  # in which all is declared
    push_ids: PushIds
    progress: Progress
    non_finite: NonFiniteBatches


NewPassTrainer = Callable[[PassParts], PassTrainer]
