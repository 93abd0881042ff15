"""Any sequence of calls on a table leaves it like a dict."""

from typing import ClassVar
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_server.table.table_snapshot import TableSnapshot
from tests.reference.partition import unmix64
from tests.reference.table import ReferenceTable
from tests.support.address_space import map_some
from tests.support.dirty_rows import dirty_rows

DIM = 2
COLLIDING = [unmix64(0xABCD_1234_0000_0005 | middle << 16) for middle in range(12)]
"""One shard, one tag, one first slot."""

NEIGHBOURS = [unmix64(0xABCD_0000_FFFF_FFFF | tag << 32) for tag in range(12)]
"""One shard and the last slot of its index, so that they go around its end; many tags."""

KEYS = st.one_of(
    st.sampled_from([0, 1, 2**63, 2**64 - 1, *COLLIDING, *NEIGHBOURS]),
    st.integers(0, 2**64 - 1),
)
KEY_LISTS = st.lists(KEYS, unique=True, max_size=40)


class TableMachine(RuleBasedStateMachine):
    """Integers as gradients and a rate of 1, so that sums in float32 and float64 agree."""

    spec: ClassVar = TableSpec(
        name="t",
        dim=DIM,
        initializer=InitializerSpec(kind="uniform", scale=0.5),
        optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
        num_shards=2,
    )

    @initialize(
        mapped=st.lists(st.booleans(), min_size=4, max_size=4),
        region_bytes=st.sampled_from([1, 400, 5000, 2**30]),
        num_subscribers=st.sampled_from([0, 1, 65, 1000]),
    )
    def build(self, mapped: list[bool], region_bytes: int, num_subscribers: int) -> None:
        """Of rows, change bytes, dirty bits and index some can grow in place and some are copied."""
        with patch("ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(mapped)):
            self.table = SparseTable(
                self.spec, num_subscribers=num_subscribers, region_bytes=region_bytes
            )
        last = num_subscribers - 1
        looked_at = sorted({0, last // 2, last}) if num_subscribers else []
        self.reference = ReferenceTable(self.spec, looked_at)
        self.snapshot: TableSnapshot | None = None
        self.unsaved: set[int] = set()
        self.moved_in_snapshot = False

    @rule(
        keys=st.lists(KEYS, max_size=40, unique=True),
        data=st.data(),
        examples=st.sampled_from([1, 2]),
    )
    def push(self, keys: list[int], data: st.DataObject, examples: int) -> None:
        seed = data.draw(st.integers(0, 9))
        self.push_integers(np.array(keys, np.uint64), seed, examples)

    @rule(seed=st.integers(0, 5), count=st.sampled_from([100, 2000]))
    def push_many(self, seed: int, count: int) -> None:
        keys = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)
        self.push_integers(keys, seed, 1)

    def push_integers(self, keys: np.ndarray, seed: int, examples: int) -> None:
        values = np.random.default_rng(seed).integers(-9, 9, (keys.size, DIM)) * examples
        gradient = SparseGrad(keys, values.astype(np.float32), examples)
        self.table.check(gradient)
        self.table.push(gradient)
        self.reference.push(keys.tolist(), values.astype(np.float64), examples)
        self.unsaved.update(keys.tolist())

    @rule(keys=st.lists(KEYS, max_size=40), missing=st.sampled_from(Missing))
    def pull(self, keys: list[int], missing: Missing) -> None:
        pulled = self.table.pull(np.array(keys, np.uint64), missing)

        expected = self.reference.pull(keys, reads_initial=missing is Missing.INITIAL)
        np.testing.assert_allclose(pulled, expected, atol=1e-4)

    @rule(keys=KEY_LISTS, value=st.integers(-9, 9))
    def write(self, keys: list[int], value: int) -> None:
        weights = np.full((len(keys), DIM), value, np.float32)
        nothing = np.zeros((len(keys), 0), np.float32)
        self.table.write(Rows(np.array(keys, np.uint64), weights, nothing, nothing))
        for key in keys:
            self.reference.write(key, np.full(DIM, float(value)))
        self.unsaved.update(keys)

    @precondition(lambda self: self.reference.changed)
    @rule(data=st.data(), max_rows=st.sampled_from([1, 2, 7, 50, 10**9]))
    def take_changed(self, data: st.DataObject, max_rows: int) -> None:
        subscriber = data.draw(st.sampled_from([*self.reference.changed]))
        changed = self.reference.changed[subscriber]

        keys, weights = self.table.take_changed(subscriber, max_rows)

        assert keys.size == len(set(keys.tolist())) == min(max_rows, len(changed))
        assert changed.issuperset(keys.tolist())
        expected = self.reference.pull(keys.tolist(), reads_initial=False)
        np.testing.assert_allclose(weights, expected, atol=1e-4)
        changed.difference_update(keys.tolist())

    @rule(max_norm=st.sampled_from([0.0, 0.33, 2.2, 7.7, 1e9]))
    def evict(self, max_norm: float) -> None:
        assert self.table.shrink(max_norm=max_norm).rows == self.reference.evict(max_norm)
        self.unsaved.intersection_update(self.reference.weights)
        self.moved_in_snapshot |= self.snapshot is not None

    @precondition(lambda self: self.snapshot is None)
    @rule(
        stretch_rows=st.sampled_from([1, 3, 2048]),
        mapped=st.lists(st.booleans(), min_size=2, max_size=2),
    )
    def begin_snapshot(self, stretch_rows: int, mapped: list[bool]) -> None:
        with patch("ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(mapped)):
            self.snapshot = self.table.begin_snapshot()
        self.copies = [
            self.snapshot.copy_shard(shard, stretch_rows=stretch_rows) for shard in (0, 1)
        ]
        self.at_snapshot = dict(self.reference.weights)
        self.unsaved_before, self.unsaved = self.unsaved, set()
        self.moved_before, self.moved_in_snapshot = self.moved_in_snapshot, False

    @precondition(lambda self: self.snapshot is not None)
    @rule(shard=st.sampled_from([0, 1]), steps=st.sampled_from([1, 2, 30, 1000]))
    def copy(self, shard: int, steps: int) -> None:
        for _ in range(steps):
            if not self.copies[shard].is_done:
                self.copies[shard].step()

    @precondition(lambda self: self.snapshot is not None)
    @rule(saved=st.booleans(), is_whole=st.booleans())
    def end_snapshot(self, saved: bool, is_whole: bool) -> None:
        """A save may fail before all shards were copied."""
        if saved or is_whole:
            self.compare_with_snapshot()
        self.table.end_snapshot(saved=saved)
        self.snapshot = None
        if not saved:
            self.unsaved |= self.unsaved_before & self.reference.weights.keys()
            self.moved_in_snapshot |= self.moved_before

    def compare_with_snapshot(self) -> None:
        found: dict[int, list[float]] = {}
        for copy in self.copies:
            while not copy.is_done:
                copy.step()
            rows = copy.rows()
            assert rows.keys.tolist() == sorted(rows.keys.tolist())
            found |= dict(zip(rows.keys.tolist(), rows.weights.tolist(), strict=True))
        assert found.keys() == self.at_snapshot.keys()
        expected = [self.at_snapshot[key] for key in found]
        np.testing.assert_allclose(list(found.values()), expected, atol=1e-4)

    @invariant()
    def rows_that_changed_since_the_last_snapshot_are_dirty(self) -> None:
        """So are rows that moved during a snapshot."""
        if not hasattr(self, "table"):
            return
        regions = self.table._regions
        dirty: set[int] = set()
        for shard in self.table.shards:
            keys = regions.arrays.keys[regions.rows_of(shard), 0]
            dirty.update(keys[dirty_rows(regions.snapshot, shard, keys.size)].tolist())
        if self.moved_in_snapshot:
            assert dirty >= self.unsaved
        else:
            assert dirty == self.unsaved

    @rule()
    def export(self) -> None:
        keys: list[int] = []
        for shard in self.table.shards:
            rows = self.table.export_shard(shard)
            assert rows.keys.tolist() == sorted(rows.keys.tolist())
            expected = self.reference.pull(rows.keys.tolist(), reads_initial=False)
            np.testing.assert_allclose(rows.weights, expected, atol=1e-4)
            keys += rows.keys.tolist()
        assert sorted(keys) == sorted(self.reference.weights)

    @invariant()
    def rows_are_as_many(self) -> None:
        if hasattr(self, "table"):
            assert self.table.status.rows == len(self.reference.weights)

    @invariant()
    def index_has_one_slot_a_row(self) -> None:
        """Also where an older, smaller index of the shard had stood."""
        if hasattr(self, "table"):
            arrays = self.table._arrays
            for start, count, rows in zip(
                arrays.slot_starts, arrays.num_slots, arrays.num_rows, strict=True
            ):
                assert np.count_nonzero(arrays.slots[start : start + count]) == rows

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.export()


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
test_table_is_a_dict = TableMachine.TestCase
