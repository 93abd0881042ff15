"""`[life]`: statistics of rows, and the rules by which keys get and lose them (docs/feature_life.md)."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_serializer, model_validator

from ctr_ps.protos.spec import AdmissionSpec, ExpirySpec, StatisticsSpec
from ctr_ps.ps_worker.job.sections import Section

EXPIRY_RULES = ("delete_threshold", "max_unseen", "ttl_s", "max_rows", "max_bytes")
"""The settings that let keys lose their rows."""

_NO_POLICY = (
    'but with policy "all" each key gets its row at its first push: set another policy, '
    'such as "count"'
)


class AdmissionSection(Section):
    """When a key that has no row gets one."""

    policy: Literal["all", "count", "probability", "score"] = "all"
    threshold: float = Field(1.0, ge=0)
    table: str = ""
    counter: Literal["exact", "bloom"] = "exact"
    expected_keys: int = Field(0, ge=0, lt=2**63)
    false_positive_rate: float = Field(0.01, gt=0, lt=1)
    default_value: float = 0.0

    @model_validator(mode="after")
    def _refuse_settings_without_use(self) -> Self:
        if self.policy == "all":
            without_use = self.non_default(*type(self).model_fields)
            self.refuse_without_use(dict.fromkeys(without_use, _NO_POLICY))
        return self

    def spec(self) -> AdmissionSpec | None:
        """Returns the admission; None: every key is admitted."""
        if self.policy == "all":
            return None
        return AdmissionSpec(**self.model_dump())


class TableLife(Section):
    """The life of the rows of one table; a rule that is 0 is off."""

    statistics: bool = False
    nonclk_coeff: float = Field(0.1, ge=0)
    click_coeff: float = Field(1.0, ge=0)
    decay: float = Field(0.98, gt=0, le=1)
    delete_threshold: float = Field(0.0, ge=0)
    max_unseen: int = Field(0, ge=0, lt=2**63)
    ttl_s: float = Field(0.0, ge=0)
    max_rows: int = Field(0, ge=0, lt=2**63)
    max_bytes: int = Field(0, ge=0, lt=2**63)
    evict: Literal["lru", "score"] = "lru"
    admission: AdmissionSection = AdmissionSection()

    def statistics_spec(self) -> StatisticsSpec | None:
        """Returns the statistics of rows; None: no rule needs any."""
        if not (self.statistics or self.expiry_spec() or self.admission.spec()):
            return None
        return StatisticsSpec(
            nonclk_coeff=self.nonclk_coeff, click_coeff=self.click_coeff, decay=self.decay
        )

    def expiry_spec(self) -> ExpirySpec | None:
        """Returns the rules by which keys lose their rows, or None."""
        if not any(getattr(self, rule) for rule in EXPIRY_RULES):
            return None
        return ExpirySpec(**self.model_dump(include={*EXPIRY_RULES, "evict"}))


class LifeSection(TableLife):
    """The life of the rows of all tables, and differences of single ones."""

    shrink_every_epochs: int = Field(1, ge=0)
    tables: Mapping[str, TableLife] = Field(default_factory=dict)

    def of_table(self, name: str) -> TableLife:
        """Returns the settings of one table."""
        common = {field: getattr(self, field) for field in TableLife.model_fields}
        own = self.tables.get(name)
        return TableLife(
            **(common if own is None else {**common, **own.model_dump(exclude_unset=True)})
        )

    def scoring_tables(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the tables by whose scores some of the tables `names` admit keys."""
        admissions = [self.of_table(name).admission.spec() for name in names]
        return frozenset(each.table for each in admissions if each is not None and each.table)

    def key_of_table(self, name: str, setting: str) -> str:
        """Returns the job's key of a setting as read by `of_table`."""
        own = self.tables.get(name)
        is_own = own is not None and setting in own.model_fields_set
        return f"life.tables.{name}.{setting}" if is_own else f"life.{setting}"

    @field_serializer("tables")
    def _only_what_differs(self, tables: Mapping[str, TableLife]) -> dict[str, Any]:
        return {name: table.model_dump(exclude_unset=True) for name, table in tables.items()}
