"""Batches from samples that user code yields.

    a sample:  (label, dense, slots)
               label  0 or 1; None for no label
               dense  the unscaled numbers, which the schema scales; None or nan is missing, True is 1
               slots  for each slot one value, or a list of any number of values

Text and bytes are hashed with the slot's number, as by file readers; a whole number is a key, or what it was
in the data that a model was trained on (`SlotValues`). One kernel call hashes all values of a batch, because
a call per value would dominate the cost.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import hash_bytes
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.slot_values import AS_KEYS, Kind, SlotValues
from ctr_ps.ps_worker.data.user_code.data_generator import shown
from ctr_ps.ps_worker.data.user_code.salted_hash import require_no_salted_hash

Value = str | bytes | int
Sample = tuple[float | None, Sequence[float | None], Sequence[Value | Sequence[Value]]]

# Checked first, because isinstance with an abstract class is ten times slower.
_NUMBERS = (int, float, bool, np.bool_)
_LISTS = (list, tuple, np.ndarray)
_SEPARATORS = frozenset(b"|^;,")  # of lists in text
_TEXT, _KEY, _LIST = 1, 2, 4  # what the values of a slot were
_KINDS: tuple[tuple[int, Kind], ...] = ((_TEXT, "text"), (_KEY, "keys"), (_LIST, "lists"))


class SampleLoader:
    """Batches of the samples of a function; each iteration calls it again."""

    def __init__(
        self,
        samples: Callable[[], Iterable[Sample]] | Sequence[Sample],
        schema: Schema,
        *,
        batch_size: int,
    ) -> None:
        """Takes a function that returns samples, such as a generator function, or a sequence of them.

        Raises UsageError if `batch_size` is too small, the schema has a column of weights, or `samples` is an
        iterator, which only lasts for one pass, and DataError if the function uses `hash()`.
        """
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size!r}, expected at least 1")
        if schema.weight is not None:
            raise UsageError(
                f"the schema names {schema.weight!r} as the column of weights, but samples have none: read "
                "the data from files, or remove 'weight' from the schema"
            )
        if isinstance(samples, Iterator):
            raise UsageError(
                f"samples is {samples!r}, which can be iterated only once: pass the function that returns it"
            )
        if callable(samples):
            require_no_salted_hash(samples, "the function of samples")
        self._samples = samples
        self.schema = schema
        self.batch_size = batch_size
        self.slot_values = SlotValues()  # the kinds of values so far

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(seen=self.slot_values)

    def to_predict(self, meant: SlotValues) -> Iterator[Batch]:
        """Returns the batches whose values mean what they meant in training; see `batches_of_samples`."""
        return self._batches(meant=meant)

    def _batches(self, **values: SlotValues) -> Iterator[Batch]:
        samples = self._samples() if callable(self._samples) else self._samples
        return batches_of_samples(samples, self.schema, batch_size=self.batch_size, **values)


def batches_of_samples(
    samples: Iterable[Sample],
    schema: Schema,
    *,
    batch_size: int,
    seen: SlotValues | None = None,
    meant: SlotValues | None = None,
) -> Iterator[Batch]:
    """Yields samples in batches of `batch_size`, the last one of the remaining samples.

    `seen` is told what the values of slots are; `meant` is what they were in the data that the model was
    trained on, and are to mean here; None: whole numbers are keys. A DataError names the sample, the slot or
    dense column, and the invalid value.
    """

    def place(row: int) -> str:
        return f"sample {first + row}"

    columns, first = SampleColumns(schema, seen=seen, meant=meant), 1
    for number, sample in enumerate(samples, start=1):
        try:
            columns.add(sample)
        except DataError as error:
            raise DataError(f"sample {number}: {error}") from error
        if columns.size == batch_size:
            yield columns.batch(place)
            columns, first = SampleColumns(schema, seen=seen, meant=meant), number + 1
    if columns.size:
        yield columns.batch(place)


class SampleColumns:
    """The columns of a batch under construction; unusable after an error."""

    def __init__(
        self, schema: Schema, *, seen: SlotValues | None = None, meant: SlotValues | None = None
    ) -> None:
        self._schema = schema
        self._seen, self._meant = seen, meant
        self._kinds = [0] * len(schema.slots)
        self._meanings = [
            AS_KEYS if meant is None else meant.meaning(slot) for slot in schema.slots
        ]
        self._separators = [schema.split.get(slot, "").encode() for slot in schema.slots]
        self._labels: list[float | None] = []
        self._dense: list[list[float]] = []
        self._keys: list[int] = []  # 0 for values to be hashed
        # values to be hashed, the numbers of their slots, and the positions of their keys
        self._texts: list[bytes] = []
        self._text_slots: list[int] = []
        self._text_positions: list[int] = []
        self._offsets = [0]

    @property
    def size(self) -> int:
        """Number of samples so far."""
        return len(self._labels)

    def add(self, sample: Sample) -> None:
        """Appends a sample; raises `DataError` if it is invalid."""
        try:
            label, dense, slots = sample
        except (TypeError, ValueError) as error:
            raise DataError(f"it is {shown(sample)}, expected (label, dense, slots)") from error
        self._add_label(label)
        self._add_dense(_list("dense numbers", dense, len(self._schema.dense)))
        values = _list("slots", slots, len(self._schema.slots))
        for slot, value in enumerate(values, start=1):
            self._add_slot(slot, value)

    def batch(self, place: Callable[[int], str]) -> Batch:
        """Returns the samples as a batch; a DataError names the `place` of a number beyond float32."""
        if self._seen is not None:
            for slot, found in zip(self._schema.slots, self._kinds, strict=True):
                self._seen.note(slot, *(name for bit, name in _KINDS if found & bit))
        keys = np.array(self._keys, np.uint64)
        _hash_values(
            np.frombuffer(b"".join(self._texts), np.uint8),
            np.cumsum([0, *map(len, self._texts)], dtype=np.int64),
            np.array(self._text_slots, np.int64),
            np.array(self._text_positions, np.int64),
            keys,
        )
        has_labels = self._labels[0] is not None
        numbers = np.array(self._dense, np.float64).reshape(self.size, len(self._schema.dense))
        dense = self._schema.scale_dense(numbers)
        for row, fault in self._schema.overflows(numbers, dense).items():
            raise DataError(f"{place(row)}: {fault}")
        return Batch(
            labels=np.array(self._labels, np.float32) if has_labels else None,
            dense=dense,
            keys=keys,
            offsets=np.array(self._offsets, np.int32),
            num_slots=len(self._schema.slots),
        )

    def _add_label(self, label: Any) -> None:
        if label is not None and not (isinstance(label, Real | np.bool_) and label in (0, 1)):
            raise DataError(f"the label is {shown(label)}, expected 0, 1 or None")
        if self._labels and (label is None) != (self._labels[0] is None):
            raise DataError(
                f"the label is {shown(label)}, but that of the previous sample is {self._labels[-1]!r}: "
                "give all samples a label, or none"
            )
        self._labels.append(None if label is None else float(label))

    def _add_dense(self, numbers: Iterable[Any]) -> None:
        row = []
        for column, number in zip(self._schema.dense, numbers, strict=True):
            if type(number) in _NUMBERS or isinstance(number, Real):
                row.append(_float(column.name, number))
            elif number is None:
                row.append(math.nan)
            else:
                raise DataError(
                    f"dense column {column.name!r} is {shown(number)}, expected a number"
                )
        self._dense.append(row)

    def _add_slot(self, slot: int, value: Any) -> None:
        texts, keys, meaning, kinds = self._texts, self._keys, self._meanings[slot - 1], 0
        number = self._schema.slot_numbers[slot - 1]
        if isinstance(value, str | bytes) and value:
            text = self._encoded(slot, value) if isinstance(value, str) else value
            if separator := self._separators[slot - 1]:
                value = [each for each in text.split(separator) if each]
            elif self._meant is not None and not _SEPARATORS.isdisjoint(text):
                self._meant.doubt_text(self._schema.slots[slot - 1], shown(value))
        is_list = isinstance(value, _LISTS)
        for each in value if is_list else (value,):
            if isinstance(each, str | bytes):
                if each:
                    kinds |= _TEXT
                    if meaning.text_fault:
                        raise self._fault(slot, each, meaning.text_fault)
                texts.append(self._encoded(slot, each) if isinstance(each, str) else each)
            elif isinstance(each, bool) or not isinstance(each, Integral):
                raise self._fault(
                    slot,
                    each,
                    "expected text, bytes or a whole number; '' is a missing value, [] no values",
                )
            elif meaning.whole_number == "digits":
                texts.append(str(int(each)).encode())
            elif meaning.number_fault:
                raise self._fault(slot, each, meaning.number_fault)
            elif 0 <= int(each) < 2**64:
                kinds |= _KEY
                keys.append(int(each))
                continue
            else:
                raise self._fault(slot, each, "expected text, bytes or a key from 0 to 2**64 - 1")
            self._text_slots.append(number)
            self._text_positions.append(len(keys))
            keys.append(0)  # which `batch` computes
        self._kinds[slot - 1] |= kinds | (_LIST if is_list else 0)
        self._offsets.append(len(keys))

    def _fault(self, slot: int, value: Any, why: str) -> DataError:
        name = self._schema.slots[slot - 1]
        return DataError(f"slot {slot} ({name!r}) has {shown(value)}, {why}")

    def _encoded(self, slot: int, text: str) -> bytes:
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise self._fault(slot, text, "which cannot be encoded as UTF-8") from error


def _list(name: str, values: Any, length: int) -> Iterable[Any]:
    if not isinstance(values, _LISTS):
        raise DataError(f"its {name} are {shown(values)}, expected a list of {length}")
    if len(values) != length:
        raise DataError(f"it has {len(values)} {name}, expected {length} as in the schema")
    return values


def _float(name: str, number: Any) -> float:
    try:
        value = float(number)
    except OverflowError as error:
        raise DataError(f"dense column {name!r} has a number too large for a float64") from error
    if math.isinf(value):
        raise DataError(f"dense column {name!r} is {value}; an unknown number is None or nan")
    return value


@kernel
def _hash_values(
    data: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    slots: NDArray[np.int64],
    positions: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> None:
    """Writes the key of each value `data[bounds[i] : bounds[i + 1]]` to `keys[positions[i]]`."""
    for i in range(slots.size):
        keys[positions[i]] = hash_bytes(data, bounds[i], bounds[i + 1], slots[i])
