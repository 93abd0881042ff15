"""Arrow files: round trips, and the order in which shards are encoded."""

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.store import InferenceDtype
from ctr_ps.ps_server.checkpoint.files.format import (
    encoded_in_order,
    load_table_file,
    map_table_file,
    read_counters_file,
    read_dense_file,
    read_table_file,
    write_counters_file,
    write_dense_file,
    write_table_file,
)
from ctr_ps.ps_server.checkpoint.files.manifest import require_name
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.table.contents import Rows
from tests.support.checkpoints import (
    FakeTable,
    bytes_of,
    fake_block,
    fake_counters,
    fake_table,
    random_rows,
)

LIMIT_S = 10.0


def assert_same_rows(first: Rows, second: Rows) -> None:
    assert first.keys.dtype == second.keys.dtype == np.uint64
    assert first.weights.dtype == second.state.dtype == np.float32
    assert first.statistics.dtype == second.statistics.dtype == np.float32
    assert first.weights.shape == second.weights.shape
    assert bytes_of(first) == bytes_of(second)


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path)


@pytest.mark.parametrize("dim", [0, 1, 10])
@pytest.mark.parametrize("state_width", [0, 1, 21])
@pytest.mark.parametrize("statistics_width", [0, 4])
def test_shards_come_back_as_they_were_written(
    folder: LocalFolder, dim: int, state_width: int, statistics_width: int
) -> None:
    table = fake_table(
        "wide",
        dim=dim,
        state_width=state_width,
        statistics_width=statistics_width,
        num_shards=8,
    )

    entry = write_table_file(folder, 2, table)
    shards = dict(read_table_file(folder, entry, table.spec, range(8)))

    assert entry.file == "table.wide.server-2.arrow"
    assert (folder.path / entry.file).stat().st_size == entry.size_bytes
    assert list(shards) == list(range(8))
    for batch, (shard, rows) in zip(entry.batches, shards.items(), strict=True):
        assert_same_rows(rows, table.rows[shard])
        digest = xxhash.xxh3_128_hexdigest(rows.statistics.tobytes())
        assert batch.statistics_xxh3 == (digest if statistics_width else "")


def test_counters_come_back_as_they_were_written(folder: LocalFolder) -> None:
    source = fake_counters("wide")

    entry = write_counters_file(folder, 1, source)
    found = dict(read_counters_file(folder, entry, {1, 3, 99}))

    assert (entry.kind, entry.file) == ("counters", "counters.wide.server-1.arrow")
    assert [batch.rows for batch in entry.batches] == [10, 11, 12, 13]
    assert list(found) == [1, 3]
    for shard, counters in found.items():
        np.testing.assert_array_equal(counters, source.counters[shard], strict=True)


def test_extreme_keys_and_nan_survive(folder: LocalFolder) -> None:
    rows = Rows(
        keys=np.array([0, 2**64 - 1], np.uint64),
        weights=np.array([[np.nan], [-np.inf]], np.float32),
        state=np.array([[-0.0], [1e-45]], np.float32),
        statistics=np.array([[0x7F800001], [0xFFFFFFFF]], np.uint32).view(np.float32),
    )
    table = FakeTable(fake_table("wide", dim=1, num_shards=1).spec, 1, {0: rows}, 1)

    entry = write_table_file(folder, 0, table)
    [(_, found)] = read_table_file(folder, entry, table.spec, {0})

    assert_same_rows(rows, found)


def test_what_is_read_stays_when_the_file_changes(folder: LocalFolder) -> None:
    table = fake_table("wide", num_shards=1)
    entry = write_table_file(folder, 0, table)

    [(_, rows)] = read_table_file(folder, entry, table.spec, {0})
    with (folder.path / entry.file).open("r+b") as file:
        file.write(bytes(entry.size_bytes))
        file.truncate(1)

    assert_same_rows(rows, table.rows[0])
    assert not any(array.flags.writeable for array in (rows.keys, rows.weights, rows.state))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_in_memory_and_mapped_ones_are_those_of_the_table(
    folder: LocalFolder, dtype: InferenceDtype
) -> None:
    table = fake_table("wide", num_shards=8)
    narrow = {
        shard: replace(rows, weights=rows.weights.astype(dtype))
        for shard, rows in table.rows.items()
    }
    entry = write_table_file(folder, 0, replace(table, rows=narrow), dtype=dtype)
    keys = np.concatenate([rows.keys for rows in table.rows.values()])
    expected = np.concatenate([rows.weights for rows in narrow.values()]).astype(np.float32)

    mapped = map_table_file(folder, entry, table.spec)
    loaded = load_table_file(folder, entry, table.spec, verifies=True)

    for found in (mapped, loaded):
        out = np.zeros((keys.size + 1, 3), np.float32)
        there = found.read(np.append(keys, np.uint64(12345)), out)
        assert there.tolist() == [True] * keys.size + [False]
        np.testing.assert_array_equal(out[:-1], expected)


@pytest.mark.parametrize("keys", [[7, 3], [3, 3]])
def test_keys_that_are_not_in_order_are_refused(folder: LocalFolder, keys: list[int]) -> None:
    """A search would not find them."""
    table = fake_table("wide", dim=1, state_width=0, num_shards=1)
    rows = random_rows(np.random.default_rng(0), 2, 1, 0)
    wrong = replace(table, rows={0: replace(rows, keys=np.array(keys, np.uint64))})
    entry = write_table_file(folder, 0, wrong)

    with pytest.raises(CheckpointError, match=f"wide.*key {keys[1]} is not in its place"):
        next(read_table_file(folder, entry, table.spec, {0}))
    with pytest.raises(CheckpointError, match=f"wide.*key {keys[1]} is not in its place"):
        load_table_file(folder, entry, table.spec, verifies=False)


def test_keys_of_another_shard_are_refused(folder: LocalFolder) -> None:
    table = fake_table("wide", num_shards=2)
    swapped = replace(table, rows={0: table.rows[1], 1: table.rows[0]})
    entry = write_table_file(folder, 0, swapped)

    with pytest.raises(CheckpointError, match="not in its place in shard 0 of 2"):
        dict(read_table_file(folder, entry, table.spec, {0, 1}))


def test_files_are_plain_arrow(folder: LocalFolder) -> None:
    table = fake_table("wide", statistics_width=4)
    write_table_file(folder, 0, table)

    with pa.memory_map(str(folder.path / "table.wide.server-0.arrow")) as source:
        found = pa.ipc.open_file(source).read_all()

    assert found.column_names == ["key", "weights", "state", "statistics"]
    assert found.schema.metadata[b"ctr_ps.table"] == b"wide"
    assert found.schema.metadata[b"ctr_ps.dim"] == b"3"
    assert found.schema.metadata[b"ctr_ps.format_version"] == b"3"
    keys = np.concatenate([rows.keys for rows in table.rows.values()])
    assert keys.tolist() == found["key"].to_pylist()


@pytest.mark.parametrize("length", [0, 1, 100])
@pytest.mark.parametrize("num_states", [0, 1, 2])
def test_pieces_come_back_as_they_were_written(
    folder: LocalFolder, length: int, num_states: int
) -> None:
    piece = fake_block("mlp", length=length, num_states=num_states).piece

    entry = write_dense_file(folder, 1, "mlp", piece)
    found = read_dense_file(folder, entry)

    assert entry.file == "dense.mlp.server-1.arrow"
    content = piece.weights.tobytes() + piece.element_state.tobytes()
    assert entry.xxh3 == xxhash.xxh3_128_hexdigest(content)
    assert found.start == 0
    assert found.scalars.dtype == np.float32
    np.testing.assert_array_equal(found.weights, piece.weights)
    np.testing.assert_array_equal(found.element_state, piece.element_state)
    np.testing.assert_array_equal(found.scalars, piece.scalars)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä", "a\n"])
def test_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be part of a file name"):
        require_name(name)


def test_table_with_such_a_name_is_not_written(folder: LocalFolder) -> None:
    with pytest.raises(CheckpointError, match=r"'\.\./wide'"):
        write_table_file(folder, 0, fake_table("../wide"))
    with pytest.raises(CheckpointError, match=r"'\.\./wide'"):
        write_counters_file(folder, 0, fake_counters("../wide"))

    assert not list(folder.path.iterdir())


def test_results_come_in_the_order_of_the_shards() -> None:
    """Even if a later one is encoded first."""
    is_second_done = threading.Event()

    def encode(shard: int) -> int:
        if shard == 0:
            assert is_second_done.wait(LIMIT_S)
        if shard == 1:
            is_second_done.set()
        return 10 * shard

    assert list(encoded_in_order(encode, range(5), encoders=2)) == [0, 10, 20, 30, 40]


def test_no_more_than_one_shard_is_waiting_beside_those_being_encoded() -> None:
    begun: list[int] = []
    may_end = threading.Semaphore(0)

    def encode(shard: int) -> int:
        begun.append(shard)
        assert may_end.acquire(timeout=LIMIT_S)
        return shard

    with closing(encoded_in_order(encode, range(100), encoders=3)) as encoded:
        may_end.release(100)
        for number, _ in enumerate(encoded):
            assert len(begun) <= number + 4
    assert begun == sorted(begun)
    assert len(begun) == 100


def test_error_of_one_shard_ends_it() -> None:
    begun: list[int] = []

    def encode(shard: int) -> int:
        begun.append(shard)
        if shard == 3:
            raise KeyError(shard)
        return shard

    encoded = encoded_in_order(encode, range(100), encoders=2)
    with pytest.raises(KeyError):
        list(encoded)

    assert len(begun) <= 6


def test_closing_early_leaves_no_thread_running() -> None:
    before = threading.active_count()
    encoded = encoded_in_order(lambda shard: shard, range(100), encoders=2)
    next(encoded)

    encoded.close()

    assert threading.active_count() == before
