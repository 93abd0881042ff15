"""Comparisons of a column with a value, as `event_time >= 2026-11-07`, by which rows are chosen."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
_FORM = re.compile(rf"\s*(.+?)\s*({'|'.join(_COMPARE)})\s*(.*?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a value compares so with another: as numbers, times or bytes of text; a missing one does not.

    Text is compared as numbers if `value` is one; other text then does not fulfil the condition.
    """

    column: str
    operator: str  # a key of `_COMPARE`
    value: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the condition in a text; raises UsageError."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(
                f"--where is {text!r}, expected a column, one of {' '.join(_COMPARE)}, and a value, as in "
                "'clicks > 0'"
            )
        return cls(*found.groups())

    def rows(self, array: pa.Array) -> NDArray[np.bool_]:
        """Returns whether each value fulfils it, bool[N]; UsageError if the value is of another type."""
        array = without_views(array)
        kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        if array.null_count == len(array):
            return np.zeros(len(array), np.bool_)
        is_text, other = is_text_type(kind), pa.scalar(self.value)
        try:
            if pa.types.is_timestamp(kind):
                array = array.cast(pa.timestamp(kind.unit))  # in UTC
                other = other.cast(array.type)
            elif is_text and not re.fullmatch(NUMBER, self.value):
                array, other = array.cast(pa.large_binary()), other.cast(pa.large_binary())
            elif is_text or is_number_type(kind):
                values = numbers(array)
                array = pa.array(values, mask=np.isnan(values) | (is_text & np.isinf(values)))
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
