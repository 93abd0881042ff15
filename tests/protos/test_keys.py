"""Unique keys of a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ProtocolError
from protos.keys import unique_keys
from tests.reference.partition import unmix64

EDGES = [0, 1, 2**63, 2**64 - 1]
COLLIDING = [unmix64(tag << 32 | 7) for tag in range(8)]
"""All begin at slot 7 of any small table."""


@given(
    keys=st.lists(
        st.one_of(st.sampled_from(EDGES + COLLIDING), st.integers(0, 2**64 - 1)), max_size=80
    )
)
def test_unique_keys_are_in_order_of_first_appearance(keys: list[int]) -> None:
    unique, inverse = unique_keys(np.array(keys, np.uint64))

    assert unique.tolist() == list(dict.fromkeys(keys))
    assert [int(unique[place]) for place in inverse] == keys


def test_large_batch_agrees_with_numpy() -> None:
    keys = np.random.default_rng(1).zipf(1.3, 50_000).astype(np.uint64)

    unique, inverse = unique_keys(keys)

    assert np.sort(unique).tolist() == np.unique(keys).tolist()
    assert (unique[inverse] == keys).all()


def test_keys_may_be_read_only() -> None:
    keys = np.array([3, 3], np.uint64)
    keys.flags.writeable = False

    unique, inverse = unique_keys(keys)

    assert (unique.tolist(), inverse.tolist()) == ([3], [0, 0])


def test_signed_keys_are_refused() -> None:
    with pytest.raises(ProtocolError, match="int64"):
        unique_keys(np.array([1, 2], np.int64))
