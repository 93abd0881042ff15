"""Early stopping: training ends when validations no longer improve.

    score      of a validation: its AUC, or its negative log loss; higher is better
    best       a score above all before it
    waits      validations since the best one; training is over when they are `patience`

A validation without the figure, as the AUC of rows of one class, is never better, and does not count.

All workers decide alike, from the same scores.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from ctr_ps.ps_worker.job.sections.valid import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """The outcome of the validations so far."""

    metric: Metric  # the figure that is the score
    patience: int  # validations in a row without improvement that end training; 0: any number
    best: float = -math.inf  # highest score so far; -inf before the first
    waits: int = 0  # validations with the figure since the best one

    @property
    def is_over(self) -> bool:
        """Whether training is to stop."""
        return 0 < self.patience <= self.waits

    def is_better(self, *, auc: float, log_loss: float) -> bool:
        """Whether a validation with these figures is better than all before it."""
        return self._score(auc, log_loss) > self.best

    def after(self, *, auc: float, log_loss: float) -> Self:
        """Returns the outcome after a validation with these figures."""
        if self.is_better(auc=auc, log_loss=log_loss):
            return replace(self, best=self._score(auc, log_loss), waits=0)
        if math.isnan(self._score(auc, log_loss)):
            return self
        return replace(self, waits=self.waits + 1)

    def _score(self, auc: float, log_loss: float) -> float:
        return auc if self.metric == "auc" else -log_loss
