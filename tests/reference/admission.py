"""Admission with a dictionary of candidates and Python's own numbers."""

import hashlib
import math
from dataclasses import dataclass, field

from ctr_ps.protos.spec import TableSpec
from tests.reference.partition import mix64


def occurrences_needed(spec: TableSpec, probability: float, key: int) -> int:
    """Returns the number of occurrences that a key needs: the first hit of trials with the probability."""
    digest = hashlib.sha256(f"{spec.seed}/{spec.name}/admission".encode()).digest()
    unit = (mix64(key ^ int.from_bytes(digest[:8], "little")) >> 11) / 2**53
    return 1 if probability == 1 else 1 + math.floor(math.log(1 - unit) / math.log1p(-probability))


@dataclass
class ReferenceAdmission:
    """Shows and clicks of all keys, and which of them have a row."""

    spec: TableSpec
    candidates: dict[int, tuple[float, float]] = field(default_factory=dict)
    rows: dict[int, tuple[float, float]] = field(default_factory=dict)

    def is_enough(self, key: int, show: float, click: float) -> bool:
        admission, statistics = self.spec.admission, self.spec.statistics
        assert admission is not None
        assert statistics is not None
        if admission.policy == "score":
            score = statistics.nonclk_coeff * (show - click) + statistics.click_coeff * click
            return score >= admission.threshold
        if admission.policy == "probability":
            return show >= occurrences_needed(self.spec, admission.threshold, key)
        return show >= admission.threshold

    def push(self, key: int, shows: int, clicks: int) -> bool:
        """Counts a key; returns whether its gradient is applied."""
        known = self.rows if key in self.rows else self.candidates
        show, click = known.pop(key, (0.0, 0.0))
        show, click = show + shows, click + clicks
        has_row = known is self.rows or self.is_enough(key, show, click)
        (self.rows if has_row else self.candidates)[key] = show, click
        return has_row
