"""Batches with a non-finite loss or gradient: they end the run, or are skipped, by `train.non_finite`.

Every gradient of a worker passes here before it is merged or reaches a communicator: otherwise one infinite
number would spoil the batches that it is added to.
"""

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal

from ctr_ps.protos.errors import GradientError
from ctr_ps.protos.gradients import Gradients, faults_of

logger = logging.getLogger(__name__)

Policy = Literal["fail", "skip"]

WINDOW = 100
"""Number of latest batches of which at most half may be skipped."""

LOSS = "loss"  # name for a loss that is not finite, beside those of tables and dense blocks


class NonFiniteBatches:
    """The skipped batches of one worker. Thread-safe."""

    def __init__(self, policy: Policy = "fail", *, worker: int | None = None) -> None:
        self._policy = policy
        self._whose = "" if worker is None else f"worker {worker}: "
        self._lock = threading.Lock()
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # whether each was skipped
        self.skipped = 0  # batches so far
        self._by_name: Counter[str] = Counter()

    @property
    def by_name(self) -> Mapping[str, int]:
        """Skipped batches by table or dense block with a non-finite gradient, or "loss"."""
        with self._lock:
            return dict(self._by_name)

    def is_skipped(self, gradients: Gradients, loss: float, number: int) -> bool:
        """Returns whether to skip batch `number`, and counts it.

        Raises GradientError if it is not finite and the policy is "fail", or too many were skipped lately.
        """
        return self.has_faults(faults_of(gradients), loss, number)

    def has_faults(self, faults: dict[str, str], loss: float, number: int) -> bool:
        """As `is_skipped`, for the errors of gradients by table or dense block."""
        if not math.isfinite(loss):
            faults[LOSS] = f"loss is {loss!r}"
        if faults and self._policy == "fail":
            raise GradientError(
                f"{self._whose}batch {number}: {next(iter(faults.values()))}; the batch was not applied: "
                "lower the learning rate, check the scaling of the input, or set non_finite = 'skip'"
            )
        with self._lock:
            self._recent.append(bool(faults))
            if not faults:
                return False
            self._count(faults, number)
        return True

    def _count(self, faults: Mapping[str, str], number: int) -> None:
        self.skipped += 1
        self._by_name.update(faults.keys())
        if self.skipped.bit_count() == 1:
            logger.warning(
                "batch skipped batch=%d skipped_batches=%d fault=%r",
                number,
                self.skipped,
                next(iter(faults.values())),
            )
        recent = sum(self._recent)
        if recent > WINDOW // 2:
            raise GradientError(
                f"{self._whose}{recent} of the last {len(self._recent)} batches were skipped. The newest, "
                f"batch {number}: {next(iter(faults.values()))}. The model has diverged: start again from a "
                "checkpoint with a smaller learning rate, and check the scaling of the input"
            )
