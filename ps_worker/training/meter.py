"""Progress of a training worker, logged every few seconds."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics, SlidingMetrics
from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_server.optimizers.registry import Tuning
from ctr_ps.ps_worker.training.evaluation.groups import ratio

logger = logging.getLogger(__name__)

EARLY_STEPS = 2000
"""Steps of a pass after which its loss so far is compared with that of the base rate."""


Part = Literal["read", "pull", "compute", "push"]


class StepTimes:
    """Seconds of steps by part, summed over the training threads of a worker. Thread-safe.

    read       the next batch from the data
    pull       its unique keys, and waiting for their rows, in synchronous training also for other workers;
               where rows come with a push (`Parameters.push_pull`), for that
    compute    forward and backward
    push       sending the gradients; in lockstep with several threads until the servers have them
    """

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._taken = dict(self._seconds)
        self._lock = threading.Lock()

    def add(self, part: Part, seconds: float) -> None:
        """Adds a thread's seconds for a part of one step."""
        with self._lock:
            self._seconds[part] += seconds

    def take(self) -> Mapping[Part, float]:
        """Returns the seconds since the last call."""
        totals = self.totals()
        with self._lock:
            before, self._taken = self._taken, totals
        return {part: seconds - before[part] for part, seconds in totals.items()}

    def totals(self) -> dict[Part, float]:
        """Returns all seconds so far."""
        with self._lock:
            return dict(self._seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts up to one moment."""

    examples: int  # trained examples
    weight: float  # sum of their weights
    loss: float  # weighted sum of their losses
    metrics: ClickMetrics  # metrics of their predictions
    at_s: float  # time by the clock


class Progress:
    """Counts steps, examples and metrics of one worker's training. Thread-safe.

    Metrics are of predictions made before the example was trained on, so the first pass does not bias them.
    """

    def __init__(
        self,
        *,
        every_s: float,  # seconds between two lines
        # whether the loss is the log loss of clicks, comparable with the base rate's
        has_log_loss: bool = True,
        # advice while the loss is above that of the base rate
        advice: str = "try a smaller learning rate",
        # returns the end of a line: changing learning rates. May call servers: no lock is held.
        rates: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,  # in seconds
    ) -> None:
        self._rates = rates
        self._every_s = every_s
        self._advice = advice
        self._has_log_loss = self._is_comparing = has_log_loss
        self._has_logged = False
        self._clock = clock
        self._lock = threading.RLock()
        self._writing = threading.Lock()  # never taken while holding the other
        # text, step and figures of lines, in the order of their steps, not written yet
        self._lines: deque[tuple[str, int, Mapping[str, float]]] = deque()
        self._metrics = ClickMetrics()
        self._sliding = SlidingMetrics()
        self._loss = 0.0
        self.steps = 0  # trained batches, including those of an earlier run
        self.examples = 0  # trained examples of this run
        self.times = StepTimes()  # step times by part
        self.held: int | None = None  # passes in a row that were not published; None: no gate
        # called with each batch and its probabilities before training, float32[B], valid only then
        self.on_batch: Callable[[Batch, NDArray[np.float32]], None] = lambda batch, found: None
        # returns the messages of a stream that were not read, by partition
        self.lag: Callable[[], Mapping[str, int]] = dict
        # late messages of a stream; see `StreamData.lateness`
        self.lateness: Mapping[str, Sequence[float]] = {}
        self._on_line: Callable[[Mapping[str, float], int], None] = lambda figures, step: None
        self.begin_pass()
        self.restart_window()

    def resume(self, steps: int) -> None:
        """Continues the step count of an earlier run, before the first step."""
        with self._lock:
            self.steps = self._steps_before_pass = steps

    def watch(self, on_line: Callable[[Mapping[str, float], int], None]) -> None:
        """Has the logging thread call `on_line` with the figures of each line and its step.

        It may write to a disk: it is called without the lock.
        """
        self._on_line = on_line

    def begin_pass(self, name: str = "", share: Callable[[], float | None] = lambda: None) -> None:
        """Starts the counts of a pass.

        `name` is shown in lines, if any; `share` returns the fraction done, from 0 to 1, or None.
        """
        with self._lock:
            self._pass_name, self._share = name, share
            self._before_pass = self._metrics.copy()
            self._steps_before_pass = self.steps
            self._is_early = True  # in the first steps, after which the loss is compared once
            self._pass_start = self._clock()
            self._share_at_start: float | None = None

    def of_pass(self) -> ClickMetrics:
        """Returns the metrics of this pass so far."""
        with self._lock:
            return self._metrics.without(self._before_pass)

    def recent(self) -> ClickMetrics:
        """Returns the metrics of the last batches."""
        with self._lock:
            return self._sliding.metrics()

    def warn_of_base_rate(self, metrics: ClickMetrics, what: str) -> None:
        """Warns of a log loss above that of the base rate, unless the loss is custom.

        The last batches must be above it, too: the mean includes the predictions of the untrained model.
        `what` begins the message.
        """
        loss, base_loss = metrics.log_loss(), metrics.base_log_loss()
        recent = self._sliding.metrics().log_loss()
        if self._has_log_loss and loss > base_loss and recent > base_loss:
            logger.warning(
                "%s has a log loss of %.5f (%.5f in the last %d batches of this worker), above %.5f, the log "
                "loss of predicting the click rate (%.4f) for every example: %s",
                what,
                loss,
                recent,
                self._sliding.window,
                base_loss,
                metrics.clicks / metrics.weight,
                self._advice,
            )

    def warn_of_one_class(self, metrics: ClickMetrics, label: str | None) -> None:
        """Warns if the labels of all examples, in the column `label`, are equal."""
        if metrics.weight and math.isnan(metrics.auc()):
            where, value = "the label" if label is None else f"column {label!r}", metrics.clicks > 0
            text = "%s is %d in all %d rows, so there is nothing to learn: is it the label of all rows?"
            logger.warning(text, where, value, metrics.examples)

    def add(
        self,
        labels: NDArray[np.float32],
        predictions: NDArray[np.float32],
        loss_sum: float,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Counts one step; logs a line if the last one is `every_s` seconds old."""
        with self._lock:
            self.steps += 1
            self.examples += labels.size
            self._loss += loss_sum
            self._metrics.add(labels, predictions, weights)
            self._sliding.add(labels, predictions, weights)
            if self._is_early and self.steps - self._steps_before_pass >= EARLY_STEPS:
                self._is_early = False
                name = f"the model after the first {EARLY_STEPS} steps of a pass"
                self.warn_of_base_rate(self.of_pass(), name)
            if self._clock() - self._last_line.at_s >= self._every_s:
                self._compare_with_base_rate()
                self._lines.append(self._line())
                self._has_logged = True
        self._write_lines()

    def skip(self) -> None:
        """Counts one step with a skipped batch."""
        with self._lock:
            self.steps += 1

    def restart_window(self) -> None:
        """Excludes the time since the last line from the next rate; call `log` before that time."""
        with self._lock:
            self._last_line = self.counts()

    def log(self) -> None:
        """Logs a line now, unless nothing has happened since the last."""
        with self._lock:
            if self.examples > self._last_line.examples:
                self._lines.append(self._line())
        self._write_lines()

    def counts(self) -> Counts:
        """Returns the counts so far."""
        with self._lock:
            return Counts(
                examples=self.examples,
                weight=self._metrics.weight,
                loss=self._loss,
                metrics=self._metrics.copy(),
                at_s=self._clock(),
            )

    @property
    def mean_loss(self) -> float:
        """Mean loss over all examples so far; nan before the first."""
        with self._lock:
            return ratio(self._loss, self._metrics.weight)

    def _loss_since_line(self) -> float:
        """Returns the mean loss since the last line; nan without examples."""
        before = self._last_line
        return ratio(self._loss - before.loss, self._metrics.weight - before.weight)

    def _compare_with_base_rate(self) -> None:
        """Warns, once, of a whole interval with a loss above that of predicting the click rate.

        The first interval has the initial model's predictions and is exempt.
        """
        before, weight, clicks = self._last_line, self._metrics.weight, self._metrics.clicks
        if not (self._is_comparing and self._has_logged and 0 < clicks < weight):
            return
        rate, new_clicks = clicks / weight, clicks - before.metrics.clicks
        new_others = weight - before.weight - new_clicks
        total = -(new_clicks * math.log(rate) + new_others * math.log1p(-rate))
        loss, base_loss = self._loss_since_line(), ratio(total, new_clicks + new_others)
        if loss > base_loss:
            self._is_comparing = False
            logger.warning(
                "at step %d the mean loss since the last progress line is %.5f, above %.5f, the log loss of "
                "predicting the click rate so far (%.4f) for every example: %s",
                self.steps,
                loss,
                base_loss,
                rate,
                self._advice,
            )

    def _write_lines(self) -> None:
        """Logs pending lines with the learning rates, and passes on their figures."""
        if not self._lines:
            return
        with self._writing:
            while self._lines:  # another thread may have written this one's
                text, step, figures = self._lines.popleft()
                self._on_line(figures, step)
                logger.info("%s%s", text, self._rates())

    def _line(self) -> tuple[str, int, Mapping[str, float]]:
        seconds = self._clock() - self._last_line.at_s
        new_examples = self.examples - self._last_line.examples
        window = self._sliding.window
        figures: dict[str, float] = {
            "examples": self.examples,
            "examples_per_s": new_examples / seconds if seconds > 0 else 0.0,
            "loss": self._loss_since_line(),
            "auc": self._metrics.auc(),
            f"auc_{window}": self._sliding.metrics().auc(),
        }
        done, left_s = self._done()
        if done is not None:
            figures |= {"pass_done": done, "pass_left_s": left_s}
        self.restart_window()
        text = (
            f"{self._shown(done, left_s)}step={self.steps} examples={self.examples} "
            f"examples/s={figures['examples_per_s']:.0f} loss={figures['loss']:.5f} "
            f"auc={figures['auc']:.4f} auc_{window}={figures[f'auc_{window}']:.4f}"
        )
        return text, self.steps, figures

    def _done(self) -> tuple[float | None, float]:
        """Returns the share of the pass that is done, and the seconds left; None and nan if unknown."""
        done = self._share()
        if done is None:
            return None, math.nan
        if self._share_at_start is None:
            # Of the first line: the earlier part of a resumed run took none of this run's time.
            self._share_at_start, self._pass_start = done, self._clock()
            return done, math.nan
        new, seconds = done - self._share_at_start, self._clock() - self._pass_start
        return done, (1.0 - done) * seconds / new if new > 0 else math.nan

    def _shown(self, done: float | None, left_s: float) -> str:
        """Returns the part of a line that shows the position in the pass."""
        shown = f"pass={self._pass_name} " if self._pass_name else ""
        if done is not None:
            shown += f"done={done:.0%} "
        if math.isfinite(left_s):
            minutes, seconds = divmod(round(left_s), 60)
            shown += f"left={minutes // 60}:{minutes % 60:02}:{seconds:02} "
        return shown


class LearningRates:
    """Learning rates of optimizers with a schedule, for lines of progress. For one thread at a time."""

    def __init__(
        self, optimizers: Mapping[str, OptimizerSpec], applied_batches: Callable[[], int]
    ) -> None:
        self._tunings = {
            name: Tuning(spec) for name, spec in optimizers.items() if spec.schedule is not None
        }
        self._applied_batches = applied_batches
        self._has_ended = False

    def shown(self) -> str:
        """Returns the current rates, to be appended to a line of progress; "" if none changes.

        Warns, once, of a batch trained at a rate of 0: the schedule has ended.
        """
        if not self._tunings:
            return ""
        batches = self._applied_batches()
        rates = {name: tuning.rate_at(batches) for name, tuning in self._tunings.items()}
        # The last batch of a schedule leaves its rate at 0, for a next one that may not come.
        ended = [
            name
            for name, tuning in self._tunings.items()
            if not rates[name] and not tuning.rate_at(batches - 1)
        ]
        if ended and not self._has_ended:
            self._has_ended = True
            logger.warning(
                "%s is no longer trained: by its schedule it has learning rate 0 after %d batches of all "
                "workers. Raise total_steps of the schedule, or set end_factor above 0",
                ", ".join(ended),
                batches,
            )
        return " rates=" + ",".join(f"{name}:{rate:.4g}" for name, rate in rates.items())
