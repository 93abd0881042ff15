"""Lookups in mapped rows, compared with a dictionary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.placement import shard_of
from ctr_ps.ps_server.checkpoint.files.saved_rows import SavedRows, SavedShard
from tests.support.checkpoints import fake_table

NUM_SHARDS = 4
DIM = 3
LARGEST = 2**64 - 1


def file_of(keys: np.ndarray, values: np.ndarray, missing_shard: int | None = None) -> SavedRows:
    """Lays rows out as in a file: shard by shard, keys before values, each aligned to 8 bytes."""
    content = bytearray(b"header..")
    shards = {}
    numbers = np.array([shard_of(key, NUM_SHARDS) for key in keys], np.int64)
    for shard in range(NUM_SHARDS):
        if shard == missing_shard:
            continue
        chosen = np.flatnonzero(numbers == shard)
        chosen = chosen[np.argsort(keys[chosen])]
        keys_at = len(content)
        content += keys[chosen].tobytes()
        values_at = len(content)
        content += values[chosen].tobytes()
        content += bytes(-len(content) % 8)
        shards[shard] = SavedShard(rows=chosen.size, keys_at=keys_at, values_at=values_at)
    return SavedRows(
        np.frombuffer(bytes(content), np.uint8),
        fake_table("t", dim=DIM, num_shards=NUM_SHARDS).spec,
        values.dtype,
        shards,
    )


def rows_of(keys: list[int], dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    values = np.arange(DIM * len(keys), dtype=dtype).reshape(-1, DIM)
    return np.array(keys, np.uint64), values


KEYS = st.one_of(st.integers(0, 40), st.integers(0, LARGEST))


@given(saved=st.lists(KEYS, unique=True, max_size=200), asked=st.lists(KEYS, max_size=100))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_reads_what_a_dictionary_reads(saved: list[int], asked: list[int], dtype: type) -> None:
    keys, values = rows_of(saved, dtype)
    expected = dict(zip(saved, values, strict=True))
    wanted = np.array([*asked, *saved[::3]], np.uint64)
    out = np.full((wanted.size, DIM), -1, np.float32)

    found = file_of(keys, values).read(wanted, out)

    assert found.tolist() == [int(key) in expected for key in wanted]
    absent = np.full(DIM, -1)
    for key, row in zip(wanted, out, strict=True):
        np.testing.assert_array_equal(row, expected.get(int(key), absent))


def test_shards_of_other_files_are_not_here() -> None:
    keys, values = rows_of(list(range(100)))
    out = np.zeros((100, DIM), np.float32)
    elsewhere = 2

    found = file_of(keys, values, missing_shard=elsewhere).read(keys, out)

    numbers = [int(shard_of(key, NUM_SHARDS)) for key in keys]
    assert found.tolist() == [number != elsewhere for number in numbers]
    assert elsewhere in numbers
