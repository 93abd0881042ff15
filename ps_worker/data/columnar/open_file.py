"""Opening of columnar files, which need random access, and checks of what is read from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import orc

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.columnar.column_values import is_list_type
from ctr_ps.ps_worker.data.files.listing import is_url, open_file

_Integers = NDArray[np.integer[Any]]

_BOUNDS: dict[pa.DataType, np.dtype[Any]] = {
    pa.string(): np.dtype(np.int32),
    pa.binary(): np.dtype(np.int32),
    pa.large_string(): np.dtype(np.int64),
    pa.large_binary(): np.dtype(np.int64),
}
"""Types of text, by that of the bounds of their values."""


@contextmanager
def open_columnar(path: str, format_name: str) -> Iterator[pa.NativeFile]:
    """Opens a file for random access, and translates Arrow's errors inside the `with` block.

    Raises a DataError that names an unreadable file, or one that is not of its format.
    """
    try:
        with pa.PythonFile(open_file(path), "r") if is_url(path) else pa.OSFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path!r}: No such file or directory") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one of a name
        raise DataError(
            f"{path}: not a valid {format_name} file, or it cannot be read: copy or write it again ({error})"
        ) from error


def fields_of(path: str, format: str) -> pa.Schema:
    """Returns the columns and metadata of a file of format "parquet" or "orc"; raises DataError."""
    with open_columnar(path, format.capitalize()) as source:
        return (
            pq.ParquetFile(source).schema_arrow
            if format == "parquet"
            else orc.ORCFile(source).schema
        )


def require_valid(rows: pa.RecordBatch) -> None:
    """Checks that indices of dictionaries and bounds of lists and text are within their values.

    Neither Arrow's readers nor its functions check them. Raises a pa.ArrowInvalid that names the column.
    """
    for name, array in zip(rows.schema.names, rows.columns, strict=True):
        try:
            _require_valid(array)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"column {name!r}: {error}") from error


def _require_valid(array: pa.Array) -> None:
    kind = array.type
    array.validate()  # sizes of buffers, the first and the last bound
    if pa.types.is_dictionary(kind):
        _require_indices(array)
        _require_valid(array.dictionary)
    elif is_list_type(kind) or pa.types.is_map(kind):
        if hasattr(array, "sizes"):  # a view
            starts = array.offsets.to_numpy().astype(np.int64)
            _require_bounds(starts, starts + array.sizes.to_numpy(), len(array.values))
        elif not pa.types.is_fixed_size_list(kind):
            bounds = array.offsets.to_numpy()
            _require_bounds(bounds[:-1], bounds[1:], len(array.values))
        _require_valid(array.values)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            _require_valid(array.field(index))
    elif kind in _BOUNDS and len(array):
        _, memory, data = array.buffers()
        bounds = _numbers(memory, _BOUNDS[kind], array.offset, len(array) + 1)
        _require_bounds(bounds[:-1], bounds[1:], 0 if data is None else data.size)


def _require_indices(array: pa.DictionaryArray) -> None:
    indices, size = array.indices, len(array.dictionary)
    if not len(indices):  # its buffer may be None
        return
    kind = np.dtype(indices.type.to_pandas_dtype())
    numbers = _numbers(indices.buffers()[1], kind, indices.offset, len(indices))
    # Negative ones are large without a sign. Those of nulls may be anything, and are 0 mostly.
    if numbers.view(f"u{kind.itemsize}").max() < size:
        return
    low, high = pc.min_max(indices).as_py().values()  # but of nulls
    if high is not None and not 0 <= low <= high < size:
        wrong = low if low < 0 else high
        raise pa.ArrowInvalid(f"index {wrong} into a dictionary of {size} values")


def _numbers(buffer: pa.Buffer, kind: np.dtype[Any], start: int, size: int) -> _Integers:
    return np.frombuffer(buffer, kind, size, start * kind.itemsize)


def _require_bounds(starts: _Integers, stops: _Integers, size: int) -> None:
    ascending = bool((starts <= stops).all())
    if not ascending or starts.min(initial=0) < 0 or stops.max(initial=0) > size:
        raise pa.ArrowInvalid(f"bounds of values that are not within their {size}")
