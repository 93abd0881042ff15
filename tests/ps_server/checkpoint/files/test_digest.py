"""Digests and checksums: the bytes hashed, and what must not affect them."""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ps_server.checkpoint.files.digest import (
    EMPTY_SHARD_DIGEST,
    checksum,
    model_digest,
    shard_digest,
)
from ctr_ps.ps_server.table.contents import Rows


def rows_of(num_rows: int, dim: int = 3, state_width: int = 2, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    return Rows(
        keys=np.sort(rng.integers(0, 2**64, num_rows, np.uint64)),
        weights=rng.random((num_rows, dim), np.float32),
        state=rng.random((num_rows, state_width), np.float32),
        statistics=rng.random((num_rows, 4), np.float32),
    )


def test_shard_digest_hashes_keys_then_weights_then_state() -> None:
    rows = Rows(
        keys=np.array([1, 2**63], np.uint64),
        weights=np.array([[0.5, -0.0], [1.5, 2.5]], np.float32),
        state=np.array([[7.0], [8.0]], np.float32),
        statistics=np.array([[9.0], [10.0]], np.float32),
    )

    expected = struct.pack("<2Q4f2f", 1, 2**63, 0.5, -0.0, 1.5, 2.5, 7.0, 8.0)
    assert xxhash.xxh3_128_digest(expected) == shard_digest(rows)


def test_shard_digest_does_not_depend_on_memory_layout() -> None:
    rows = rows_of(50)

    strided = Rows(
        np.repeat(rows.keys, 2)[::2],
        np.asfortranarray(rows.weights),
        rows.state.astype(">f4"),
        np.asfortranarray(rows.statistics),
    )

    assert shard_digest(rows) == shard_digest(strided)
    assert checksum(rows.statistics) == checksum(strided.statistics)


def test_statistics_do_not_count_towards_the_digest() -> None:
    rows = rows_of(5)

    assert shard_digest(rows) == shard_digest(replace(rows, statistics=rows.statistics + 1))


def test_shard_without_rows_hashes_nothing() -> None:
    assert shard_digest(rows_of(0)) == EMPTY_SHARD_DIGEST


def test_model_digest_hashes_the_documented_bytes() -> None:
    dense = {"mlp": np.array([1.0, 2.0], np.float32)}
    shards = {("wide", 3): b"\2" * 16, ("deep", 10): b"\1" * 16}

    expected = (
        struct.pack("<QQ3sQ2f", 1, 3, b"mlp", 2, 1.0, 2.0)
        + struct.pack("<Q4sQ16s", 4, b"deep", 10, b"\1" * 16)
        + struct.pack("<Q4sQ16s", 4, b"wide", 3, b"\2" * 16)
    )
    assert hashlib.sha256(expected).hexdigest() == model_digest(dense, shards)


@given(order=st.permutations(range(12)))
def test_model_digest_does_not_depend_on_the_order_of_shards(order: list[int]) -> None:
    digests = {("table", shard): bytes([shard]) * 16 for shard in range(12)}

    shuffled = {("table", shard): digests["table", shard] for shard in order}

    assert model_digest({}, digests) == model_digest({}, shuffled)


def test_empty_shards_may_be_missing_from_the_model_digest() -> None:
    shards = {("table", 0): b"\1" * 16}

    assert model_digest({}, shards) == model_digest({}, shards | {("table", 1): EMPTY_SHARD_DIGEST})


ONE, TWO = np.ones(1, np.float32), np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("dense", "shards"),
    [
        pytest.param({"a": ONE, "b": TWO}, {}, id="lengths"),
        pytest.param({"ab": ONE, "c": ONE}, {}, id="names"),
        pytest.param({"a": TWO}, {("b", 0): b"\1" * 16}, id="table-or-block"),
        pytest.param({"a": TWO, "b": ONE}, {("t", 0): b"\1" * 16}, id="shard"),
        pytest.param({"a": TWO, "b": ONE}, {("t", 1): b"\1" * 16}, id="shard-number"),
        pytest.param({"a": TWO, "b": ONE}, {("u", 0): b"\1" * 16}, id="table-name"),
        pytest.param({"a": TWO, "b": 2 * ONE}, {}, id="values"),
    ],
)
def test_model_digest_tells_models_apart(
    dense: dict[str, np.ndarray], shards: dict[tuple[str, int], bytes]
) -> None:
    assert model_digest(dense, shards) != model_digest({"a": TWO, "b": ONE}, {})
