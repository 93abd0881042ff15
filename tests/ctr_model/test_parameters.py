from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import cross_key
from ctr_ps.ctr_model.parameters import SlotKeys, select_slots

NUM_SLOTS = 3

Examples = list[list[list[int]]]  # example, slot, keys

examples_of = st.lists(
    st.lists(
        st.lists(st.integers(0, 2**64 - 1), max_size=3), min_size=NUM_SLOTS, max_size=NUM_SLOTS
    ),
    max_size=4,
)


def batch_of(examples: Examples) -> Batch:
    lengths = [len(keys) for slots in examples for keys in slots]
    return Batch(
        labels=None,
        dense=np.empty((len(examples), 0), np.float32),
        keys=np.array([key for slots in examples for keys in slots for key in keys], np.uint64),
        offsets=np.cumsum([0, *lengths]).astype(np.int32),
        num_slots=NUM_SLOTS,
    )


def lists_of(selected: SlotKeys) -> Examples:
    starts = selected.offsets.tolist()
    keys = selected.keys.tolist()
    flat = [keys[start:stop] for start, stop in pairwise(starts)]
    return [flat[i : i + selected.num_slots] for i in range(0, len(flat), selected.num_slots)]


def test_all_slots_are_the_batch_itself() -> None:
    batch = batch_of([[[1], [2, 3], []]])

    selected = select_slots(batch, None)

    assert selected.keys is batch.keys
    assert selected.offsets is batch.offsets
    assert selected.num_slots == NUM_SLOTS


@given(examples_of)
def test_slots_and_crosses_agree_with_lists(examples: Examples) -> None:
    selected = select_slots(batch_of(examples), (2, 0), ((0, 1), (2, 2)))

    def cross(first: list[int], second: list[int]) -> list[int]:
        return [int(cross_key(np.uint64(a), np.uint64(b))) for a in first for b in second]

    assert lists_of(selected) == [
        [slots[2], slots[0], cross(slots[0], slots[1]), cross(slots[2], slots[2])]
        for slots in examples
    ]


def test_crosses_come_behind_all_slots() -> None:
    selected = select_slots(batch_of([[[1], [2], []]]), None, ((0, 2), (0, 1)))

    assert selected.num_slots == NUM_SLOTS + 2
    assert lists_of(selected)[0][3:] == [[], [int(cross_key(np.uint64(1), np.uint64(2)))]]


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        (0, 0, 0x48218226FF3CD4BF),
        (0xD198A9012127D590, 0x44DB5F89CC6C3E69, 0x50DBB48894E43387),
        (0x44DB5F89CC6C3E69, 0xD198A9012127D590, 0x12178F6F2E089292),
        (2**64 - 1, 1, 0x19438AE6B813B33D),
    ],
)
def test_crosses_have_the_published_keys(first: int, second: int, key: int) -> None:
    assert int(cross_key(np.uint64(first), np.uint64(second))) == key
