"""Dense columns: a name, and the scaling of a number x to a model input.

    transform    model input                        settings
    none         (x - shift) / scale                shift, scale
    log1p        (f(x) - shift) / scale             shift, scale; f(x) = sign(x) log(1 + |x|)
    min_max      (x - min) / (max - min)            min, max
    quantile     rank of x among the boundaries     boundaries

The rank is piecewise linear: 0 below the first of n boundaries, i / (n - 1) at boundary i from 0, 1 above the
last. At a repeated boundary it is the rank of its last occurrence.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, Self, get_args

from ctr_ps.ctr_model.schema.entries import (
    SchemaError,
    flag_entry,
    list_entry,
    number_entry,
    refuse_unknown_keys,
    text_entry,
)

Transform = Literal["none", "log1p", "min_max", "quantile"]

FLOAT32_MAX = 3.4028234663852886e38

_SETTINGS: Mapping[Transform, tuple[str, ...]] = {
    "none": ("shift", "scale"),
    "log1p": ("shift", "scale"),
    "min_max": ("min", "max"),
    "quantile": ("boundaries",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """A dense column; an invalid setting raises a SchemaError that names column and value."""

    name: str  # unique among the dense columns
    transform: Transform = "none"  # one of the table above
    shift: float = 0.0  # for "none" and "log1p"; the mean of f(x) for standardisation
    scale: float = 1.0  # for "none" and "log1p"; the standard deviation of f(x) for standardisation
    # for "min_max": mapped to 0. There is no clipping: smaller numbers are negative.
    min: float | None = None
    max: float | None = None  # for "min_max": mapped to 1
    boundaries: tuple[float, ...] = ()  # for "quantile": ascending, at least two distinct ones
    missing: float = 0.0  # model input for a missing number; not transformed
    # whether to add an input that is 1 if the number is missing, else 0
    missing_indicator: bool = False

    def __post_init__(self) -> None:
        if self.transform not in get_args(Transform):
            raise self._error(
                f"transform is {self.transform!r}, expected one of {', '.join(get_args(Transform))}"
            )
        self._refuse_settings_of_others()
        self._require_finite()
        if self.scale == 0:
            raise self._error("scale is 0, expected another number, as values are divided by it")
        if self.transform == "min_max":
            self._require_span()
        if self.transform == "quantile":
            self._require_ascending()

    @classmethod
    def from_dict(cls, entry: object) -> Self:
        """Returns the column that `to_dict` wrote; defaults may be omitted. Raises SchemaError."""
        if not isinstance(entry, Mapping):
            raise SchemaError(f"schema: a dense column is {entry!r}, expected a table with a name")
        refuse_unknown_keys("dense column", entry, [field.name for field in fields(cls)])
        name = text_entry("dense column: name", entry.get("name"))
        where = f"dense column {name!r}"
        numbers = {
            key: number_entry(f"{where}: {key}", entry[key])
            for key in ("shift", "scale", "min", "max", "missing")
            if key in entry
        }
        boundaries = list_entry(f"{where}: boundaries", entry.get("boundaries", ()))
        return cls(
            name=name,
            transform=entry.get("transform", "none"),
            boundaries=tuple(number_entry(f"{where}: a boundary", each) for each in boundaries),
            missing_indicator=flag_entry(
                f"{where}: missing_indicator", entry.get("missing_indicator", False)
            ),
            **numbers,
        )

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for `from_dict`, with the settings of the transform only."""
        entry: dict[str, object] = {"name": self.name, "transform": self.transform}
        for setting in _SETTINGS[self.transform]:
            value = getattr(self, setting)
            # float, so that 1 and 1.0 have the same fingerprint.
            entry[setting] = [float(v) for v in value] if setting == "boundaries" else float(value)
        entry["missing"] = float(self.missing)
        # Omitted if false, so that schemas without indicators keep their fingerprint.
        if self.missing_indicator:
            entry["missing_indicator"] = True
        return entry

    @property
    def span(self) -> tuple[float, float]:
        """Subtrahend and divisor of f(x); (0, 1) for "quantile"."""
        if self.min is None or self.max is None:
            return self.shift, self.scale
        return self.min, self.max - self.min

    def _refuse_settings_of_others(self) -> None:
        own = _SETTINGS[self.transform]
        for field in fields(self):
            is_of_another = field.name not in own and field.name in _ALL_SETTINGS
            if is_of_another and getattr(self, field.name) != field.default:
                raise self._error(
                    f"{field.name} is {getattr(self, field.name)!r}, but transform {self.transform!r} "
                    f"takes {' and '.join(own)}"
                )

    def _require_finite(self) -> None:
        for name in ("shift", "scale", "min", "max", "missing"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise self._error(f"{name} is {number!r}, not finite")
        if abs(self.missing) > FLOAT32_MAX:
            raise self._error(f"missing is {self.missing!r}, expected a number that fits a float32")

    def _require_span(self) -> None:
        for name in ("min", "max"):
            if getattr(self, name) is None:
                raise self._error(f"transform 'min_max' needs min and max, and {name} is missing")
        if not 0 < self.span[1] < math.inf:
            raise self._error(
                f"min is {self.min!r} and max is {self.max!r}, expected a larger max with a finite difference"
            )

    def _require_ascending(self) -> None:
        if len(set(self.boundaries)) < 2:
            raise self._error(
                f"boundaries are {list(self.boundaries)!r}, expected at least two distinct ones"
            )
        for low, high in itertools.pairwise(self.boundaries):
            if not -math.inf < low <= high < math.inf:
                raise self._error(
                    f"boundary {high!r} follows {low!r}, expected finite numbers in ascending order"
                )

    def _error(self, fault: str) -> SchemaError:
        return SchemaError(f"dense column {self.name!r}: {fault}")


_ALL_SETTINGS = frozenset(itertools.chain.from_iterable(_SETTINGS.values()))
