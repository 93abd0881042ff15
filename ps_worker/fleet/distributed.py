"""A distributed optimizer: optimizers and a strategy, with which a script minimizes a model."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.fleet.executor import Executor
from ctr_ps.ps_worker.fleet.optimizer import require_optimizer
from ctr_ps.ps_worker.fleet.running import FLEET
from ctr_ps.ps_worker.fleet.task import Task
from ctr_ps.ps_worker.fleet.words.strategy import DistributedStrategy
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.checks import require_base_rate, require_life, require_optimizers
from ctr_ps.ps_worker.job.model import specs_of, trained_model


class DistributedOptimizer:
    """Trains a model on servers."""

    def __init__(self, optimizer: Any, strategy: DistributedStrategy, dense: Any) -> None:
        """Takes what `distributed_optimizer` was given."""
        of_rows, of_dense = require_optimizer(optimizer), require_optimizer(dense)
        if not of_rows.is_lazy:
            raise UsageError(
                "lazy_mode=False is not for rows: a row changes when a batch has it, as all of a table "
                "in each step would be millions; leave it out, dense parameters do so anyway"
            )
        norms = {each.clip_norm for each in (of_rows, of_dense) if each.clip_norm}
        if len(norms) > 1:
            raise UsageError(
                f"grad_clip differs, {sorted(norms)}: rows and dense parameters are clipped together, by one "
                f"norm"
            )
        self._clip_norm = max(norms, default=0.0)
        self._optimizer = {"sparse": of_rows.choice, "dense": of_dense.choice}
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
        clip_norm: float = 0.0,
        dropout: float = 0.0,
        base_rate: float | Sequence[float] | Literal["data"] = "data",
    ) -> Executor:
        """Makes `model` what this run trains, and returns what trains it; nothing is trained yet.

        Args:
            model: For the columns of the data; a table that asks for an optimizer of its own gets it.
            seed: Of the initial values of all parameters.
            log_every_s: Seconds between two log lines of training.
            life: What a job's [life] would say; `shrink_every_epochs` is up to the script.
            non_finite: What becomes of a batch whose loss or gradient is not finite: "fail" or "skip", as a
                job's `train.non_finite`.
            compute: Precision of matrix products in training: "float32" or "bfloat16", as a job's
                `train.compute`.
            clip_norm: Largest norm of a batch's gradient, as a job's `train.clip_norm`; also that of
                `grad_clip` of the optimizers. 0: any.
            dropout: Of the outputs of hidden layers, as a job's `train.dropout`.
            base_rate: At which a fresh model starts, as a job's `train.base_rate`; "data": that of the first
                rows of worker 0's dataset of files, or list of batches.

        Raises:
            UsageError: If strategy, optimizers or numbers are wrong, or the run has begun.
        """
        if clip_norm and self._clip_norm and clip_norm != self._clip_norm:
            raise UsageError(
                f"clip_norm is {clip_norm!r}, and {self._clip_norm!r} by grad_clip: give one of them"
            )
        job = override_job(
            {
                "train": {
                    "seed": seed,
                    "log_every_s": log_every_s,
                    "non_finite": non_finite,
                    "compute": compute,
                    "clip_norm": clip_norm or self._clip_norm,
                    "dropout": dropout,
                    "base_rate": base_rate,
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
        require_base_rate(job, model)
        trained_model(job, model)  # refuses dropout and precisions that it has no use for
        require_life(specs_of(model, job))
        FLEET.minimize(Task(model=model, job=job))
        return Executor()


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
