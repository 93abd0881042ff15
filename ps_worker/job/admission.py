"""`admission` in `[life]`: which keys get a row (docs/feature_life.md)."""

from typing import Literal

from pydantic import Field

from protos.spec import AdmissionSpec
from ps_worker.job.sections import Section


class AdmissionSection(Section):
    """When a key that has no row gets one.

    Attributes:
        policy: By what; "all" admits every key at its first push.
        threshold: Occurrences, the probability of each, or the score that a key needs.
        table: Whose score of the key counts; empty: its own.
        counter: How keys without a row are counted.
        expected_keys: Keys without a row that a Bloom filter is made for, on all servers together.
        false_positive_rate: Of that filter, with so many keys.
        default_value: What weights of keys without a row read, in training as well.
    """

    policy: Literal["all", "count", "probability", "score"] = "all"
    threshold: float = Field(1.0, ge=0)
    table: str = ""
    counter: Literal["exact", "bloom"] = "exact"
    expected_keys: int = Field(0, ge=0, lt=2**63)
    false_positive_rate: float = Field(0.01, gt=0, lt=1)
    default_value: float = 0.0

    def spec(self) -> AdmissionSpec | None:
        """Returns the admission; None: every key is admitted."""
        if self.policy == "all":
            return None
        return AdmissionSpec(**self.model_dump())
