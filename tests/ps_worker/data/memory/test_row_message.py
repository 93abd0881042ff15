"""Rows as bytes and back."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.ps_worker.data.global_shuffle import pack_rows, unpack_rows
from tests.support.rows import (
    NUM_DENSE,
    NUM_SLOTS,
    assert_same_rows,
    numbered_lists,
    numbered_rows,
)

WIDTHS = {"num_dense": NUM_DENSE, "num_slots": NUM_SLOTS}


@given(numbers=st.lists(st.integers(0, 10**6)), labels=st.booleans(), weights=st.booleans())
def test_rows_survive_the_way(numbers, labels, weights) -> None:
    for rows in (
        numbered_rows(numbers, labels=labels, weights=weights),
        numbered_lists(numbers),
    ):
        assert_same_rows(rows, unpack_rows(pack_rows(rows), **WIDTHS))


@pytest.mark.parametrize("num_others", [1, 3])
def test_other_labels_survive_the_way(num_others) -> None:
    others = np.arange(7 * num_others, dtype=np.float32).reshape(7, num_others) % 2
    rows = replace(numbered_rows(range(7), weights=True), other_labels=others)

    found = unpack_rows(pack_rows(rows), **WIDTHS)

    assert_same_rows(rows, found)
    np.testing.assert_array_equal(found.other_labels, others)


def test_columns_are_aligned() -> None:
    rows = unpack_rows(pack_rows(numbered_lists(range(7))), **WIDTHS)

    assert rows.labels is not None
    for column in (rows.keys, rows.dense, rows.labels):
        assert column.flags.aligned


@pytest.mark.parametrize(("num_dense", "num_slots"), [(NUM_DENSE + 1, NUM_SLOTS), (NUM_DENSE, 1)])
def test_rows_of_another_schema_are_refused(num_dense, num_slots) -> None:
    with pytest.raises(
        ProtocolError, match=f"received rows of 2 numbers and 3 slots, .* {num_dense} and"
    ):
        unpack_rows(pack_rows(numbered_rows(range(3))), num_dense=num_dense, num_slots=num_slots)


@pytest.mark.parametrize("length", [0, 31, 40, -1])
def test_truncated_bytes_are_refused(length) -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        unpack_rows(pack_rows(numbered_rows(range(3)))[:length], **WIDTHS)


def test_counts_that_wrap_around_are_refused() -> None:
    num_rows = 2**32 // (2**16 - 1) + 1
    counts = np.full(num_rows, 2**16 - 1, "<u2")
    num_keys = int(counts.sum(dtype=np.int64)) - 2**32
    header = struct.pack("<QQIIII", num_rows, num_keys, 0, 1, 0, 1)

    with pytest.raises(ProtocolError, match="the counts add up to"):
        unpack_rows(header + bytes(8 * num_keys) + counts.tobytes(), num_dense=0, num_slots=1)


def test_rows_without_bytes_of_their_own_are_no_more_than_their_keys() -> None:
    """Else a message of 32 bytes would be rows by the billion."""
    header = struct.pack("<QQIIII", 2**60, 0, 0, 1, 0, 0)

    with pytest.raises(
        ProtocolError, match=f"received 0 keys, expected one for each of {2**60} x 1"
    ):
        unpack_rows(header, num_dense=0, num_slots=1)


def test_counts_that_do_not_fit_the_keys_are_refused() -> None:
    data = bytearray(pack_rows(numbered_lists(range(4))))
    data[-2:] = np.uint16(9).tobytes()

    with pytest.raises(ProtocolError, match="the counts add up to"):
        unpack_rows(bytes(data), **WIDTHS)
