"""Validation: worker 0 evaluates on `data.valid` while all others wait, and tells them the outcome.

    all workers    train ... | come, with all gradients | wait ...             | know the figures | train ...
    worker 0                                            | evaluate, save a best |

So what is evaluated is a model between two steps in every mode, and every worker knows alike whether training
stops. In synchronous training the steps and their bytes are those of a run without validation.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.store import RESTART, Numbers, ReduceOp
from ctr_ps.ps_worker.checkpoints.resume import RunState, Validation
from ctr_ps.ps_worker.job.datasets import evaluated
from ctr_ps.ps_worker.job.sections import Metric
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter
from ctr_ps.ps_worker.run.training_job.passes import Pass, Stretches
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.evaluation.evaluator import figures

logger = logging.getLogger(__name__)

MOST_KEPT = 1000
"""Validations and passes of an endless run that are remembered, and written into each of its checkpoints."""

NameOf = Callable[[Validation], str]
"""Returns the name of the checkpoint that has the model of a validation; "" if nothing is saved."""


class Validator:
    """Validates a run; each worker has one. For one thread."""

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
        self._num_told = 1 + plan.job.valid.patience  # validations from the best one on
        self._rule = EarlyStopping(metric=plan.job.valid.metric, patience=plan.job.valid.patience)
        # Those since the start of this worker, of many the best and the last; worker 0 has a resumed run's as
        # well.
        self.validations: list[Validation] = []
        self._most_kept = max(MOST_KEPT, self._num_told)
        self.best: Validation | None = None  # of these
        self.steps = StepsToValidation(plan, run)

    @property
    def is_over(self) -> bool:
        """Whether training is to stop, as validations get no better."""
        return self._is_on and self._rule.is_over

    def is_due_after(self, each: Pass, *, is_last: bool) -> bool:
        """Whether a pass ends with a validation."""
        every = self._settings.every_epochs
        return self._is_on and every > 0 and (is_last or each.number % every == 0)

    def resume(self, state: RunState | None) -> int:
        """Goes on where the resumed run was, of which worker 0 tells the others, which all have to call.

        Returns the epochs that all workers have ended; `state` is of that run, None on the other workers.
        """
        saved = [] if state is None else state.validations
        done, since = (0, 0) if state is None else (state.epochs_done, state.steps_since_validation)
        rule = self._rule  # of no validations: it leaves a maximum as it is
        for each in saved:
            rule = rule.after(each)
        known = np.array([done, len(saved), rule.best, rule.waits, since], np.float64)
        told = self._run.all_reduce(known, ReduceOp.MAX, "epochs done").tolist()
        epochs_done, number, best, waits, since = told
        for each in saved[: int(number)]:  # a process in a lost one's place may know later ones
            self.add(each)
        self._rule = replace(self._rule, best=best, waits=int(waits))
        self.steps.carried = int(since)
        return int(epochs_done)

    def validate(self, epoch: int, name_of: NameOf) -> Validation | None:
        """Evaluates the model that the store has, and counts it; worker 0 alone, while the others wait.

        None on another worker, and in a process that goes through barriers of the one before it.
        """
        if not self._run.is_first or self._run.is_repeating:
            return None
        validation = self._named(self._evaluate(epoch), name_of)
        self.add(validation)
        return validation

    def tell(self, name: str, own: Validation | None, name_of: NameOf) -> None:
        """Tells all workers of a validation, which all have to call; those without it count it then.

        `own` is what `validate` returned. Names are by what was told: a process in a lost one's place is at
        other steps.
        """
        told = self._run.all_reduce(_numbers(own), ReduceOp.MAX, name)
        if own is None:
            self._add_told(told, name_of)

    def tell_at_restart(
        self, following: Sequence[float], own: Validation | None, name_of: NameOf
    ) -> None:
        """As `tell`, but there may be no validation: the barrier `RESTART`.

        A process in a lost one's place begins there, and is told two numbers that are `following`, the best
        validation of worker 0, and those since.
        """
        told, rule = list[Numbers](), replace(self._rule, best=-math.inf, waits=0)
        for each in self.validations[: -1 if own else None] if self._run.is_first else ():
            told = [] if rule.is_better(each) else told
            before, rule = rule, rule.after(each)
            told += [_numbers(each)] * (rule != before)  # else it has no figure
        told = [*told, *[_numbers(None)] * self._num_told][: self._num_told]
        numbers = np.concatenate([following, *told, _numbers(own)])
        last = self._run.all_reduce(numbers, ReduceOp.MAX, RESTART)[-4:]
        if own is None:
            self._add_told(last, name_of)

    def recall(self, name_of: NameOf) -> Numbers:
        """Counts the validations of which `tell_at_restart` tells, and returns what is `following`."""
        nothing = np.full(2 + 4 * (self._num_told + 1), _UNKNOWN)
        told = self._run.all_reduce(nothing, ReduceOp.MAX, RESTART)
        for each in told[2:].reshape(-1, 4):
            self._add_told(each, name_of)
        return told[:2]

    def _add_told(self, told: Numbers, name_of: NameOf) -> None:
        epoch, step, auc, log_loss = told.tolist()
        if epoch == _UNKNOWN:
            return  # there was no validation
        validation = Validation(
            epoch=int(epoch), step=int(step), auc=_finite(auc), log_loss=_finite(log_loss)
        )
        self.add(self._named(validation, name_of))

    def add(self, validation: Validation) -> None:
        """Counts a validation."""
        if self._rule.is_better(validation):
            self.best = validation
        self._rule = self._rule.after(validation)
        self.validations.append(validation)
        if len(self.validations) > self._most_kept:
            del self.validations[self.validations[0] is self.best]

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
                "a validation took %.0f s, but workers wait for each other at most %.0f s: raise "
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
                'the validation has no AUC, so valid.metric = "auc" cannot compare it: the files of '
                'data.valid have no rows %s a click; use more rows, or set valid.metric = "log_loss"',
                "without" if metrics.clicks else "with",
            )

    def _named(self, validation: Validation, name_of: NameOf) -> Validation:
        is_better = self._rule.is_better(validation)
        return replace(validation, checkpoint=name_of(validation)) if is_better else validation


_UNKNOWN = -math.inf  # leaves a maximum as it is


def _numbers(validation: Validation | None) -> Numbers:
    if validation is None:
        return np.full(4, _UNKNOWN)
    figures = (validation.epoch, validation.step, validation.auc, validation.log_loss)
    return np.array([_UNKNOWN if each is None else each for each in figures], np.float64)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Early stopping: the outcome of the validations so far. All workers decide alike, from the same scores.

    A score is the AUC of a validation, or its negative log loss; higher is better. A validation without the
    figure, as the AUC of rows of one class, is never better, and does not count.
    """

    metric: Metric  # the figure that is the score
    patience: int  # validations in a row without improvement that end training; 0: any number
    best: float = -math.inf  # highest score so far; -inf before the first
    waits: int = 0  # validations with the figure since the best one

    @property
    def is_over(self) -> bool:
        """Whether training is to stop."""
        return 0 < self.patience <= self.waits

    def is_better(self, validation: Validation) -> bool:
        """Whether a validation is better than all before it."""
        return self._score(validation) > self.best

    def after(self, validation: Validation) -> Self:
        """Returns the outcome after a validation."""
        if self.is_better(validation):
            return replace(self, best=self._score(validation), waits=0)
        if math.isnan(self._score(validation)):
            return self
        return replace(self, waits=self.waits + 1)

    def _score(self, validation: Validation) -> float:
        auc, log_loss = validation.auc, validation.log_loss
        if self.metric == "auc":
            return math.nan if auc is None else auc
        return math.nan if log_loss is None else -log_loss


class StepsToValidation:
    """Counts the steps of a worker from one validation within a pass to the next. For one thread."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self._run = run
        self._threads = plan.job.train.thread_num
        # Threads in lockstep take their steps together.
        every_steps = -(-plan.job.valid.every_steps // self._threads) * self._threads
        self._every_steps = every_steps if plan.valid_files else 0
        self.carried = 0  # steps of worker 0 in a resumed run since its last validation
        self._stretch_start = 0

    @property
    def is_on(self) -> bool:
        """Whether validations are due by steps."""
        return self._every_steps > 0

    @property
    def left(self) -> int:
        """Steps of this worker up to the next validation in its pass."""
        before = self.carried + self._run.steps_since_barrier * self._threads
        return max(self._every_steps - before, 0)

    @property
    def since(self) -> int:
        """Steps of this worker since the last validation in its pass, a resumed run's included."""
        return self._run.progress.steps - self._stretch_start if self.is_on else 0

    def goes_on(self, name: str, stretches: Stretches) -> bool:
        """Waits for all workers at the end of a stretch; returns whether any has more of the pass to train.

        The store has the gradients of all then.
        """
        has_more = np.array([float(stretches.has_more)])
        goes_on = bool(self._run.all_reduce(has_more, ReduceOp.MAX, name)[0])
        self.carried = 0
        self.begin_stretch()
        return goes_on

    def begin_stretch(self) -> None:
        """Counts from here, or from where the lost process before this one was in the stretch."""
        before = self.carried + self._run.steps_since_barrier * self._threads
        self._stretch_start = self._run.progress.steps - before
