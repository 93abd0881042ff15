"""Validation: worker 0 evaluates on `data.valid` while all others wait, and tells them the outcome.

    all workers    train ... | come, with all gradients | wait ...             | know the figures | train ...
    worker 0                                            | evaluate, save a best |

So what is evaluated is a model between two steps in every mode, and every worker knows alike whether training
stops. In synchronous training the steps and their bytes are those of a run without validation.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.store import Numbers, ReduceOp
from ctr_ps.ps_worker.checkpoints.resume import RunState, Validation
from ctr_ps.ps_worker.job.datasets import evaluated
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.metrics_writer import MetricsWriter
from ctr_ps.ps_worker.run.training_job.passes import Pass, Stretches
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.evaluation.early_stopping import EarlyStopping
from ctr_ps.ps_worker.training.evaluation.evaluator import figures

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


class Validations:
    """Validations in their order; each worker has those since its start, worker 0 a resumed run's as well.

    For one thread.
    """

    def __init__(self, plan: Plan) -> None:
        """There are none yet."""
        settings = plan.job.valid
        self._is_on = bool(plan.valid_files)
        self._rule = EarlyStopping(metric=settings.metric, patience=settings.patience)
        self._best: Validation | None = None
        self._all: list[Validation] = []

    def __iter__(self) -> Iterator[Validation]:
        return iter(self._all)

    @property
    def best(self) -> Validation | None:
        """The best validation so far; None: none, or it was of a resumed run and this is not worker 0."""
        return self._best

    @property
    def is_over(self) -> bool:
        """Whether training is to stop, as validations get no better."""
        return self._is_on and self._rule.is_over

    def is_better(self, validation: Validation) -> bool:
        """Whether a validation is better than all before it."""
        return self._rule.is_better(**_compared(validation))

    def add(self, validation: Validation) -> None:
        """Counts a validation."""
        if self.is_better(validation):
            self._best = validation
        self._rule = self._rule.after(**_compared(validation))
        self._all.append(validation)

    def told_of(self, validations: Sequence[Validation]) -> Numbers:
        """Returns what worker 0 tells the others of a resumed run's validations, for `resume`: float64[3].

        Of none it is what leaves a maximum with those of another worker as they are.
        """
        rule = self._rule
        for each in validations:
            rule = rule.after(**_compared(each))
        return np.array([len(validations), rule.best, rule.waits], np.float64)

    def resume(self, told: Numbers, validations: Sequence[Validation]) -> None:
        """Goes on from a resumed run's validations.

        Args:
            told: See `told_of`.
            validations: Known on worker 0: those told of, and perhaps later ones.
        """
        number, best, waits = told.tolist()
        for each in validations[: int(number)]:
            self.add(each)
        self._rule = replace(self._rule, best=best, waits=int(waits))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the validations for a summary."""
        return [asdict(each) for each in self._all]


def _compared(validation: Validation) -> dict[str, float]:
    """Returns the figures that tell which of two validations is better; nan is never better."""
    auc, log_loss = validation.auc, validation.log_loss
    return {
        "auc": math.nan if auc is None else auc,
        "log_loss": math.nan if log_loss is None else log_loss,
    }


class StepsToValidation:
    """Counts the steps of a worker from one validation within a pass to the next. For one thread."""

    def __init__(self, plan: Plan, run: Run) -> None:
        """Has counted none yet."""
        self._run = run
        self._threads = plan.job.train.thread_num
        # Threads in lockstep take their steps together.
        every_steps = -(-plan.job.valid.every_steps // self._threads) * self._threads
        self._every_steps = every_steps if plan.valid_files else 0
        self._carried_steps = 0  # of an earlier run, since its last validation
        self._stretch_start = 0

    @property
    def is_on(self) -> bool:
        """Whether validations are due by steps."""
        return self._every_steps > 0

    @property
    def left(self) -> int:
        """Steps of this worker up to the next validation in its pass."""
        before = self._carried_steps + self._run.steps_since_barrier * self._threads
        return max(self._every_steps - before, 0)

    @property
    def since(self) -> int:
        """Steps of this worker since the last validation in its pass, a resumed run's included."""
        return self._run.progress.steps - self._stretch_start if self.is_on else 0

    def resume(self, since: int) -> None:
        """Goes on from the steps of worker 0 in a resumed run since its last validation."""
        self._carried_steps = since

    def begin_pass(self) -> None:
        """Counts from the start of a pass, or where a resumed run was in it."""
        self._begin_stretch()

    def goes_on(self, name: str, stretches: Stretches) -> bool:
        """Waits for all workers at the end of a stretch; returns whether any has more of the pass to train.

        The store has the gradients of all then.
        """
        has_more = np.array([float(stretches.has_more)])
        goes_on = bool(self._run.all_reduce(has_more, ReduceOp.MAX, name)[0])
        self._carried_steps = 0
        self._begin_stretch()
        return goes_on

    def _begin_stretch(self) -> None:
        """Counts from here, or from where the lost process before this one was in the stretch."""
        before = self._carried_steps + self._run.steps_since_barrier * self._threads
        self._stretch_start = self._run.progress.steps - before
