"""A distributed optimizer: optimizers and a strategy, with which a script minimizes a model."""

from collections.abc import Mapping
from typing import Any

from ctr_model.models.model import Model
from ps_worker.fleet.optimizer import choice_of
from ps_worker.fleet.running import FLEET
from ps_worker.fleet.strategy import DistributedStrategy
from ps_worker.fleet.task import Task
from ps_worker.fleet.trainer import Trainer
from ps_worker.job import override_job
from ps_worker.job.checks import require_life, require_optimizers


class DistributedOptimizer:
    """Trains a model on servers."""

    def __init__(self, optimizer: Any, strategy: DistributedStrategy, dense: Any) -> None:
        """Takes what `distributed_optimizer` was given."""
        self._optimizer = {"sparse": choice_of(optimizer), "dense": choice_of(dense)}
        self._strategy = strategy

    def minimize(
        self,
        model: Model,
        *,
        seed: int = 0,
        log_every_s: float = 5.0,
        life: Mapping[str, Any] | None = None,
        non_finite: str = "fail",
        compute: str = "float32",
    ) -> Trainer:
        """Makes `model` what this run trains, and returns its trainer; nothing is trained yet.

        Args:
            model: For the columns of the data; a table that asks for an optimizer of its own gets it.
            seed: Of the initial values of all parameters.
            log_every_s: Seconds between two log lines of training.
            life: What a job's [life] would say; `shrink_every_epochs` is up to the script.
            non_finite: What becomes of a batch whose loss or gradient is not finite: "fail" or "skip", as a
                job's `train.non_finite`.
            compute: Precision of matrix products in training: "float32" or "bfloat16", as a job's
                `train.compute`.

        Raises:
            UsageError: If strategy, optimizers or numbers are wrong, or the run has begun.
        """
        job = override_job(
            {
                "train": {
                    "seed": seed,
                    "log_every_s": log_every_s,
                    "non_finite": non_finite,
                    "compute": compute,
                },
                "optimizer": self._optimizer,
                "life": life or {},
                "strategy": self._strategy.section(),
                "cluster": FLEET.limits,
            },
            [],
            source="this script",
        )
        require_optimizers(job, model)
        require_life(job, model)
        FLEET.minimize(Task(model=model, job=job))
        return Trainer()


def distributed_optimizer(
    optimizer: Any, strategy: DistributedStrategy | None = None, *, dense: Any = None
) -> DistributedOptimizer:
    """Returns what trains with `optimizer` under a strategy.

    Args:
        optimizer: Of `fleet.optimizer`, for rows of embeddings.
        strategy: How workers keep together; None: asynchronously.
        dense: Of `fleet.optimizer`, for dense parameters; None: the same as for rows.

    Raises:
        UsageError: If one of them is not an optimizer.
    """
    return DistributedOptimizer(
        optimizer, strategy or DistributedStrategy(), optimizer if dense is None else dense
    )
