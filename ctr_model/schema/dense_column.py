"""Dense columns: a name, and the scaling of a number x to a model input, for many examples in one kernel.

    transform    model input                        settings
    none         (x - shift) / scale                shift, scale
    log1p        (f(x) - shift) / scale             shift, scale; f(x) = sign(x) log(1 + |x|)
    min_max      (x - min) / (max - min)            min, max
    quantile     rank of x among the boundaries     boundaries

The rank is piecewise linear: 0 below the first of n boundaries, i / (n - 1) at boundary i from 0, 1 above the
last. At a repeated boundary it is the rank of its last occurrence.
"""

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel


class SchemaError(ValueError):
    """Raised when a schema is invalid, cannot be read, or needs another version of this package."""


def list_entry(where: str, value: object) -> list[object]:
    """Returns `value` as a list."""
    if not isinstance(value, list | tuple):
        raise SchemaError(f"{where} is {value!r}, expected a list")
    return list(value)


def table_entry(where: str, value: object) -> Mapping[str, object]:
    """Returns `value`, a table of TOML."""
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where} is {value!r}, expected a table")
    return value


def text_entry(where: str, value: object) -> str:
    """Returns `value`, a non-empty string."""
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where} is {value!r}, expected a non-empty string")
    return value


def number_entry(where: str, value: object) -> float:
    """Returns `value` as a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SchemaError(f"{where} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError as error:  # an integer of more than 308 digits
        raise SchemaError(f"{where} is an integer too large for a float64") from error


def flag_entry(where: str, value: object) -> bool:
    """Returns `value`, a bool."""
    if not isinstance(value, bool):
        raise SchemaError(f"{where} is {value!r}, expected true or false")
    return value


def refuse_unknown_keys(where: str, entry: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses an unknown key; the error names the nearest known one."""
    for key in entry:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise SchemaError(f"{where}: unknown key {key!r}, did you mean {nearest!r}?")


def refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    """Refuses a repeated name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(f"{kind} {name!r} is listed twice, expected unique names")
        seen.add(name)


Transform = Literal["none", "log1p", "min_max", "quantile"]

_MAX_WIDTH = 65_536
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
        for name in ("shift", "scale", "min", "max", "missing"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise self._error(f"{name} is {number!r}, not finite")
        if abs(self.missing) > FLOAT32_MAX:
            raise self._error(f"missing is {self.missing!r}, expected a number that fits a float32")
        if self.scale == 0:
            raise self._error("scale is 0, but values are divided by it: give another number")
        if self.transform == "min_max":
            for name in ("min", "max"):
                if getattr(self, name) is None:
                    raise self._error(
                        f"transform 'min_max' needs min and max, and {name} is missing"
                    )
            if not 0 < self.span[1] < math.inf:
                raise self._error(
                    f"min is {self.min!r} and max is {self.max!r}, expected a larger max with a finite "
                    f"difference"
                )
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

    @classmethod
    def list_from_dict(cls, entry: object) -> list[Self]:
        """Returns the column of an entry, or those of a vector, `name[0]` and so on, if it has a `width`."""
        if not isinstance(entry, Mapping) or "width" not in entry:
            return [cls.from_dict(entry)]
        column = cls.from_dict({key: each for key, each in entry.items() if key != "width"})
        width = entry["width"]
        if type(width) is not int or not 1 <= width <= _MAX_WIDTH:
            raise column._error(
                f"width is {width!r}, expected a whole number from 1 to {_MAX_WIDTH}"
            )
        return [replace(column, name=f"{column.name}[{index}]") for index in range(width)]

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
                    f"{field.name} is {getattr(self, field.name)!r}, but transform {self.transform!r} uses "
                    f"only {' and '.join(own)}"
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


_LINEAR, _LOG1P, _QUANTILE = range(3)

# Most numbers of click logs are small counts: the scaled values of 0, 1, ... below this are precomputed,
# which takes a third of the time for logarithms and a tenth for ranks.
_SMALL = 1024


class _Columns(NamedTuple):
    """Dense columns as arrays for the kernel, C of them."""

    kinds: NDArray[np.int64]
    shifts: NDArray[np.float64]
    scales: NDArray[np.float64]
    missing: NDArray[np.float32]
    indicators: NDArray[np.int64]  # the input of each one's indicator; -1: it has none
    starts: NDArray[np.int64]  # int64[C + 1], of each one's boundaries
    boundaries: NDArray[np.float64]


class DenseScaling:
    """The transforms of dense columns; `width` inputs. Thread-safe."""

    def __init__(self, columns: Sequence[DenseColumn]) -> None:
        spans = np.array([column.span for column in columns], np.float64).reshape(-1, 2)
        has_indicator = np.array([column.missing_indicator for column in columns], np.bool_)
        boundaries = [boundary for column in columns for boundary in column.boundaries]
        lengths = [len(column.boundaries) for column in columns]
        kinds = {"log1p": _LOG1P, "quantile": _QUANTILE}
        self.width = len(columns) + int(has_indicator.sum())
        self._columns = _Columns(
            kinds=np.array([kinds.get(each.transform, _LINEAR) for each in columns], np.int64),
            shifts=spans[:, 0].copy(),
            scales=spans[:, 1].copy(),
            missing=np.array([column.missing for column in columns], np.float32),
            indicators=np.where(has_indicator, len(columns) - 1 + has_indicator.cumsum(), -1),
            starts=np.cumsum([0, *lengths], dtype=np.int64),
            boundaries=np.array(boundaries, np.float64),
        )
        self._small: NDArray[np.float32] | None = None

    def scale(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns float32[N, width] for `values` float64[N, number of columns], nan where missing."""
        num_columns = len(self._columns.kinds)
        if values.ndim != 2 or values.shape[1] != num_columns:
            raise ValueError(
                f"the numbers have shape {values.shape!r}, expected {num_columns} columns"
            )
        # Lazy, as many schemas never scale. Two threads may both compute it.
        if self._small is None:
            none = np.empty((0, num_columns), np.float32)
            counts = np.arange(_SMALL, dtype=np.float64).repeat(num_columns)
            scaled = self._scaled(counts.reshape(_SMALL, -1), none)
            self._small = np.ascontiguousarray(scaled[:, :num_columns])
        return self._scaled(np.ascontiguousarray(values, np.float64), self._small)

    def _scaled(
        self, values: NDArray[np.float64], small: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        scaled = np.empty((len(values), self.width), np.float32)
        _scale(values, self._columns, small, scaled)
        return scaled


@kernel
def _rank(x: float, boundaries: NDArray[np.float64], start: int, stop: int) -> float:
    """Returns the rank in [0, 1] of x among `boundaries[start:stop]`, ascending."""
    if x < boundaries[start]:
        return 0.0
    if x >= boundaries[stop - 1]:
        return 1.0
    low, high = start, stop - 1  # boundaries[low] <= x < boundaries[high]
    while high - low > 1:
        middle = (low + high) // 2
        if boundaries[middle] <= x:
            low = middle
        else:
            high = middle
    between = (x - boundaries[low]) / (boundaries[high] - boundaries[low])
    return float((low - start + between) / (stop - 1 - start))


@kernel
def _transformed(x: float, columns: _Columns, column: int) -> np.float32:
    """Returns the model input for x, in a column."""
    if columns.kinds[column] == _LOG1P:
        x = np.copysign(np.log1p(np.abs(x)), x)
    elif columns.kinds[column] == _QUANTILE:
        x = _rank(x, columns.boundaries, columns.starts[column], columns.starts[column + 1])
    return np.float32((x - columns.shifts[column]) / columns.scales[column])


@kernel
def _scale(
    values: NDArray[np.float64],
    columns: _Columns,
    small: NDArray[np.float32],
    scaled: NDArray[np.float32],
) -> None:
    """Overwrites `scaled` float32[N, width]; `small` float32[n, C] holds the scaled 0, ..., n - 1."""
    for row in range(len(values)):
        for column in range(len(columns.kinds)):
            x = values[row, column]
            is_missing = np.isnan(x)
            if columns.indicators[column] >= 0:
                scaled[row, columns.indicators[column]] = np.float32(is_missing)
            if is_missing:
                scaled[row, column] = columns.missing[column]
            elif 0.0 <= x < len(small) and x == np.floor(x):
                scaled[row, column] = small[int(x), column]
            else:
                scaled[row, column] = _transformed(x, columns, column)
