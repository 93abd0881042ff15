"""Samples of a user's own become the batches that a reader of files would have made."""

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.slot_values import Kind, SlotValues
from ctr_ps.ps_worker.data.user_code.samples import Sample, SampleLoader, batches_of_samples

SCHEMA = Schema(
    dense=(DenseColumn(name="age", shift=10.0, scale=2.0, missing=-1.0), DenseColumn(name="n")),
    slots=("user", "ad", "words"),
)
GOOD: Sample = (1, [14, 0.5], ["u1", b"a1", ["x", "y"]])


def batch_of(*samples: object) -> Batch:
    (batch,) = batches_of_samples(samples, SCHEMA, batch_size=100)
    return batch


def test_values_are_hashed_with_their_slots_number() -> None:
    batch = batch_of(GOOD, (0, [10, 2], ["", "a1", []]))

    expected = [
        *(key_of(1, "u1"), key_of(2, "a1"), key_of(3, "x"), key_of(3, "y")),
        *(key_of(1, ""), key_of(2, "a1")),
    ]
    assert batch.keys.dtype == np.uint64
    assert batch.keys.tolist() == expected
    assert batch.offsets.tolist() == [0, 1, 2, 4, 5, 6, 6]
    assert (batch.num_slots, batch.size) == (3, 2)
    assert batch.offsets.dtype == np.int32


def test_whole_numbers_are_keys_already() -> None:
    batch = batch_of((1, [0, 0], [7, 2**64 - 1, (np.uint64(3), "x", np.int32(4))]))

    assert batch.keys.tolist() == [7, 2**64 - 1, 3, key_of(3, "x"), 4]


def test_long_text_of_any_script_is_hashed_as_utf_8() -> None:
    text = "сегодня 今日 " * 9

    assert batch_of((1, [0, 0], [text, "", ""])).keys[0] == key_of(1, text)


def test_numbers_are_scaled_as_the_schema_says() -> None:
    batch = batch_of(
        GOOD,
        (0, [None, math.nan], ["", "", ""]),
        (0, np.float32([8, 1]), [1, 2, 3]),
        (0, [True, np.False_], ["", "", ""]),
    )

    assert batch.dense.dtype == np.float32
    assert batch.dense.tolist() == [[2.0, 0.5], [-1.0, 0.0], [-1.0, 1.0], [-4.5, 0.0]]


@pytest.mark.parametrize("label", [1, 0, 1.0, True, np.float32(0), np.int64(1), np.True_])
def test_label_may_be_any_number_that_is_0_or_1(label: object) -> None:
    assert batch_of((label, *GOOD[1:])).labels.tolist() == [float(label)]


def test_samples_without_labels_make_batches_without_labels() -> None:
    assert batch_of((None, *GOOD[1:])).labels is None


def test_schema_without_numbers_needs_none() -> None:
    schema = Schema(dense=(), slots=("user",))

    (batch,) = batches_of_samples([(1, [], ["a"]), (0, [], ["b"])], schema, batch_size=5)

    assert batch.dense.shape == (2, 0)


def test_last_batch_is_what_is_left() -> None:
    batches = list(batches_of_samples([GOOD] * 5, SCHEMA, batch_size=2))

    assert [batch.size for batch in batches] == [2, 2, 1]
    assert batches[2].offsets.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (GOOD[:2], r"sample 2: it is \(1, \[14, 0.5\]\), expected \(label, dense, slots\)"),
        (7, r"sample 2: it is 7, expected \(label, dense, slots\)"),
        ((2, *GOOD[1:]), "sample 2: the label is 2, expected 0, 1 or None"),
        (("1", *GOOD[1:]), "sample 2: the label is '1'"),
        ((None, *GOOD[1:]), "sample 2: the label is None, but that of the previous sample is 1"),
        ((1, [1], GOOD[2]), "sample 2: it has 1 dense numbers, expected 2"),
        ((1, 5, GOOD[2]), "sample 2: its dense numbers are 5, expected a list of 2"),
        ((1, [1, "x"], GOOD[2]), "sample 2: dense column 'n' is 'x', expected a number"),
        ((1, [1, 2], ["a", "b"]), "sample 2: it has 2 slots, expected 3"),
        ((1, [1, 2], "abc"), "sample 2: its slots are 'abc', expected a list of 3"),
        ((1, [1, 2], {"user": 1, "ad": 2, "words": 3}), "sample 2: its slots are {"),
        ((1, [1, 2], ["a", 0.5, "c"]), r"sample 2: slot 2 \('ad'\) has 0.5, expected text"),
        ((1, [1, 2], ["a", "b", ["c", None]]), r"slot 3 \('words'\) has None"),
        ((1, [1, 2], ["a", -1, "c"]), r"slot 2 \('ad'\) has -1"),
        ((1, [1, 2], [2**64, "b", "c"]), r"slot 1 \('user'\) has 18446744073709551616"),
        ((1, [float("inf"), 1], GOOD[2]), "dense column 'age' is inf; an unknown number is None"),
        ((1, [1, 1e39], GOOD[2]), r"sample 2: column 'n' is 1e\+39, beyond the range of float32"),
        ((1, [1, 10**400], GOOD[2]), "dense column 'n' has a number too large for a float64"),
        (
            (1, [1, 2], ["\ud800", "b", "c"]),
            r"slot 1 \('user'\) has '.*, which cannot be encoded as UTF-8",
        ),
        ((1, [1, 2], [True, "b", "c"]), r"slot 1 \('user'\) has True"),
    ],
)
def test_bad_sample_is_told_with_number_slot_and_value(sample: object, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}" if "sample" in message else message):
        batch_of(GOOD, sample)


def test_loader_calls_its_function_for_each_pass() -> None:
    def samples() -> Iterator[Sample]:
        yield from [GOOD] * 3

    loader = SampleLoader(samples, SCHEMA, batch_size=2)

    for _ in range(2):
        assert [batch.size for batch in loader] == [2, 1]


def test_loader_takes_a_list_of_samples() -> None:
    loader = SampleLoader([GOOD] * 3, SCHEMA, batch_size=3)

    assert [batch.size for batch in loader] == [3]


def test_loader_of_what_can_be_read_once_is_refused() -> None:
    with pytest.raises(UsageError, match="can be iterated only once: pass the function"):
        SampleLoader(iter([GOOD]), SCHEMA, batch_size=2)


def test_loader_without_a_batch_size_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        SampleLoader([GOOD], SCHEMA, batch_size=0)


def test_kinds_of_values_are_told_but_for_missing_ones() -> None:
    """An empty text is a missing value of keys, too, and makes no text of them."""
    seen = SlotValues()
    samples = [(1, [0, 0], ["u", 7, ["", 3]]), (0, [0, 0], ["", "", ""])]

    list(batches_of_samples(samples, SCHEMA, batch_size=1, seen=seen))

    kinds = {"user": ["text"], "ad": ["keys"], "words": ["keys", "lists"]}
    assert json.loads(seen.to_json()) == kinds


REFUSED = None


@pytest.mark.parametrize("lists", [(), ("lists",)])
@pytest.mark.parametrize(
    ("kinds", "of_7", "of_text"),
    [
        ((), REFUSED, key_of(1, "7")),
        (("text",), REFUSED, key_of(1, "7")),
        (("integers",), key_of(1, "7"), key_of(1, "7")),
        (("integers", "text"), key_of(1, "7"), key_of(1, "7")),
        (("keys",), 7, REFUSED),
        (("keys", "text"), 7, key_of(1, "7")),
        (("integers", "keys"), REFUSED, key_of(1, "7")),
        (("integers", "keys", "text"), REFUSED, key_of(1, "7")),
    ],
)
def test_value_means_what_it_meant_in_the_data_or_is_refused(
    kinds: tuple[Kind, ...], of_7: int | None, of_text: int | None, lists: tuple[Kind, ...]
) -> None:
    meant = SlotValues({"user": [*kinds, *lists]})
    for value, expected in ((7, of_7), ("7", of_text)):
        batches = batches_of_samples(
            [(1, [0, 0], [value, "", ""])], SCHEMA, batch_size=1, meant=meant
        )
        if expected is REFUSED:
            with pytest.raises(DataError, match=r"sample 1: slot 1 \('user'\) has"):
                list(batches)
        else:
            assert next(batches).keys[0] == expected
