"""The loss of a model that knows nothing but the click rate: what training should be better than.

predicting the click rate p for every example:   loss = -(clicks * log p + others * log(1 - p)) / examples
"""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class BaseRate:
    """The click rate of all examples so far, and those of an interval. Not thread-safe."""

    _examples: int = 0
    _clicks: int = 0
    _interval_examples: int = 0
    _interval_clicks: int = 0

    def add(self, examples: int, clicks: int) -> None:
        """Counts the examples of a batch."""
        self._examples += examples
        self._clicks += clicks
        self._interval_examples += examples
        self._interval_clicks += clicks

    def end_interval(self) -> None:
        """Begins the next interval."""
        self._interval_examples = self._interval_clicks = 0

    @property
    def click_rate(self) -> float:
        """Clicks an example so far; nan before the first."""
        return self._clicks / self._examples if self._examples else math.nan

    @property
    def log_loss(self) -> float:
        """Mean log loss over the interval of predicting the click rate; nan without both classes so far."""
        if not 0 < self._clicks < self._examples or not self._interval_examples:
            return math.nan
        rate, clicks = self.click_rate, self._interval_clicks
        others = self._interval_examples - clicks
        total = clicks * math.log(rate) + others * math.log1p(-rate)
        return -total / self._interval_examples
