"""Progress of a training worker, logged every few seconds."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_model.metrics import ClickMetrics, SlidingMetrics
from ps_worker.training.evaluation.base_rate import BaseRate
from ps_worker.training.step_times import StepTimes

logger = logging.getLogger(__name__)

EARLY_STEPS = 2000
"""Of a pass, after which its loss so far is compared with that of the base rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts up to one moment.

    Attributes:
        examples: Trained on.
        weight: Sum of their weights.
        loss: Summed over them, each times its weight.
        metrics: Of their predictions.
        at_s: The moment, by the clock.
    """

    examples: int
    weight: float
    loss: float
    metrics: ClickMetrics
    at_s: float


@dataclass(frozen=True, slots=True)
class _Line:
    """A line without its end, the step that it is of, and its figures."""

    text: str
    step: int
    figures: Mapping[str, float]


class Progress:
    """Counts steps, examples and metrics of one worker's training. Thread-safe.

    Metrics are of predictions made before the example was trained on, so the first pass does not bias them.

    Attributes:
        steps: Batches trained on, an earlier run's included.
        examples: Of them in this run.
        times: Of the steps, by part.
    """

    def __init__(
        self,
        *,
        every_s: float,
        has_log_loss: bool = True,
        advice: str = "try a smaller learning rate",
        rates: Callable[[], str] = str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has counted nothing.

        Args:
            every_s: Seconds between two lines.
            has_log_loss: The loss is the log loss of clicks, so that the base rate has one to compare with.
            advice: What to try while the loss is above that of the base rate.
            rates: Returns what ends a line: learning rates that change. May ask servers: other threads count
                meanwhile, and write no line.
            clock: In seconds.
        """
        self._rates = rates
        self._every_s = every_s
        self._advice = advice
        self._base_rate = BaseRate()
        self._has_log_loss = self._is_comparing = has_log_loss
        self._has_logged = False
        self._clock = clock
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # never taken by who has the other
        self._lines: deque[_Line] = deque()  # in the order of their steps, not written yet
        self._metrics = ClickMetrics()
        self._sliding = SlidingMetrics()
        self._loss = 0.0
        self._weight = 0.0
        self.steps = 0
        self.examples = 0
        self.times = StepTimes()
        self._on_line: Callable[[Mapping[str, float], int], None] = _nothing
        self._pass_name = ""
        self._share: Callable[[], float | None] = lambda: None
        self._begin_pass()
        self._restart_window()

    def resume(self, steps: int) -> None:
        """Counts steps on from an earlier run's, before the first of this one."""
        with self._lock:
            self.steps = self._steps_before_pass = steps

    def watch(self, on_line: Callable[[Mapping[str, float], int], None]) -> None:
        """Has `on_line` called with the figures of each line and its step, by the thread that logs it.

        It may write to a disk: other threads count meanwhile.
        """
        self._on_line = on_line

    def begin_pass(self, name: str = "", share: Callable[[], float | None] = lambda: None) -> None:
        """Counts a pass of its own from now on.

        Args:
            name: Of the pass, for lines; empty: they do not name it.
            share: Asks how much of the pass is done, from 0 to 1; None: unknown.
        """
        with self._lock:
            self._begin_pass()
            self._pass_name, self._share = name, share

    def _begin_pass(self) -> None:
        self._before_pass = self._metrics.copy()
        self._steps_before_pass = self.steps
        self._is_early = True  # in the first steps, after which the loss is compared once
        self._pass_start = self._clock()
        self._share_at_start: float | None = None

    def of_pass(self) -> ClickMetrics:
        """Returns the metrics of this pass so far."""
        with self._lock:
            return self._of_pass()

    def _of_pass(self) -> ClickMetrics:
        return self._metrics.without(self._before_pass)

    def recent(self) -> ClickMetrics:
        """Returns the metrics of the last batches."""
        with self._lock:
            return self._sliding.metrics()

    def warn_of_base_rate(self, metrics: ClickMetrics, what: str) -> None:
        """Warns of a log loss that stays above that of the base rate, if the model's loss is one of clicks.

        That of the last batches has to be above it, too: a mean has the first predictions, of a model that
        has learnt nothing yet.

        Args:
            metrics: Of predictions before training.
            what: Of which; begins the message.
        """
        loss, base_loss = metrics.log_loss(), metrics.base_log_loss()
        recent = self._sliding.metrics().log_loss()
        if self._has_log_loss and loss > base_loss and recent > base_loss:
            logger.warning(
                "%s has a log loss of %.5f (%.5f in the last %d batches of this worker), above %.5f, that of "
                "predicting the click rate %.4f for every example: %s",
                what,
                loss,
                recent,
                self._sliding.window,
                base_loss,
                metrics.clicks / metrics.weight,
                self._advice,
            )

    def _restart_window(self) -> None:
        self._base_rate.end_interval()
        self._window_start = self._clock()
        self._window_examples = 0
        self._window_weight = 0.0
        self._window_loss = 0.0

    def add(
        self,
        labels: NDArray[np.float32],
        predictions: NDArray[np.float32],
        loss_sum: float,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Counts one step; logs a line if the last is `every_s` seconds ago."""
        with self._lock:
            self.steps += 1
            self.examples += labels.size
            self._loss += loss_sum
            self._window_examples += labels.size
            self._window_loss += loss_sum
            weight, clicks = float(labels.size), float(np.count_nonzero(labels > 0.5))
            if weights is not None:
                weight = float(weights.sum(dtype=np.float64))
                clicks = float(weights[labels > 0.5].sum(dtype=np.float64))
            self._weight += weight
            self._window_weight += weight
            self._metrics.add(labels, predictions, weights)
            self._sliding.add(labels, predictions, weights)
            self._base_rate.add(weight, clicks)
            if self._is_early and self.steps - self._steps_before_pass >= EARLY_STEPS:
                self._is_early = False
                name = f"the model after the first {EARLY_STEPS} steps of a pass"
                self.warn_of_base_rate(self._of_pass(), name)
            if self._clock() - self._window_start >= self._every_s:
                self._compare_with_base_rate()
                self._lines.append(self._line())
                self._has_logged = True
        self._write_lines()

    def skip(self) -> None:
        """Counts one step whose batch was not trained on."""
        with self._lock:
            self.steps += 1

    def restart_window(self) -> None:
        """Leaves the time since the last line out of the next one's rate; call `log` before that time."""
        with self._lock:
            self._restart_window()

    def log(self) -> None:
        """Logs a line now, unless nothing has happened since the last."""
        with self._lock:
            if self._window_examples:
                self._lines.append(self._line())
        self._write_lines()

    def counts(self) -> Counts:
        """Returns the counts so far."""
        with self._lock:
            return Counts(
                examples=self.examples,
                weight=self._weight,
                loss=self._loss,
                metrics=self._metrics.copy(),
                at_s=self._clock(),
            )

    @property
    def mean_loss(self) -> float:
        """Mean loss over all examples so far; nan before the first."""
        with self._lock:
            return _ratio(self._loss, self._weight)

    def _compare_with_base_rate(self) -> None:
        """Warns, once, of a whole interval with a loss above that of predicting the click rate.

        The first interval has the initial model's predictions, which know no rate.
        """
        loss, base_loss = _ratio(self._window_loss, self._window_weight), self._base_rate.log_loss
        if self._is_comparing and self._has_logged and loss > base_loss:
            self._is_comparing = False
            logger.warning(
                "the examples since the last line, up to step %d, have a mean loss of %.5f, above %.5f, that "
                "of predicting for each the click rate %.4f of all examples so far: %s",
                self.steps,
                loss,
                base_loss,
                self._base_rate.click_rate,
                self._advice,
            )

    def _write_lines(self) -> None:
        """Logs the lines that there are, with the learning rates at their end, and tells their figures."""
        if not self._lines:
            return
        with self._writing:
            while self._lines:  # another thread may have written this one's
                line = self._lines.popleft()
                self._on_line(line.figures, line.step)
                logger.info("%s%s", line.text, self._rates())

    def _line(self) -> _Line:
        """Returns a line, and begins the next window."""
        seconds = self._clock() - self._window_start
        window = self._sliding.window
        figures: dict[str, float] = {
            "examples": self.examples,
            "examples_per_s": self._window_examples / seconds if seconds > 0 else 0.0,
            "loss": _ratio(self._window_loss, self._window_weight),
            "auc": self._metrics.auc(),
            f"auc_{window}": self._sliding.metrics().auc(),
        }
        done, left_s = self._done()
        if done is not None:
            figures |= {"pass_done": done, "pass_left_s": left_s}
        self._restart_window()
        text = (
            f"{self._shown(done, left_s)}step={self.steps} examples={self.examples} "
            f"examples/s={figures['examples_per_s']:.0f} loss={figures['loss']:.5f} "
            f"auc={figures['auc']:.4f} auc_{window}={figures[f'auc_{window}']:.4f}"
        )
        return _Line(text, self.steps, figures)

    def _done(self) -> tuple[float | None, float]:
        """Returns the share of the pass that is done, and the seconds left; None and nan if unknown."""
        done = self._share()
        if done is None:
            return None, math.nan
        if self._share_at_start is None:
            # Of the first line: what a resumed run had done before took none of this one's time.
            self._share_at_start, self._pass_start = done, self._clock()
            return done, math.nan
        new, seconds = done - self._share_at_start, self._clock() - self._pass_start
        return done, (1.0 - done) * seconds / new if new > 0 else math.nan

    def _shown(self, done: float | None, left_s: float) -> str:
        """Returns the part of a line that says where the pass is."""
        shown = f"pass={self._pass_name} " if self._pass_name else ""
        if done is not None:
            shown += f"done={done:.0%} "
        if math.isfinite(left_s):
            minutes, seconds = divmod(round(left_s), 60)
            shown += f"left={minutes // 60}:{minutes % 60:02}:{seconds:02} "
        return shown


def _nothing(_: Mapping[str, float], step: int) -> None:
    return None


def _ratio(loss: float, weight: float) -> float:
    return loss / weight if weight else float("nan")
