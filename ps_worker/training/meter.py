"""Progress of a training worker, logged every few seconds."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_model.metrics import ClickMetrics, SlidingMetrics
from ps_worker.training.base_rate import BaseRate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts up to one moment.

    Attributes:
        examples: Trained on.
        loss: Summed over them.
        metrics: Of their predictions, as `ClickMetrics.to_vector`.
        at_s: The moment, by the clock.
    """

    examples: int
    loss: float
    metrics: NDArray[np.float64]
    at_s: float


class Progress:
    """Counts steps, examples and metrics of one worker's training. Thread-safe.

    Metrics are of predictions made before the example was trained on, so the first pass does not bias them.
    """

    def __init__(
        self,
        *,
        every_s: float,
        has_log_loss: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has counted nothing.

        Args:
            every_s: Seconds between two lines.
            has_log_loss: The loss is the log loss of clicks, so that the base rate has one to compare with.
            clock: In seconds.
        """
        self._every_s = every_s
        self._base_rate = BaseRate()
        self._is_comparing = has_log_loss
        self._has_logged = False
        self._clock = clock
        self._lock = threading.Lock()
        self._metrics = ClickMetrics()
        self._sliding = SlidingMetrics()
        self._loss = 0.0
        self.steps = 0
        self.examples = 0
        self._restart_window()

    def resume(self, steps: int) -> None:
        """Counts steps on from an earlier run's, before the first of this one."""
        with self._lock:
            self.steps = steps

    def _restart_window(self) -> None:
        self._base_rate.end_interval()
        self._window_start = self._clock()
        self._window_examples = 0
        self._window_loss = 0.0

    def add(
        self, labels: NDArray[np.float32], predictions: NDArray[np.float32], loss_sum: float
    ) -> None:
        """Counts one step; logs a line if the last is `every_s` seconds ago."""
        with self._lock:
            self.steps += 1
            self.examples += labels.size
            self._loss += loss_sum
            self._window_examples += labels.size
            self._window_loss += loss_sum
            self._metrics.add(labels, predictions)
            self._sliding.add(labels, predictions)
            self._base_rate.add(labels.size, int(np.count_nonzero(labels > 0.5)))
            if self._clock() - self._window_start >= self._every_s:
                self._compare_with_base_rate()
                self._log()
                self._has_logged = True

    def skip(self) -> None:
        """Counts one step whose batch was not trained on."""
        with self._lock:
            self.steps += 1

    def log(self) -> None:
        """Logs a line now, unless nothing has happened since the last."""
        with self._lock:
            if self._window_examples:
                self._log()

    def counts(self) -> Counts:
        """Returns the counts so far."""
        with self._lock:
            return Counts(
                examples=self.examples,
                loss=self._loss,
                metrics=self._metrics.to_vector(),
                at_s=self._clock(),
            )

    @property
    def mean_loss(self) -> float:
        """Mean loss over all examples so far; nan before the first."""
        with self._lock:
            return self._loss / self.examples if self.examples else float("nan")

    def _compare_with_base_rate(self) -> None:
        """Warns, once, of a whole interval with a loss above that of predicting the click rate.

        The first interval has the initial model's predictions, which know no rate.
        """
        loss, base_loss = self._window_loss / self._window_examples, self._base_rate.log_loss
        if self._is_comparing and self._has_logged and loss > base_loss:
            self._is_comparing = False
            logger.warning(
                "loss %.5f up to step %d is above %.5f, the loss of predicting the click rate %.4f for every "
                "example: try a smaller learning rate, check that labels are 1 for a click, and how the "
                "numbers of dense columns are scaled",
                loss,
                self.steps,
                base_loss,
                self._base_rate.click_rate,
            )

    def _log(self) -> None:
        seconds = self._clock() - self._window_start
        logger.info(
            "step=%d examples=%d examples/s=%.0f loss=%.5f auc=%.4f auc_%d=%.4f",
            self.steps,
            self.examples,
            self._window_examples / seconds if seconds > 0 else 0,
            self._window_loss / self._window_examples,
            self._metrics.auc(),
            self._sliding.window,
            self._sliding.metrics().auc(),
        )
        self._restart_window()
