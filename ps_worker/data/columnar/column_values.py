"""Column values: Arrow arrays to numbers (float64) and to keys of a slot (uint64).

Kernels read an array's buffers: data, bounds of the values in the data, and validity, a bitmap with 1 for
values that are not null, empty if none is null. An array may be a slice, so offsets apply.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import GROUP_SLOT
from ctr_ps.ctr_model.features import hash_bytes, key_of
from ctr_ps.ctr_model.jit import kernel

# Read-only like Arrow's buffers, so that kernels are compiled for one type only.
_NO_BYTES = np.frombuffer(b"", np.uint8)

_LARGE_TEXTS = frozenset({pa.lib.Type_LARGE_STRING, pa.lib.Type_LARGE_BINARY})
_VIEWS = frozenset(
    {pa.lib.Type_STRING_VIEW, pa.lib.Type_BINARY_VIEW, pa.lib.Type_FIXED_SIZE_BINARY}
)
_PLAIN_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_TEXTS = _LARGE_TEXTS | _VIEWS | {pa.lib.Type_STRING, pa.lib.Type_BINARY}
# The null type, of a column without any value, is read like an integer.
_INTEGERS = frozenset(
    {kind.id for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())}
    | {kind.id for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.null())}
)
_OTHER_NUMBERS = frozenset(
    {kind.id for kind in (pa.float16(), pa.float32(), pa.float64(), pa.bool_())}
    | {pa.lib.Type_DECIMAL32, pa.lib.Type_DECIMAL64, pa.lib.Type_DECIMAL128, pa.lib.Type_DECIMAL256}
)
_LISTS = frozenset(
    {pa.lib.Type_LIST, pa.lib.Type_LARGE_LIST, pa.lib.Type_FIXED_SIZE_LIST}
    | {pa.lib.Type_LIST_VIEW, pa.lib.Type_LARGE_LIST_VIEW}
)

NUMBER = r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|(?i:nan))$"
"""Text that is read as a number."""

WHOLE = r"^-?(0|[1-9]\d*)$"
"""Whole numbers as they are written in one way only."""


_LEAST = re.compile(r"(.+?)\s*(>=?)\s*([-+]?\d+(?:\.\d+)?)")

TIME_PARTS = ("hour", "weekday")
"""What a dotted name may have of a time."""

KeyColumn = Callable[[int, int, int, NDArray[np.uint64]], None]
"""One key for each of N values: with start, stop, column and keys writes those of the values [start, stop) to
`keys[:, column]`."""


@dataclass(frozen=True, slots=True)
class KeyLists:
    """Any number of keys for each of N rows: row `i` owns `keys[bounds[i] : bounds[i + 1]]`."""

    keys: NDArray[np.uint64]
    bounds: NDArray[np.int64]


def is_number_type(kind: pa.DataType) -> bool:
    """Whether `numbers` reads this type without parsing text."""
    if pa.types.is_dictionary(kind):
        return is_number_type(kind.value_type)
    return kind.id in _INTEGERS | _OTHER_NUMBERS


def is_slot_type(kind: pa.DataType) -> bool:
    """Whether `slot_keys` reads this type."""
    return type_of_values(kind).id in _TEXTS | _INTEGERS


def type_of_values(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values in lists, dictionaries or lists of these; of others the type itself."""
    if is_list_type(kind):
        kind = kind.value_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_list_type(kind: pa.DataType) -> bool:
    """Whether a row of this type holds any number of values."""
    return kind.id in _LISTS


def is_text_type(kind: pa.DataType) -> bool:
    """Whether values of this type are text or bytes."""
    return kind.id in _TEXTS


def flat(table: Any, vectors: Mapping[str, int] | None = None) -> Any:
    """Returns a table, a record batch or a schema with the fields of structs as columns: `device.os`.

    Numbers in lists are columns besides, `name[0]` and so on, of `vectors` by name and width; infinite in a
    list of another length.
    """
    vectors = vectors or {}
    if isinstance(table, pa.Schema):
        return flat(table.empty_table(), vectors).schema.with_metadata(table.metadata)
    if not vectors and not any(map(pa.types.is_struct, table.schema.types)):
        return table
    names, arrays = list[str](), list[Any]()

    def add(name: str, array: Any) -> None:
        if not pa.types.is_struct(array.type):
            names.append(name)
            arrays.append(array)
        for index in range(array.type.num_fields if pa.types.is_struct(array.type) else 0):
            # Null where the struct is.
            add(f"{name}.{array.type.field(index).name}", pc.struct_field(array, [index]))

    for name, array in zip(table.schema.names, table.columns, strict=True):
        add(name, array)
    for name, width in vectors.items():
        array = arrays[names.index(name)] if name in names else None
        if array is None:
            continue
        if pa.types.is_null(array.type):
            names += [f"{name}[{index}]" for index in range(width)]
            arrays += [array] * width
        elif is_list_type(array.type) and is_number_type(array.type.value_type):
            names += [f"{name}[{index}]" for index in range(width)]
            arrays += map(pa.array, _matrix(array, width).T)
    return (
        type(table).from_arrays(arrays, names=names).replace_schema_metadata(table.schema.metadata)
    )


def times_in(wanted: Iterable[str], fields: pa.Schema) -> dict[str, str]:
    """Returns the names that are `hour` or `weekday` of a time or text in a file, with its column.

    Also labels as `rating >= 4`, of numbers or text.
    """
    found, names = {}, fields.names
    for name in wanted:
        least = _LEAST.fullmatch(name)
        column, _, part = name.rpartition(".")
        column = least[1] if least else column
        is_derived = (least or part in TIME_PARTS) and name not in names
        if is_derived and names.count(column) == 1:
            kind = fields.field(column).type
            is_text = is_text_type(type_of_values(kind)) and not is_list_type(kind)
            is_time = pa.types.is_timestamp(kind) or pa.types.is_null(kind)
            is_time |= pa.types.is_date(kind) and part == "weekday"
            if is_text or (is_number_type(kind) if least else is_time):
                found[name] = column
    return found


def with_times(table: Any, times: Mapping[str, str]) -> Any:
    """Returns a record batch or a schema with the columns of `times_in`, int64; -1 of other text.

    Times with a zone or an offset are taken in UTC, others as they are. Monday is 0.
    """
    if isinstance(table, pa.Schema):
        return pa.schema([*table, *((name, pa.int64()) for name in times)], table.metadata)
    for name, column in times.items():
        values, least = table.column(column), _LEAST.fullmatch(name)
        if is_list_type(values.type):
            part = pa.repeat(pa.scalar(-1), len(values))
        else:
            part = _labels(values, least) if least else _time_part(values, name.endswith("hour"))
        table = table.append_column(name, part)
    return table


def _labels(array: pa.Array, least: re.Match[str]) -> pa.Array:
    values, bound = numbers(array), float(least[3])
    labels = (values > bound) | ((values == bound) & (least[2] == ">="))
    return pa.array(np.where(np.isinf(values), -1, labels), pa.int64(), mask=np.isnan(values))


def _time_part(times: pa.Array, is_hour: bool) -> pa.Array:
    if pa.types.is_dictionary(times.type):
        return _time_part(times.dictionary, is_hour).take(times.indices)
    if is_text_type(times.type):
        texts = times.cast(pa.large_binary()).to_pylist()
        found = {text: _part_of_text(text, is_hour) for text in {*texts} if text}
        return pa.array([found.get(text) for text in texts], pa.int64())
    unit = times.type.unit if pa.types.is_timestamp(times.type) else "s"
    times = times.cast(pa.timestamp(unit))  # in UTC, if there is a zone
    return pc.hour(times) if is_hour else pc.day_of_week(times)


def _part_of_text(text: bytes, is_hour: bool) -> int:
    try:
        time = datetime.fromisoformat(text.decode())
        time = time.astimezone(UTC) if time.tzinfo else time
    except (ValueError, OverflowError):
        return -1
    return time.hour if is_hour else time.weekday()


def _matrix(lists: pa.Array, width: int) -> NDArray[np.float64]:
    """Returns lists of numbers as float64[N, width]; nan for null, inf for a list of another length."""
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), -1).to_numpy(zero_copy_only=False)
    found = np.full((len(lists), width), np.inf)
    found[lengths < 0] = np.nan
    is_kept = np.repeat(lengths == width, np.maximum(lengths, 0))
    found[lengths == width] = numbers(lists.flatten())[is_kept].reshape(-1, width)
    return found


def without_views(array: pa.Array) -> pa.Array:
    """Returns text and bytes as Arrow's functions take them: most do not take views, which polars writes."""
    kind = array.type
    if pa.types.is_dictionary(kind) and kind.value_type in _PLAIN_VIEWS:
        values = array.dictionary.cast(_PLAIN_VIEWS[kind.value_type])
        return pa.DictionaryArray.from_arrays(array.indices, values)
    if is_list_type(kind) and kind.value_type in _PLAIN_VIEWS:
        return array.cast(pa.large_list(_PLAIN_VIEWS[kind.value_type]))
    return array.cast(_PLAIN_VIEWS[kind]) if kind in _PLAIN_VIEWS else array


def split_texts(array: pa.Array, separator: str | None) -> pa.Array:
    """Returns text as lists of the values between separators, without empty ones; other types as they are.

    Null and the empty text are missing, so they give null. Without a separator nothing is split.
    """
    if not separator:
        return array
    if pa.types.is_dictionary(array.type) and is_text_type(array.type.value_type):
        return split_texts(array.dictionary, separator).take(array.indices)
    if not is_text_type(array.type):
        return array
    text = without_views(array).cast(pa.large_binary())
    text = pc.if_else(pc.equal(pc.binary_length(text), 0), None, text)
    lists = pc.split_pattern(text, separator)
    values = lists.flatten()
    is_value = pc.not_equal(pc.binary_length(values), 0)
    # Positions of the lists in the values that remain.
    kept = np.zeros(len(values) + 1, np.int64)
    np.cumsum(is_value.to_numpy(zero_copy_only=False), out=kept[1:])
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    bounds = kept[np.concatenate([[0], np.cumsum(lengths)])]
    return pa.LargeListArray.from_arrays(
        pa.array(bounds), values.filter(is_value), mask=pc.is_null(text)
    )


def numbers(array: pa.Array) -> NDArray[np.float64]:
    """Returns float64[N], nan where `array` is null; text is parsed, invalid text is inf."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_text_type(array.type):
        array = _parsed(array)
    elif not pa.types.is_float64(array.type):
        # Integers beyond 2^53 are rounded, like those in text.
        array = array.cast(pa.float64(), safe=False)
    values: NDArray[np.float64] = array.to_numpy(zero_copy_only=False)  # null becomes nan
    return values


def texts(array: pa.Array) -> NDArray[np.object_]:
    """Returns object[N] of str, whole numbers as decimal digits; None where null, empty or not UTF-8."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    values: NDArray[np.object_] = np.empty(len(array), np.object_)
    if not is_text_type(array.type):
        array = array.cast(pa.string())
    values[:] = [_decoded(value) for value in array.cast(pa.binary()).to_pylist()]
    return values


def _decoded(value: bytes | None) -> str | None:
    try:
        return value.decode() or None if value is not None else None
    except UnicodeDecodeError:
        return None


def group_keys(array: pa.Array) -> NDArray[np.uint64]:
    """Returns the keys of a column of text or whole numbers in `GROUP_SLOT`; null is the missing value."""
    return written(_key_column(array, GROUP_SLOT), 0, len(array))


def written(column: KeyColumn, start: int, stop: int) -> NDArray[np.uint64]:
    """Returns the keys uint64[n] of the values [start, stop) of a column."""
    keys = np.empty((stop - start, 1), np.uint64)
    column(start, stop, 0, keys)
    return keys.reshape(-1)


def slot_keys(array: pa.Array, slot: int) -> KeyColumn | KeyLists:
    """Returns the keys of a column, `is_slot_type`, of slot number `slot`, from 1.

    Null, alone or in a list, gives the key of the missing value; an empty list has no keys.
    """
    if is_list_type(array.type):
        return _key_lists(array, slot, are_keys=False)
    return _key_column(array, slot)


def ready_keys(array: pa.Array, slot: int) -> KeyColumn | KeyLists:
    """Returns the keys in a column of uint64 or lists of them; null is the missing value of `slot`."""
    if is_list_type(array.type):
        return _key_lists(array, slot, are_keys=True)
    return _ready_column(array, slot)


def _parsed(array: pa.Array) -> pa.Array:
    text = array.cast(pa.binary())
    try:
        return text.cast(pa.float64())
    except pa.ArrowInvalid:  # does not say which value
        is_number = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(is_number, text, b"inf").cast(pa.float64())


def _key_column(array: pa.Array, slot: int) -> KeyColumn:
    if pa.types.is_dictionary(array.type):
        return _choices(array, slot)
    if array.type.id in _INTEGERS:
        array = array.cast(pa.string())  # decimal digits
    elif array.type.id in _VIEWS:
        array = array.cast(pa.binary())
    validity, bounds, data = array.buffers()
    bounds_type = np.int64 if array.type.id in _LARGE_TEXTS else np.int32
    num_bounds = len(array) + 1 if len(array) else 0  # Arrow may omit bounds of an empty array
    all_bounds = buffer_view(bounds, bounds_type, array.offset, num_bounds)
    bits, bytes_ = _bytes(validity if array.null_count else None), _bytes(data)

    def write(start: int, stop: int, column: int, keys: NDArray[np.uint64]) -> None:
        first_bit = array.offset + start
        _hash_values(bytes_, all_bounds[start : stop + 1], bits, first_bit, slot, column, keys)

    return write


def _choices(array: pa.DictionaryArray, slot: int) -> KeyColumn:
    indices = array.indices
    validity, memory = indices.buffers()
    kind = np.dtype(indices.type.to_pandas_dtype())
    all_indices = buffer_view(memory, kind, indices.offset, len(array))
    bits = _bytes(validity if indices.null_count else None)
    choices = written(_key_column(array.dictionary, slot), 0, len(array.dictionary))
    missing_key = np.uint64(key_of(slot, b""))

    def write(start: int, stop: int, column: int, keys: NDArray[np.uint64]) -> None:
        first_bit = indices.offset + start
        _gather_keys(choices, all_indices[start:stop], bits, first_bit, missing_key, column, keys)

    return write


def _ready_column(array: pa.Array, slot: int) -> KeyColumn:
    if array.null_count:
        array = array.fill_null(pa.scalar(key_of(slot, b""), pa.uint64()))
    ready = array.to_numpy(zero_copy_only=False)

    def write(start: int, stop: int, column: int, keys: NDArray[np.uint64]) -> None:
        keys[:, column] = ready[start:stop]

    return write


def _key_lists(array: pa.Array, slot: int, *, are_keys: bool) -> KeyLists:
    values = array.flatten()  # drops the values of null lists
    column = _ready_column(values, slot) if are_keys else _key_column(values, slot)
    keys = written(column, 0, len(values))
    lengths = pc.fill_null(pc.list_value_length(array), -1).to_numpy(zero_copy_only=False)
    is_null = lengths < 0
    bounds = np.zeros(len(array) + 1, np.int64)
    np.cumsum(np.where(is_null, 1, lengths), out=bounds[1:])
    if is_null.any():
        places = np.flatnonzero(is_null)
        keys = np.insert(keys, bounds[places] - np.arange(places.size), key_of(slot, b""))
    return KeyLists(keys, bounds)


def _bytes(buffer: pa.Buffer | None) -> NDArray[np.uint8]:
    return _NO_BYTES if buffer is None else np.frombuffer(buffer, np.uint8)


def buffer_view(
    buffer: pa.Buffer, kind: type[np.integer[Any]] | np.dtype[Any], start: int, size: int
) -> NDArray[np.integer[Any]]:
    """Returns the numbers [start, start + size) of a buffer, which may be None without any."""
    if size == 0:
        return np.frombuffer(b"", kind)
    return np.frombuffer(buffer, kind, size, start * np.dtype(kind).itemsize)


@kernel
def _is_null(validity: NDArray[np.uint8], bit: int) -> bool:
    return validity.size > 0 and (validity[bit >> 3] >> (bit & 7)) & 1 == 0


@kernel
def _hash_values(
    data: NDArray[np.uint8],
    bounds: NDArray[np.integer[Any]],
    validity: NDArray[np.uint8],
    first_bit: int,
    slot: int,
    column: int,
    keys: NDArray[np.uint64],
) -> None:
    """Writes the key of each value `data[bounds[i] : bounds[i + 1]]` to `keys[i, column]`."""
    for i in range(bounds.size - 1):
        stop = bounds[i] if _is_null(validity, first_bit + i) else bounds[i + 1]
        keys[i, column] = hash_bytes(data, bounds[i], stop, slot)


@kernel
def _gather_keys(
    choices: NDArray[np.uint64],
    indices: NDArray[np.integer[Any]],
    validity: NDArray[np.uint8],
    first_bit: int,
    missing_key: np.uint64,
    column: int,
    keys: NDArray[np.uint64],
) -> None:
    """Writes `choices[indices[i]]`, or `missing_key` for null, to `keys[i, column]`."""
    for i in range(indices.size):
        is_null = _is_null(validity, first_bit + i)
        keys[i, column] = missing_key if is_null else choices[indices[i]]
