"""Times that a column holds as text or numbers: training never sees the values of later rows.

Hours of the day and days of the week come again; they are no times here.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ps_worker.data.columnar.column_values import numbers

_NAME = re.compile(
    r"(?i:(^|[^a-z])(ts|dt|ds|time|timestamp|date|datetime|day|hour|epoch|created|updated)([^a-z]|$))"
    r"|(?i:_at$|time$)|Time|Date|Day|Hour"
)
_DATE = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}([ T].*)?$|^\d{1,2}:\d{2}(:\d{2}.*)?$"
# YYYYMMDD or YYMMDD, then HH, MM and SS or fewer; a number lacks the zero of the years before 2010.
_DIGITS = (
    r"^(\d{1,2}|(19|20)\d\d)(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])"
    r"(([01]\d|2[0-3])([0-5]\d([0-5]\d)?)?)?$"
)
_MAX_DIGITS = 10**14
_FIRST, _LAST = 946_684_800, 4_102_444_800  # the years 2000 to 2100, in seconds
_UNITS = (1, 10**3, 10**6, 10**9)  # seconds, milli-, micro- and nanoseconds
_MOST = 0.8  # the others may be a word or a number for unknown times

_REMEDY = "make features of them, as the hour or the day of the week"


def why_text_is_time(name: str, values: pa.Array) -> str:
    """Returns the reason to leave out a column of text; "": most of its values are no times.

    Args:
        name: Of the column: digits are times only if it says so.
        values: Text or bytes without nulls.
    """
    is_date = pc.match_substring_regex(values.cast(pa.large_binary()), _DATE)
    if pc.mean(pc.cast(is_date, pa.float64())).as_py() >= _MOST:
        return f"times: {_REMEDY}"
    return why_numbers_are_times(name, numbers(values)) if _NAME.search(name) else ""


def why_numbers_are_times(name: str, present: NDArray[np.float64]) -> str:
    """Returns the reason to leave out a column of numbers; "": its name or most of them are not of times."""
    if not _NAME.search(name):
        return ""
    whole = present[(present >= 1) & (present < _MAX_DIGITS) & (present == np.floor(present))]
    digits = pa.array(whole.astype(np.int64)).cast(pa.string())
    num_times = pc.sum(pc.match_substring_regex(digits, _DIGITS)).as_py() or 0
    if num_times >= _MOST * present.size:
        return f"times in digits, as {digits[0]}: {_REMEDY}"
    for unit in _UNITS:
        if ((present >= _FIRST * unit) & (present <= _LAST * unit)).mean() >= _MOST:
            return f"times since 1970: {_REMEDY}"
    return ""
