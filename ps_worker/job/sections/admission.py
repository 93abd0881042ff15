"""`admission` in `[life]`: which keys get a row (docs/feature_life.md)."""

from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from protos.spec import AdmissionSpec
from ps_worker.job.sections.section import Section

_NO_POLICY = (
    'but with policy "all" each key gets its row at its first push: set the policy, as "count"'
)


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

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        without_use = [
            name
            for name, field in type(self).model_fields.items()
            if name != "policy" and getattr(self, name) != field.default
        ]
        if self.policy == "all" and without_use:
            raise ValidationError.from_exception_data(
                "admission", list(map(self._fault, without_use))
            )
        return self

    def _fault(self, name: str) -> InitErrorDetails:
        error = PydanticCustomError("setting_without_use", "{message}", {"message": _NO_POLICY})
        return InitErrorDetails(type=error, loc=(name,), input=getattr(self, name))

    def spec(self) -> AdmissionSpec | None:
        """Returns the admission; None: every key is admitted."""
        if self.policy == "all":
            return None
        return AdmissionSpec(**self.model_dump())
