"""Unique keys of a batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import GradientError, ProtocolError
from ctr_ps.protos.keys import repeated_key, require_unique, unique_keys
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


@pytest.mark.parametrize("size", [0, 1, 2, 17, 5_000])
def test_unique_keys_have_no_repeated_one(size: int) -> None:
    keys = np.random.default_rng(size).permutation(
        np.arange(size, dtype=np.uint64) << np.uint64(40)
    )

    assert repeated_key(keys) is None


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("places", [(0, 1), (0, 999), (500, 998)])
def test_a_repeated_key_is_found_wherever_it_is(key: int, places: tuple[int, int]) -> None:
    keys = np.random.default_rng(1).integers(2, 2**63, 1_000, dtype=np.uint64)
    keys[list(places)] = key

    assert repeated_key(keys) == key
    assert repeated_key(keys[::-1]) == key


def test_require_unique_names_the_place_and_the_key() -> None:
    with pytest.raises(GradientError, match="push to table 't' has key 7 more than once"):
        require_unique("push to table 't'", np.array([7, 8, 7], np.uint64), GradientError)
