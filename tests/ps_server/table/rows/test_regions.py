"""Regions of a table: how they grow, all shards together, and what that costs."""

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.rows import regions
from ctr_ps.ps_server.table.rows.regions import SLOT_BYTES, RowRegions
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.address_space import gives_huge_pages_on_request, map_some

DIM = 2
NUM_SHARDS = 64


def new_table(num_shards: int = NUM_SHARDS) -> SparseTable:
    return SparseTable(
        TableSpec(
            name="t",
            dim=DIM,
            initializer=InitializerSpec(scale=0.0),
            optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
            num_shards=num_shards,
        )
    )


def push(table: SparseTable, keys: Keys) -> None:
    table.push(SparseGrad(keys, np.ones((keys.size, DIM), np.float32), 1))


def random_keys(count: int) -> Keys:
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64)


def keys_of_shards(counts: Sequence[int]) -> list[Keys]:
    """Returns so many keys of each shard."""
    keys = random_keys(3 * len(counts) * max(counts))
    shards = np.array([shard_of(key, len(counts)) for key in keys])
    return [keys[shards == i][:count] for i, count in enumerate(counts)]


def huge_pages_bytes() -> int:
    """Returns the memory of this process that is in huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    pytest.skip("this system does not tell of huge pages")


def test_shards_grow_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, each of 64 shards would stop a push and take all locks at each of its five doublings."""
    grown = 0
    grow = RowRegions.grow

    def counted(self: RowRegions, shard: int) -> bool:
        nonlocal grown
        grown += 1
        return grow(self, shard)

    monkeypatch.setattr(RowRegions, "grow", counted)
    table, keys = new_table(), random_keys(60_000)

    for start in range(0, keys.size, 1000):
        push(table, keys[start : start + 1000])

    doublings = np.log2(table.status.index_slots / new_table().status.index_slots)
    assert doublings > 4
    assert grown < 5 * doublings
    assert (table.pull(keys, Missing.ZEROS) == -1.0).all()


def test_index_is_never_larger_than_is_said_of_new_rows() -> None:
    """By which a server knows its memory before a push; an empty index apart."""
    table, keys = new_table(), random_keys(60_000)
    empty = table.status.size_bytes

    for start in range(0, keys.size, 500):
        push(table, keys[start : start + 500])

        assert table.status.size_bytes <= empty + table.new_row_bytes * table.status.rows


def test_shard_that_is_not_nearly_full_does_not_grow_with_another() -> None:
    """Or its index would be larger than is said of new rows."""
    table, (small, large) = new_table(num_shards=2), keys_of_shards([49, 2_600])
    empty = table.status.size_bytes
    push(table, large)

    push(table, small)

    assert table.status.size_bytes <= empty + table.new_row_bytes * table.status.rows


def test_small_shard_grows_beside_a_large_one_where_regions_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their regions are as long as the largest index needs."""
    monkeypatch.setattr("ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(repeat(False)))
    table, (small, large, *_) = new_table(num_shards=4), keys_of_shards([49, 6_000, 0, 0])
    push(table, large)

    push(table, small)

    assert (table.pull(np.concatenate([small, large]), Missing.ZEROS) == -1.0).all()


@pytest.mark.parametrize("from_bytes", [2**20, 2**30])
def test_rows_of_a_large_shard_are_in_huge_pages(
    from_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "HUGE_PAGES_FROM_BYTES", from_bytes)
    if not gives_huge_pages_on_request():
        pytest.skip("this system gives huge pages to nobody or to everybody")
    table, keys = new_table(num_shards=2), random_keys(2_000_000)
    before = huge_pages_bytes()

    for start in range(0, keys.size, 10_000):
        push(table, keys[start : start + 10_000])

    index, rows = SLOT_BYTES * table.status.index_slots, 16 * table.status.rows
    huge = huge_pages_bytes() - before
    assert huge > 0.8 * (index + (rows if from_bytes == 2**20 else 0))
    assert huge < 1.1 * (index + (rows if from_bytes == 2**20 else 0)) + 8 * 2**20
