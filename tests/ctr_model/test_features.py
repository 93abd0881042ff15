"""The feature hash: published vectors, and independence of the environment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.features import HASH_VERSION, MAX_SLOT, hash_bytes, key_of
from tests.reference import features as reference
from tests.support.key_vectors import DOCUMENT, published_vectors


def test_keys_equal_the_published_vectors() -> None:
    vectors = published_vectors()

    keys = [key_of(slot, value) for slot, value, _ in vectors]

    assert len(vectors) >= 12
    assert keys == [key for _, _, key in vectors]


def test_document_names_the_version_of_the_hash() -> None:
    assert f"`HASH_VERSION = {HASH_VERSION}`" in DOCUMENT.read_text(encoding="utf-8")


@settings(deadline=None)
@given(slot=st.integers(1, MAX_SLOT), value=st.binary(max_size=40))
def test_key_equals_the_big_integer_oracle(slot: int, value: bytes) -> None:
    assert key_of(slot, value) == reference.key_of(slot, value)


def test_text_is_hashed_as_utf8() -> None:
    assert key_of(3, "café") == key_of(3, "café".encode())


def test_missing_value_is_a_key_of_its_own_in_each_slot() -> None:
    missing = {key_of(slot, "") for slot in range(1, 27)}

    assert len(missing) == 26


def test_value_is_read_between_start_and_stop() -> None:
    buffer = np.frombuffer(bytearray(b"xx68fd1e64yy"), np.uint8)

    assert int(hash_bytes(buffer, 2, 10, 5)) == key_of(5, "68fd1e64")


@pytest.mark.parametrize("slot", [0, -1, MAX_SLOT + 1])
def test_slot_outside_the_range_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=f"got {slot}"):
        key_of(slot, "a")
