"""The distinct values in a column of a slot, as the bytes that are hashed."""

import pyarrow as pa
import pyarrow.compute as pc

from ctr_ps.ps_worker.data.columnar.column_values import is_list_type, is_text_type


def distinct_values(array: pa.Array) -> pa.Array:
    """Returns the distinct values of a column (`is_slot_type`), or in its lists, in order of occurrence.

    They are bytes without nulls: text as it is, digits of whole numbers, and an empty value for a missing
    one.
    """
    if is_list_type(array.type):
        # A row without a list has the missing value.
        has_missing = array.null_count > 0
        values = _distinct(array.flatten())
        if has_missing:
            missing = pa.array([b""], values.type)
            values = pc.unique(pa.concat_arrays([values, missing]))
        return values
    return _distinct(array)


def _distinct(values: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        # Two entries of a dictionary may be equal, and some unused: decoded after most are gone.
        values = pc.unique(values).dictionary_decode()
    if not is_text_type(values.type):
        values = values.cast(pa.string())  # decimal digits
    is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    kind = pa.large_binary() if is_large else pa.binary()
    return pc.unique(values.cast(kind).fill_null(b""))
