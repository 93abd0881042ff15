"""Validation: worker 0 evaluates on `data.valid` while all others wait, and tells them the outcome.

    all workers    train ... | come, with all gradients | wait ...             | know the figures | train ...
    worker 0                                            | evaluate, save a best |

So what is evaluated is a model between two steps in every mode, and every worker knows alike whether training
stops. In synchronous training the steps and their bytes are those of a run without validation.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ctr_model.metrics import ClickMetrics
from protos.store import Numbers, ReduceOp
from ps_worker.checkpoints.run_state import RunState, Validation
from ps_worker.job.datasets import evaluated
from ps_worker.run.plan import Plan
from ps_worker.run.run import Run
from ps_worker.run.training_job.metrics_writer import MetricsWriter
from ps_worker.run.training_job.passes import Pass
from ps_worker.run.training_job.validation.stretches import StepsToValidation
from ps_worker.run.training_job.validation.validations import Validations
from ps_worker.training.evaluation.breakdown import breakdown_of
from ps_worker.training.evaluation.evaluator import figures

logger = logging.getLogger(__name__)

NameOf = Callable[[Validation], str]
"""Returns the name of the checkpoint that has the model of a validation."""


class Validator:
    """Validates a run; each worker has one. For one thread.

    Attributes:
        validations: All so far.
        steps: Counts those to the next validation within a pass.
    """

    def __init__(self, plan: Plan, run: Run, metrics: MetricsWriter) -> None:
        """Reads nothing yet; figures of validations go to `metrics`."""
        self._settings = plan.job.valid
        self._is_on = bool(plan.valid_files)
        self._run = run
        self._metrics = metrics
        self._wait_limit_s = plan.job.cluster.wait_timeout_s
        self._new_breakdown = breakdown_of(plan.job, plan.schema, plan.valid_files)
        # Kept, as what is wrong with its rows is said once.
        self._dataset = evaluated(plan.job, plan.schema, plan.valid_files, plan.stamps)
        self.validations = Validations(plan)
        self.steps = StepsToValidation(plan, run)

    def is_due_after(self, each: Pass) -> bool:
        """Whether a pass ends with a validation."""
        every = self._settings.every_epochs
        return self._is_on and every > 0 and (each.is_last or each.number % every == 0)

    def resume(self, state: RunState | None) -> int:
        """Goes on where the resumed run was, of which worker 0 tells the others, which all have to call.

        Args:
            state: Of that run; None on the other workers.

        Returns:
            The epochs that all workers have ended.
        """
        epochs_done, saved, since = 0, list[Validation](), 0
        if state is not None:
            epochs_done, saved = state.epochs_done, state.validations
            since = state.steps_since_validation
        known = np.array([epochs_done, *self.validations.told_of(saved), since], np.float64)
        told = self._run.all_reduce(known, ReduceOp.MAX, "epochs done")
        self.validations.resume(told[1:-1], saved)
        self.steps.resume(int(told[-1]))
        return int(told[0])

    def validate(self, epoch: int, name_of: NameOf | None) -> Validation | None:
        """Evaluates the model that the store has, and counts it; worker 0 alone, while the others wait.

        Args:
            epoch: The current one.
            name_of: Returns the name under which its model is to be saved if it is the best; None: nothing is
                saved.

        Returns:
            None on another worker, and in a process that goes through barriers of the one before it.
        """
        if not self._run.is_first or self._run.is_repeating:
            return None
        validation = self._named(self._evaluate(epoch), name_of)
        self.validations.add(validation)
        return validation

    def tell(self, name: str, own: Validation | None, name_of: NameOf | None) -> None:
        """Tells all workers of a validation, which all have to call; those without it count it then.

        Args:
            name: Of the all-reduce.
            own: What `validate` returned.
            name_of: As there. By what was told: a process in a lost one's place is at other steps.
        """
        told = self._run.all_reduce(_numbers(own), ReduceOp.MAX, name)
        if own is None:
            self.validations.add(self._named(_validation(told), name_of))

    def _evaluate(self, epoch: int) -> Validation:
        start = time.monotonic()
        breakdown = self._new_breakdown()
        metrics = self._run.evaluate(self._dataset, breakdown=breakdown)
        self._warn_without_figure(metrics)
        step = self._run.progress.steps
        auc, log_loss, seconds = metrics.auc(), metrics.log_loss(), time.monotonic() - start
        logger.info(
            "validation epoch=%d step=%d auc=%.4f log_loss=%.5f base_log_loss=%.5f calibration=%.3f "
            "examples=%d seconds=%.1f",
            epoch,
            step,
            auc,
            log_loss,
            metrics.base_log_loss(),
            metrics.calibration(),
            metrics.examples,
            seconds,
        )
        if self._run.num_workers > 1 and seconds > self._wait_limit_s / 2:
            logger.warning(
                "a validation took %.0f s, and workers wait for each other at most %.0f s: raise "
                "cluster.wait_timeout_s, or validate on fewer rows",
                seconds,
                self._wait_limit_s,
            )
        self._metrics.write("valid", figures(metrics, breakdown))
        return Validation(epoch=epoch, step=step, auc=_finite(auc), log_loss=_finite(log_loss))

    def _warn_without_figure(self, metrics: ClickMetrics) -> None:
        """Says why a validation cannot be compared with others."""
        if not metrics.examples:
            logger.warning(
                "nothing was validated: the files of data.valid have no rows with a label"
            )
        elif self._settings.metric == "auc" and math.isnan(metrics.auc()):
            logger.warning(
                'the validation has no AUC, so by valid.metric = "auc" it is not compared with others: the '
                "files of data.valid have no rows %s a click; take more rows, or set valid.metric = "
                '"log_loss"',
                "without" if metrics.clicks else "with",
            )

    def _named(self, validation: Validation, name_of: NameOf | None) -> Validation:
        if name_of is None or not self.validations.is_better(validation):
            return validation
        return replace(validation, checkpoint=name_of(validation))


_UNKNOWN = -math.inf  # leaves a maximum as it is


def _numbers(validation: Validation | None) -> Numbers:
    if validation is None:
        return np.full(4, _UNKNOWN)
    figures = (validation.epoch, validation.step, validation.auc, validation.log_loss)
    return np.array([_UNKNOWN if each is None else each for each in figures], np.float64)


def _validation(told: Numbers) -> Validation:
    epoch, step, auc, log_loss = told.tolist()
    return Validation(
        epoch=int(epoch), step=int(step), auc=_finite(auc), log_loss=_finite(log_loss)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
