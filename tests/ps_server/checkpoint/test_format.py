"""Arrow files: what goes in comes out, and nothing else does."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from protos.errors import CheckpointError
from ps_server.checkpoint.format import (
    read_dense_file,
    read_table_file,
    require_name,
    write_dense_file,
    write_table_file,
)
from ps_server.checkpoint.rows import Rows
from tests.support.checkpoints import FakeTable, fake_block, fake_table, random_rows


def assert_same_rows(first: Rows, second: Rows) -> None:
    assert first.keys.dtype == second.keys.dtype == np.uint64
    assert first.weights.dtype == second.state.dtype == np.float32
    np.testing.assert_array_equal(first.keys, second.keys)
    np.testing.assert_array_equal(first.weights, second.weights)
    np.testing.assert_array_equal(first.state, second.state)


@pytest.mark.parametrize("dim", [1, 10])
@pytest.mark.parametrize("state_width", [0, 1, 21])
def test_shards_come_back_as_they_were_written(tmp_path: Path, dim: int, state_width: int) -> None:
    table = fake_table("wide", dim=dim, state_width=state_width, num_shards=8)

    entry = write_table_file(tmp_path, 2, table)
    shards = dict(read_table_file(tmp_path, entry, dim, range(8)))

    assert entry.file == "table.wide.server-2.arrow"
    assert list(shards) == list(range(8))
    for shard, rows in shards.items():
        assert_same_rows(rows, table.rows[shard])


def test_only_the_shards_asked_for_are_read(tmp_path: Path) -> None:
    entry = write_table_file(tmp_path, 0, fake_table("wide", num_shards=8))

    assert [shard for shard, _ in read_table_file(tmp_path, entry, 3, {6, 3, 99})] == [3, 6]


def test_extreme_keys_and_numbers_that_are_none_survive(tmp_path: Path) -> None:
    rows = Rows(
        keys=np.array([0, 2**64 - 1], np.uint64),
        weights=np.array([[np.nan], [-np.inf]], np.float32),
        state=np.array([[-0.0], [1e-45]], np.float32),
    )
    table = FakeTable(fake_table("wide", dim=1, num_shards=1).spec, 1, {0: rows})

    entry = write_table_file(tmp_path, 0, table)
    [(_, found)] = read_table_file(tmp_path, entry, 1, {0})

    assert rows.weights.tobytes() == found.weights.tobytes()
    assert rows.state.tobytes() == found.state.tobytes()
    assert rows.keys.tobytes() == found.keys.tobytes()


def test_what_is_read_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    spec = fake_table("wide", num_shards=1).spec
    table = FakeTable(spec, 10, {0: random_rows(rng, 100_000, 3, 10)})
    entry = write_table_file(tmp_path, 0, table)
    before = pa.total_allocated_bytes()

    [(_, rows)] = read_table_file(tmp_path, entry, 3, {0})

    assert pa.total_allocated_bytes() - before < 100_000
    assert not any(array.flags.owndata for array in (rows.keys, rows.weights, rows.state))
    assert not any(array.flags.writeable for array in (rows.keys, rows.weights, rows.state))


def test_files_are_plain_arrow(tmp_path: Path) -> None:
    table = fake_table("wide")
    write_table_file(tmp_path, 0, table)

    with pa.memory_map(str(tmp_path / "table.wide.server-0.arrow")) as source:
        found = pa.ipc.open_file(source).read_all()

    assert found.column_names == ["key", "weights", "state"]
    assert found.schema.metadata[b"ctr_ps.table"] == b"wide"
    assert found.schema.metadata[b"ctr_ps.dim"] == b"3"
    assert found.schema.metadata[b"ctr_ps.format_version"] == b"1"
    keys = np.concatenate([rows.keys for rows in table.rows.values()])
    assert keys.tolist() == found["key"].to_pylist()


@pytest.mark.parametrize("length", [0, 1, 100])
@pytest.mark.parametrize("num_states", [0, 1, 2])
def test_pieces_come_back_as_they_were_written(
    tmp_path: Path, length: int, num_states: int
) -> None:
    piece = fake_block("mlp", length=length, num_states=num_states).piece

    entry = write_dense_file(tmp_path, 1, fake_block("mlp", length=length, num_states=num_states))
    found = read_dense_file(tmp_path, entry)

    assert entry.file == "dense.mlp.server-1.arrow"
    assert found.start == 0
    assert found.scalars.dtype == np.float32
    np.testing.assert_array_equal(found.weights, piece.weights)
    np.testing.assert_array_equal(found.element_state, piece.element_state)
    np.testing.assert_array_equal(found.scalars, piece.scalars)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "ä", "a\n"])
def test_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be part of a file name"):
        require_name(name)


def test_table_with_such_a_name_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'\.\./wide'"):
        write_table_file(tmp_path, 0, fake_table("../wide"))

    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/table\.wide\.server-0\.arrow"):
        write_table_file(tmp_path / "gone", 0, fake_table("wide"))
    with pytest.raises(CheckpointError, match=r"gone/dense\.mlp\.server-0\.arrow"):
        write_dense_file(tmp_path / "gone", 0, fake_block("mlp"))
