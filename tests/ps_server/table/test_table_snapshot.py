"""Snapshots of tables, and the buffers of their copies."""

import mmap
import resource
import threading

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from ctr_ps.protos.keys import Keys, mix64
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.changes import mark_dirty
from ctr_ps.ps_server.table.memory.hash_index import (
    KEY_COLUMNS,
    RowLayout,
    TableArrays,
    find_row,
    has_room,
    insert_row,
)
from ctr_ps.ps_server.table.rows.regions import RowRegions, remove_row
from ctr_ps.ps_server.table.table_snapshot import BufferPool, ShardCopy
from tests.support.dirty_rows import dirty_rows

NUM_KEYS = 400


@kernel
def toggle(table: TableArrays, keys: Keys, value: np.float32, start: int) -> int:
    """Removes a key that is there, else inserts it; returns where it stopped for want of room."""
    for i in range(start, keys.size):
        row = find_row(table, 0, mix64(keys[i]), keys[i])
        if row >= 0:
            remove_row(table, 0, row)
            continue
        if not has_room(table, 0):
            return i
        row = insert_row(table, 0, mix64(keys[i]), keys[i])
        mark_dirty(table, 0, row)
        table.slab[row, KEY_COLUMNS] = value
    return keys.size


class OneShard:
    """A shard whose keys come and go, and a dictionary that does the same."""

    def __init__(self) -> None:
        self.regions = RowRegions(RowLayout(dim=1, state_width=0), num_shards=1, shards=range(1))
        self.expected: dict[int, float] = {}
        self.unsaved: set[int] = set()

    def toggle(self, keys: NDArray[np.uint64], value: float) -> None:
        position = toggle(self.regions.arrays, keys, np.float32(value), 0)
        while position < keys.size:
            self.regions.grow(0)
            position = toggle(self.regions.arrays, keys, np.float32(value), position)
        for key in keys.tolist():
            if self.expected.pop(key, None) is None:
                self.expected[key] = value
                self.unsaved.add(key)
            self.unsaved &= self.expected.keys()

    def marked(self) -> set[int]:
        keys = self.regions.arrays.keys[self.regions.rows_of(0), 0]
        return set(keys[dirty_rows(self.regions.snapshot, 0, keys.size)].tolist())


@pytest.mark.parametrize("seed", range(10))
def test_removed_rows_are_in_the_snapshot(seed: int) -> None:
    random = np.random.default_rng(seed)
    shard = OneShard()
    shard.toggle(random.permutation(NUM_KEYS).astype(np.uint64), 0.0)
    for number in range(1, 6):
        shard.regions.begin_snapshot()
        at_snapshot = dict(shard.expected)
        copy = ShardCopy(shard.regions, threading.Lock(), 0, stretch_rows=17)
        while not copy.is_done:
            shard.toggle(random.choice(NUM_KEYS, 9, replace=False).astype(np.uint64), number)
            copy.step()

        rows = copy.rows()
        shard.regions.end_snapshot(saved=True)

        assert rows.keys.tolist() == sorted(at_snapshot)
        assert rows.weights[:, 0].tolist() == [at_snapshot[key] for key in sorted(at_snapshot)]


def test_rows_that_have_been_copied_are_not_kept() -> None:
    """They would take memory for nothing."""
    shard = OneShard()
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    shard.toggle(keys, 0.0)
    shard.regions.begin_snapshot()
    copy = ShardCopy(shard.regions, threading.Lock(), 0, stretch_rows=NUM_KEYS // 2)
    for _ in range(3):  # both stretches of the keys, and the first one of the rows
        copy.step()

    shard.toggle(keys[:10], 1.0)  # the last rows go into their places

    kept = shard.regions.snapshot.kept_rows(0)[:, 0]
    assert kept.tolist() == list(range(NUM_KEYS - 1, NUM_KEYS - 11, -1))


@pytest.mark.parametrize("seed", range(10))
def test_dirty_bit_moves_with_its_row(seed: int) -> None:
    """Exactly, without a snapshot; during one, rows that moved are dirty too, and none is missed."""
    random = np.random.default_rng(seed)
    shard = OneShard()
    shard.toggle(random.permutation(NUM_KEYS).astype(np.uint64), 0.0)
    shard.regions.begin_snapshot()
    shard.regions.end_snapshot(saved=True)
    shard.unsaved.clear()
    for _ in range(20):
        shard.toggle(random.choice(NUM_KEYS, 9, replace=False).astype(np.uint64), 1.0)
        assert shard.marked() == shard.unsaved

    shard.regions.begin_snapshot()
    for _ in range(5):
        shard.toggle(random.choice(NUM_KEYS, 9, replace=False).astype(np.uint64), 2.0)
    shard.regions.end_snapshot(saved=False)

    assert shard.marked() >= shard.unsaved


def faults_of_dirtying(regions: RowRegions) -> int:
    """Returns the page faults of setting the first dirty bit on each page of them."""
    words = regions.arrays.snapshot.dirty
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    words[: MANY_ROWS // 64 : mmap.PAGESIZE // 8] |= np.uint64(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


MANY_ROWS = 64 * 8 * mmap.PAGESIZE  # 64 pages of dirty bits


def test_prepared_snapshot_has_the_memory_of_its_marks() -> None:
    regions = RowRegions(RowLayout(dim=0, state_width=0), num_shards=1, shards=range(1))
    regions.num_rows[0] = MANY_ROWS
    regions.snapshot.prepare(regions.num_rows)
    regions.begin_snapshot()

    assert not regions.arrays.snapshot.dirty[: MANY_ROWS // 64].any()
    assert faults_of_dirtying(regions) < 32


def test_what_changes_between_preparing_and_cutting_is_in_the_cut() -> None:
    shard = OneShard()
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    shard.toggle(keys[:10], 0.0)
    shard.regions.snapshot.prepare(shard.regions.num_rows)
    shard.toggle(keys[10:], 1.0)
    shard.regions.begin_snapshot()
    copy = ShardCopy(shard.regions, threading.Lock(), 0, stretch_rows=NUM_KEYS)
    shard.toggle(keys, 2.0)
    shard.toggle(keys, 3.0)
    while not copy.is_done:
        copy.step()

    assert copy.rows().keys.tolist() == keys.tolist()
    assert copy.rows().weights[:, 0].tolist() == [0.0] * 10 + [1.0] * (NUM_KEYS - 10)


SIZE = 8 * 100


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_piece_is_used_again_once_it_is_let_go_of() -> None:
    memory = BufferPool(SIZE)
    piece = memory.take()
    first = address(piece)
    del piece

    assert address(memory.take()) == first


def test_piece_is_not_used_again_while_there_is_a_view_of_it() -> None:
    """Whatever stands between: numpy's views, and Arrow's of them."""
    memory = BufferPool(SIZE)
    piece = memory.take()
    column = pa.array(piece[80:160].view(np.uint64).reshape(5, 2)[:, 0].reshape(-1)[:3])
    matrix = piece[160:].view(np.float32).reshape(-1, 4)[3:]
    record = pa.record_batch([pa.array(piece[:80].view(np.uint64))], names=["key"])
    del piece
    pieces = [memory.take() for _ in range(3)]
    for each in pieces:
        each[:] = 255

    assert (matrix == 0).all()
    assert record.column(0).to_pylist() == [0] * 10
    assert column.to_pylist() == [0] * 3


def test_last_view_gives_the_piece_back() -> None:
    memory = BufferPool(SIZE)
    record = pa.record_batch([pa.array(memory.take().view(np.uint64))], names=["key"])
    first = record.column(0).buffers()[1].address
    del record

    assert address(memory.take()) == first


def test_pieces_of_nothing() -> None:
    memory = BufferPool(0)

    assert [memory.take().size for _ in range(2)] == [0, 0]


def test_pieces_outlive_what_gave_them_out() -> None:
    memory = BufferPool(SIZE)
    piece = memory.take()
    del memory
    piece[:] = 7

    assert (piece == 7).all()
