"""Tensors of the Open Inference Protocol, and the samples that they are.

    a dense column    FP32, FP64, BOOL or an integer type, [N] or [N, 1]; nan: missing
    a vector          likewise, [N, width]; or each of its numbers as a dense column, `name[0]` and so on
    a slot            BYTES or an integer type, [N] or [N, L]
    NAME.lengths      an integer type, [N], beside the tensor [N, L] of a slot; may be left out

Each column of the model's schema is a tensor of its name. Texts are hashed as the data's were; what whole
numbers are, the checkpoint says (`SlotValues`). Of [N] each row has one value as it stands in the data, where
the empty text is a missing one. Of [N, L] a row has its first NAME.lengths values, -1: a missing list;
without lengths all but the empty texts at its end, and if nothing is left, no values where the data had
lists, else a missing one. Each text of a slot in `split` of the schema is split, and only empty ones are a
missing value. So what a row means never depends on L, the length of the longest row of a request.
"""

import contextlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.user_code.samples import Sample, Value

DTYPES: Mapping[str, np.dtype[Any]] = {
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BOOL": np.dtype("?"),
}
BYTES = "BYTES"
EXTENSIONS = ("binary_tensor_data",)
"""Of the protocol, that are understood: both ways take and give tensors as bytes."""

MAX_DIMENSIONS = 3  # of which a column takes two: an error about it says more
MAX_SHOWN = 5  # tensors in an error
LENGTHS = ".lengths"  # ends the name of a tensor of numbers of values

PROBABILITY = "probability"
"""Name of the output of a model with one label; those of several have the names of its tasks."""

_ALLOWED: Mapping[str, set[type]] = {"f": {int, float, bool, type(None)}, "b": {bool}}
"""Types of the values of a tensor in JSON, by kind of numpy's type; of others whole numbers."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a column: all values, row by row, as numbers of the datatype or a list of bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | Sequence[bytes]


@dataclass(frozen=True, slots=True)
class TensorType:
    """What a model takes or gives under a name; -1 in a shape: any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def inputs_of(schema: Schema) -> list[TensorType]:
    """Returns the tensors that a model of this schema takes."""
    vectors = schema.vectors
    parts = {f"{name}[{i}]" for name, width in vectors.items() for i in range(width)}
    names = [column.name for column in schema.dense if column.name not in parts]
    dense = [TensorType(name, "FP32", (-1,)) for name in names]
    dense += [TensorType(name, "FP32", (-1, width)) for name, width in vectors.items()]
    return dense + [TensorType(slot, BYTES, (-1, -1)) for slot in schema.slots]


def outputs_of(tasks: Sequence[str]) -> list[TensorType]:
    """Returns the tensors that a model of these tasks gives; of none: with one label."""
    return [TensorType(name, "FP32", (-1,)) for name in tasks or (PROBABILITY,)]


def tensor_of_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """Returns a tensor whose values are bytes as the protocol lays them out.

    Raises DataError if they are of another number than the shape, or the type is none.
    """
    count = _count(name, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _texts_of_raw(name, raw, count))
    dtype = _dtype(name, datatype)
    if len(raw) != count * dtype.itemsize:
        raise DataError(
            f"tensor {name!r} has {len(raw)} bytes, expected {count * dtype.itemsize} for shape "
            f"{list(shape)} of {datatype}"
        )
    if dtype.kind == "b" and raw.strip(b"\0\1"):
        raise DataError(f"tensor {name!r} is {datatype}, but has a byte that is neither 0 nor 1")
    return Tensor(name, datatype, tuple(shape), np.frombuffer(raw, dtype))


def tensor_of_values(
    name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]
) -> Tensor:
    """Returns a tensor of values in a flat sequence.

    Raises DataError if they are of another number or type, or the type is none.
    """
    count = _count(name, shape)
    if len(values) != count:
        raise DataError(
            f"tensor {name!r} has {len(values)} values, expected {count} for shape {list(shape)}"
        )
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), [_text(name, value) for value in values])
    dtype = _dtype(name, datatype)
    # Numbers alone: numpy would take 1.7 and "12" for whole ones. None is missing: JSON has no nan.
    allowed = _ALLOWED.get(dtype.kind, {int})
    for each in values:
        if type(each) not in allowed:
            raise DataError(
                f"tensor {name!r} has the value {str(each)[:100]!r}, expected {datatype}"
            )
    try:
        numbers = np.array(values, dtype if dtype.kind != "f" else np.float64)
    except (TypeError, OverflowError) as error:
        raise DataError(f"tensor {name!r} has values that are not {datatype}: {error}") from error
    return Tensor(name, datatype, tuple(shape), numbers.astype(dtype))


def raw_of(values: NDArray[np.float32]) -> bytes:
    """Returns the bytes of an output."""
    return values.astype("<f4").tobytes()


def samples_of(
    tensors: Sequence[Tensor], schema: Schema, *, max_rows: int, values: SlotValues
) -> list[Sample]:
    """Returns the samples of tensors in any order: one a column, and lengths.

    `values` are what those of slots were in the training data. Raises DataError if a tensor is missing,
    unknown, twice, or does not fit its column or the others.
    """
    vectors = schema.vectors
    tensors = [part for tensor in tensors for part in _parts(tensor, vectors.get(tensor.name))]
    by_name = {tensor.name: tensor for tensor in tensors}
    _require_columns(tensors, by_name, schema)
    num_rows = _num_rows(tensors, max_rows)
    dense = [_numbers(by_name[column.name], num_rows) for column in schema.dense]
    lengths = {
        name.removesuffix(LENGTHS): by_name[name] for name in by_name.keys() - set(schema.features)
    }
    slots = [
        _values(
            by_name[slot],
            lengths.get(slot),
            has_lists=values.has_lists(slot),
            separator=schema.split.get(slot),
        )
        for slot in schema.slots
    ]
    return [
        (None, [column[row] for column in dense], [column[row] for column in slots])
        for row in range(num_rows)
    ]


def _parts(tensor: Tensor, width: int | None) -> list[Tensor]:
    """Returns the numbers of a vector of this width as dense columns; None: the tensor itself."""
    if width is None:
        return [tensor]
    if tensor.datatype == BYTES or tensor.shape[1:] != (width,):
        raise DataError(
            f"the tensor of vector {tensor.name!r} is {tensor.datatype} of shape {list(tensor.shape)}, "
            f"expected numbers of shape [N, {width}]"
        )
    columns, rows = np.asarray(tensor.values).reshape(tensor.shape).T, tensor.shape[:1]
    return [Tensor(f"{tensor.name}[{i}]", tensor.datatype, rows, columns[i]) for i in range(width)]


def _require_columns(
    tensors: Sequence[Tensor], by_name: Mapping[str, Tensor], schema: Schema
) -> None:
    missing = [name for name in schema.features if name not in by_name]
    lengths = {name for slot in schema.slots if (name := f"{slot}{LENGTHS}") not in schema.features}
    unknown = sorted(by_name.keys() - set(schema.features) - lengths)
    if missing or unknown or len(by_name) < len(tensors):
        twice = sorted({each.name for each in tensors if by_name[each.name] is not each})
        faults = {"missing": missing, "unknown": unknown, "there twice": twice}
        raise DataError(
            "; ".join(f"{what}: {', '.join(names)}" for what, names in faults.items() if names)
            + ": send one tensor for each column of the model, see its metadata"
        )


def _num_rows(tensors: Sequence[Tensor], max_rows: int) -> int:
    rows = {tensor.name: tensor.shape[0] if tensor.shape else 0 for tensor in tensors}
    ((num_rows, _), *others) = Counter(rows.values()).most_common()
    if others:
        usual = next(name for name, number in rows.items() if number == num_rows)
        differ = [f"{name} {number}" for name, number in rows.items() if number != num_rows]
        more = f" and {len(differ) - MAX_SHOWN} more" if len(differ) > MAX_SHOWN else ""
        raise DataError(
            f"tensors have different numbers of rows: {usual} {num_rows}, but "
            f"{', '.join(differ[:MAX_SHOWN])}{more}"
        )
    if not 1 <= num_rows <= max_rows:
        raise DataError(
            f"the request has {num_rows} rows, expected 1 to {max_rows} (--max-rows): split larger requests"
        )
    return num_rows


def _numbers(tensor: Tensor, num_rows: int) -> list[float]:
    if tensor.datatype == BYTES or tensor.shape not in {(num_rows,), (num_rows, 1)}:
        raise DataError(
            f"the tensor of dense column {tensor.name!r} is {tensor.datatype} of shape {list(tensor.shape)}, "
            f"expected numbers of shape [{num_rows}] or [{num_rows}, 1]"
        )
    numbers: list[float] = np.asarray(tensor.values, np.float64).tolist()
    return numbers


def _values(
    tensor: Tensor, lengths: Tensor | None, *, has_lists: bool, separator: str | None
) -> Sequence[Value | list[Value]]:
    """Returns the values of a slot, row by row; see above."""
    num_rows = tensor.shape[0]
    if tensor.datatype in ("FP32", "FP64", "BOOL") or len(tensor.shape) not in (1, 2):
        raise DataError(
            f"the tensor of slot {tensor.name!r} is {tensor.datatype} of shape {list(tensor.shape)}, "
            f"expected {BYTES} or whole numbers of shape [{num_rows}] or [{num_rows}, L]"
        )
    values: list[Value] = (
        tensor.values.tolist() if isinstance(tensor.values, np.ndarray) else list(tensor.values)
    )
    if lengths is None and len(tensor.shape) == 1:
        return values  # of a split slot the text of a row, split as that in data
    width = tensor.shape[1] if len(tensor.shape) == 2 else 1
    rows = [values[row * width : (row + 1) * width] for row in range(num_rows)]
    if lengths is not None:
        numbers = _lengths(lengths, num_rows, width)
        return [
            b"" if n < 0 else _pieces(row[:n], separator)
            for row, n in zip(rows, numbers, strict=True)
        ]
    for row in rows:
        while row and row[-1] == b"":
            row.pop()
    has_lists = has_lists and not separator
    return [_pieces(row, separator) if row or has_lists else b"" for row in rows]


def _pieces(row: list[Value], separator: str | None) -> list[Value]:
    """Returns the values in the texts of a row."""
    if separator is None:
        return row
    texts = (each.split(separator.encode()) if isinstance(each, bytes) else [each] for each in row)
    return [piece for pieces in texts for piece in pieces if piece != b""]


def _lengths(tensor: Tensor, num_rows: int, width: int) -> list[int]:
    numbers = np.asarray(tensor.values)
    if numbers.dtype.kind not in "iu" or tensor.shape not in {(num_rows,), (num_rows, 1)}:
        raise DataError(
            f"tensor {tensor.name!r} is {tensor.datatype} of shape {list(tensor.shape)}, expected whole "
            f"numbers of shape [{num_rows}]"
        )
    wrong = numbers[(numbers < -1) | (numbers > width)]
    if wrong.size:
        raise DataError(
            f"tensor {tensor.name!r} has length {wrong[0]}, expected lengths from 0 to {width}, or -1 for "
            f"a missing list"
        )
    found: list[int] = numbers.tolist()
    return found


def _count(name: str, shape: Sequence[int]) -> int:
    """Returns the number of values; lengths are compared before they are multiplied, as they may be huge."""
    if len(shape) > MAX_DIMENSIONS or any(
        type(each) is not int or not 0 <= each <= MAX_MESSAGE_BYTES for each in shape
    ):
        raise DataError(
            f"tensor {name!r} has shape {str(list(shape))[:100]}, expected up to {MAX_DIMENSIONS} "
            f"dimensions, each 0 to {MAX_MESSAGE_BYTES}"
        )
    return prod(shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DTYPES:
        raise DataError(
            f"tensor {name!r} has datatype {datatype!r}, expected one of {', '.join((BYTES, *DTYPES))}"
        )
    return DTYPES[datatype]


def _text(name: str, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):  # halves of a pair
            return value.encode()
    raise DataError(
        f"tensor {name!r} has the value {str(value)[:100]!r}, expected text for {BYTES}"
    )


def _texts_of_raw(name: str, raw: bytes, count: int) -> list[bytes]:
    """Returns texts that each follow their length, as 4 bytes."""
    texts, at = [], 0
    for _ in range(count):
        stop = at + _LENGTH.size
        if stop > len(raw):
            break
        (length,) = _LENGTH.unpack_from(raw, at)
        texts.append(raw[stop : stop + length])
        at = stop + length
    if len(texts) != count or at != len(raw):
        raise DataError(
            f"tensor {name!r} has {len(raw)} bytes, expected the lengths and bytes of {count} texts"
        )
    return texts
