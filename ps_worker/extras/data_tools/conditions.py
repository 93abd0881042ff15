"""Comparisons of a column with a value, as `event_time >= 2026-11-07`, by which rows are chosen."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.columnar.column_values import (
    NUMBER,
    is_number_type,
    is_text_type,
    numbers,
    without_views,
)

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    ">=": pc.greater_equal,
    "<=": pc.less_equal,
    "!=": pc.not_equal,
    "==": pc.equal,
    ">": pc.greater,
    "<": pc.less,
}
_FORM = re.compile(rf"""\s*(.+?)\s*({"|".join(_COMPARE)})\s*(["']?)(.*?)\3\s*""")
_WITH_OFFSET = re.compile(r".*:.*(Z|[+-][\d:]+)")


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a value compares so with another: as numbers, times or bytes of text; a missing one does not.

    Text is compared as numbers if `value` is one; other text then differs from it, and fulfils only `!=`.
    Times without an offset are in the zone of the column.
    """

    column: str
    operator: str  # a key of `_COMPARE`
    value: str

    def __post_init__(self) -> None:
        if self.operator not in ("==", "!=") and re.match(r"\d{4}-\d\d-\d\d", self.value):
            try:
                date.fromisoformat(self.value[:10])
            except ValueError as error:
                raise UsageError(f"{self.value!r} is no date: {error}") from error

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the condition in a text; raises UsageError."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(
                f"--where is {text!r}, expected a column, one of {' '.join(_COMPARE)}, and a value, as in "
                "'clicks > 0'"
            )
        return cls(found[1], found[2], found[4])

    def rows(self, array: pa.Array) -> NDArray[np.bool_]:
        """Returns whether each value fulfils it, bool[N]; UsageError if the value is of another type."""
        array = without_views(array)
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        kind = array.type
        if array.null_count == len(array):
            return np.zeros(len(array), np.bool_)
        is_text, other = is_text_type(kind), pa.scalar(self.value)
        try:
            if pa.types.is_timestamp(kind) and kind.tz:
                has_offset = _WITH_OFFSET.fullmatch(self.value)
                other = other.cast(kind if has_offset else pa.timestamp(kind.unit))
                if not has_offset:
                    other = pc.assume_timezone(other, kind.tz, ambiguous="earliest")
            elif is_text and not re.fullmatch(NUMBER, self.value):
                array, other = array.cast(pa.large_binary()), other.cast(pa.large_binary())
            elif is_text or is_number_type(kind):
                values = self._order(array, numbers(array))
                is_odd = is_text & (self.operator != "!=") & np.isinf(values)
                array = pa.array(values, mask=np.isnan(values) | is_odd)
                other = pa.scalar(float(self.value))
            else:
                other = other.cast(kind)
        except (pa.ArrowException, ValueError) as error:
            raise UsageError(
                f"column {self.column!r} is of type {kind}, which is not comparable with {self.value!r}"
            ) from error
        fulfil = pc.fill_null(_COMPARE[self.operator](array, other), False)
        rows: NDArray[np.bool_] = fulfil.to_numpy(zero_copy_only=False)
        return rows

    def _order(self, array: pa.Array, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns `values`, in whose place other numbers are that compare with the float of `value` exactly.

        Rounding keeps the order, so only what rounds to the same number as `value` is compared again.
        """
        rounded = float(self.value)
        if not 2**53 <= abs(rounded) < np.inf or pa.types.is_floating(array.type):
            return values
        exact, towards = Decimal(self.value), {-1: -np.inf, 0: rounded, 1: np.inf}
        ties = np.flatnonzero(values == rounded)
        texts = array.take(pa.array(ties)).cast(pa.string()).to_pylist()
        places = [towards[int(Decimal(text).compare(exact))] for text in texts]
        values = values.copy()
        values[ties] = np.nextafter(rounded, places)
        return values
