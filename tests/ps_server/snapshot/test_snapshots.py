"""Which moment of a store is being saved, and who waits for it."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError, ProtocolError, SnapshotLostError, WaitTimeoutError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import InitializerSpec, TableSpec
from ctr_ps.protos.store import Applied
from ctr_ps.ps_server.snapshot.phase_lock import PhaseLock
from ctr_ps.ps_server.snapshot.snapshots import Snapshots, StoreSnapshot, snapshot_all
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.dirty_rows import dirty_rows
from tests.support.optimizers import plain_optimizer
from tests.support.rows import resident_bytes
from tests.support.stores import TOWER

LIMIT_S = 10.0
KEYS = np.arange(50, dtype=np.uint64)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_table(name: str = "t") -> SparseTable:
    spec = TableSpec(
        name=name,
        dim=2,
        initializer=InitializerSpec(),
        optimizer=plain_optimizer("sgd"),
        num_shards=1,
    )
    table = SparseTable(spec)
    push(table)
    return table


def push(table: SparseTable) -> None:
    table.push(SparseGrad(KEYS, np.ones((KEYS.size, 2), np.float32), 1))


def num_changed(table: SparseTable) -> int:
    return int(dirty_rows(table._regions.snapshot, 0, KEYS.size).sum())


class Store:
    def __init__(self, clock: Clock | None = None, wait_limit_s: float = LIMIT_S) -> None:
        self.table = new_table()
        self.snapshots = Snapshots(
            wait_limit_s=wait_limit_s, hold_limit_s=60.0, monotonic=clock or Clock()
        )

    def take(self, token: str, then: Callable[[], None] = lambda: None) -> None:
        with self.snapshots.taking(token) as taking:
            if taking is not None:
                with taking.moment():
                    taking.snapshot = snapshot_all([self.table], [], Applied())
                then()


def weights_of(snapshot: StoreSnapshot) -> float:
    return float(snapshot.tables[0].export_shard(0).weights[0, 0])


def test_snapshot_stays_as_it_was() -> None:
    store = Store()
    before = store.table.export_shard(0).weights[0, 0]

    store.take("a")
    with store.snapshots.changing():
        push(store.table)

    with store.snapshots.writing("a") as snapshot:
        assert weights_of(snapshot) == before != store.table.export_shard(0).weights[0, 0]


def test_saved_rows_have_not_changed_and_those_of_a_failed_save_have() -> None:
    store = Store()
    store.take("a")
    assert num_changed(store.table) == 0
    with pytest.raises(KeyError), store.snapshots.writing("a"):
        raise KeyError
    assert num_changed(store.table) == KEYS.size

    store.take("b")
    with store.snapshots.writing("b"):
        pass

    assert num_changed(store.table) == 0


def test_snapshot_is_written_once() -> None:
    store = Store()
    store.take("a")
    with store.snapshots.writing("a"):
        pass

    with (
        pytest.raises(ProtocolError, match="snapshot 'a' no longer exists"),
        store.snapshots.writing("a"),
    ):
        pass


def test_token_has_one_snapshot_whenever_it_is_asked_for_again() -> None:
    """Another one would be of a later moment than what the other servers save."""
    store = Store()
    store.take("a")
    before = store.table.export_shard(0).weights[0, 0]
    push(store.table)

    store.take("a")
    with store.snapshots.writing("a") as snapshot:
        assert weights_of(snapshot) == before
    store.take("a")

    with (
        pytest.raises(SnapshotLostError, match="snapshot 'a' no longer exists"),
        store.snapshots.writing("a"),
    ):
        pass


def test_snapshot_after_which_something_fails_ends() -> None:
    """As when the update log cannot begin a segment; the token may be asked for again."""
    store = Store()

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        store.take("a", fail)
    assert num_changed(store.table) == KEYS.size

    store.take("a")
    with store.snapshots.writing("a"):
        pass


def test_snapshot_that_was_not_taken_here_is_refused() -> None:
    """As after a restart; the one that is here stays."""
    store = Store()
    store.take("a")

    with (
        pytest.raises(ProtocolError, match="snapshot 'b' no longer exists"),
        store.snapshots.writing("b"),
    ):
        pass

    with store.snapshots.writing("a"):
        pass


def test_next_snapshot_takes_the_place_of_one_that_was_not_written() -> None:
    store = Store()
    store.take("a")
    push(store.table)

    store.take("b")

    with store.snapshots.writing("b") as snapshot:
        assert weights_of(snapshot) == store.table.export_shard(0).weights[0, 0]


def test_push_drops_a_snapshot_that_nobody_came_to_write() -> None:
    """What it keeps would grow with each push."""
    clock = Clock()
    store = Store(clock)
    store.take("a")
    clock.now += 59
    with store.snapshots.changing():
        assert store.table._regions.snapshot.is_in_snapshot
    clock.now += 2

    with store.snapshots.changing():
        assert not store.table._regions.snapshot.is_in_snapshot

    assert num_changed(store.table) == KEYS.size


def test_pushes_that_a_snapshot_waited_for_do_not_count_as_time_in_which_nobody_came() -> None:
    clock = Clock()
    store = Store(clock)

    def pass_time() -> None:
        clock.now += 61

    store.take("a", pass_time)

    with store.snapshots.changing():
        assert store.table._regions.snapshot.is_in_snapshot


def test_snapshot_waits_for_a_save_and_for_pushes_no_longer_than_the_limit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    @contextmanager
    def alone(_: PhaseLock, limit_s: float) -> Iterator[None]:
        limits.append(limit_s)
        yield

    monkeypatch.setattr(PhaseLock, "alone", alone)
    clock = Clock()
    store = Store(clock)
    store.take("a")
    store.snapshots._monotonic = itertools.count(clock.now).__next__  # a second passes at each look
    store.take("b")

    assert limits[0] == LIMIT_S
    assert 0 < limits[1] < LIMIT_S


def test_long_save_is_not_dropped() -> None:
    clock = Clock()
    store = Store(clock)
    store.take("a")
    with store.snapshots.writing("a") as snapshot:
        clock.now += 10_000
        with store.snapshots.changing():
            push(store.table)
        weights_of(snapshot)


def test_shrink_waits_for_a_save() -> None:
    store = Store()
    store.take("a")
    is_between = threading.Event()

    def shrink() -> None:
        with store.snapshots.between_saves("a shrink"):
            is_between.set()

    with ThreadPoolExecutor(1) as threads:
        shrinking = threads.submit(shrink)
        with store.snapshots.writing("a"):
            assert not is_between.wait(0.02)
        shrinking.result(LIMIT_S)


def test_shrink_waits_for_a_snapshot_to_be_written_but_not_for_one_that_is_overdue() -> None:
    clock = Clock()
    store = Store(clock, wait_limit_s=0.0)
    store.take("a")
    with (
        pytest.raises(WaitTimeoutError, match=r"a shrink waited more than .* s for a save"),
        store.snapshots.between_saves("a shrink"),
    ):
        pass
    clock.now += 61

    with store.snapshots.between_saves("a shrink"):
        assert not store.table._regions.snapshot.is_in_snapshot


def test_second_save_waits_for_the_first_in_vain() -> None:
    store = Store(wait_limit_s=0.0)
    store.take("a")
    late = pytest.raises(WaitTimeoutError, match=r"a snapshot waited more than .* s for a save")

    with store.snapshots.writing("a"), late:
        store.take("b")


def test_what_a_save_cost_is_told() -> None:
    clock = Clock()
    store = Store(clock)
    assert store.snapshots.last is None
    store.take("a")
    clock.now += 1
    with store.snapshots.writing("a"):
        going_on = store.snapshots.last
        clock.now += 4
    over = store.snapshots.last

    assert going_on is not None
    assert over is not None
    assert (going_on.is_over, over.is_over) == (False, True)
    assert (over.pause_s, over.duration_s) == (0.0, 5.0)


def test_failed_save_is_over_too() -> None:
    store = Store()
    store.take("a")
    with suppress(KeyError), store.snapshots.writing("a"):
        raise KeyError

    assert store.snapshots.last is not None
    assert store.snapshots.last.is_over


def test_out_of_memory_leaves_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [new_table("a"), new_table("b")]

    def fail(*, changes_only: bool) -> None:
        raise MemoryError

    monkeypatch.setattr(tables[1], "begin_snapshot", fail)

    with pytest.raises(CheckpointError, match="not enough memory"):
        snapshot_all(tables, [DenseTable(TOWER)], Applied())

    assert not tables[0]._regions.snapshot.is_in_snapshot
    assert num_changed(tables[0]) == KEYS.size


def test_table_is_snapshot_by_one_at_a_time() -> None:
    table = new_table()
    table.begin_snapshot()

    with pytest.raises(ProtocolError, match="table 't' is being saved"):
        table.begin_snapshot()


def test_table_that_is_out_keeps_no_memory_while_others_are_written() -> None:
    spec = TableSpec(
        name="wide",
        dim=64,
        initializer=InitializerSpec(),
        optimizer=plain_optimizer("sgd"),
        num_shards=2,
    )
    table, keys = SparseTable(spec), np.arange(40_000, dtype=np.uint64)  # 10 MB
    table.push(SparseGrad(keys, np.ones((keys.size, 64), np.float32), 1))
    snapshot = table.begin_snapshot()
    snapshot.export_shard(0)  # compiles
    table.end_snapshot(saved=False)
    snapshot = table.begin_snapshot()
    before = resident_bytes()

    assert sum(snapshot.export_shard(shard).keys.size for shard in table.shards) == keys.size

    assert resident_bytes() - before < 2 * 2**20
    table.end_snapshot(saved=True)
