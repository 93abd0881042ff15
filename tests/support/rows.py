"""Rows that contain their number, to trace them."""

import ctypes
import gc
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch

NUM_DENSE, NUM_SLOTS = 2, 3


def numbered_rows(
    numbers: NDArray[np.int64] | range, *, labels: bool = True, weights: bool = False
) -> Batch:
    """Returns a row for each number, with one key a slot; all columns follow from the number."""
    number = np.asarray(numbers, np.int64)
    keys = number.astype(np.uint64)[:, None] * np.uint64(10) + np.arange(NUM_SLOTS, dtype=np.uint64)
    return Batch(
        labels=(number % 2).astype(np.float32) if labels else None,
        dense=np.stack([number, -number], axis=1).astype(np.float32),
        keys=keys.reshape(-1),
        offsets=np.arange(number.size * NUM_SLOTS + 1, dtype=np.int32),
        num_slots=NUM_SLOTS,
        weights=(number / 4).astype(np.float32) if weights else None,
    )


def numbered_lists(numbers: NDArray[np.int64] | range) -> Batch:
    """Returns a row for each number, of which slot `s` has `(number + s) % 4` keys."""
    lists = [
        [number * 100 + slot * 10 + i for i in range((number + slot) % 4)]
        for number in (int(each) for each in numbers)
        for slot in range(NUM_SLOTS)
    ]
    single = numbered_rows(numbers)
    return Batch(
        labels=single.labels,
        dense=single.dense,
        keys=np.array([key for keys in lists for key in keys], np.uint64),
        offsets=np.cumsum([0, *map(len, lists)]).astype(np.int32),
        num_slots=NUM_SLOTS,
    )


def numbers_of(rows: Batch) -> NDArray[np.int64]:
    """Returns the numbers of rows, after a check of all columns."""
    numbers = rows.dense[:, 0].astype(np.int64)
    is_single = len(rows.keys) == rows.size * NUM_SLOTS
    has = {name: getattr(rows, name) is not None for name in ("labels", "weights")}
    expected = numbered_rows(numbers, **has) if is_single else numbered_lists(numbers)
    assert_same_rows(expected, rows)
    return numbers


def assert_same_rows(expected: Batch, actual: Batch) -> None:
    assert expected.row_columns().keys() == actual.row_columns().keys()
    for name in (*expected.row_columns(), "dense", "keys", "offsets"):
        np.testing.assert_array_equal(getattr(expected, name), getattr(actual, name), err_msg=name)
    assert expected.num_slots == actual.num_slots


def resident_bytes() -> int:
    """Returns the memory of this process, without freed blocks that the C allocator keeps.

    Workers and servers in the same process allow it up to 256 MiB (`keep_freed_memory`).
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
