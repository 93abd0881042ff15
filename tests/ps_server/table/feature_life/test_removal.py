"""Removal of rows: expiry at a shrink, eviction from a full shard."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap, shard_of
from ctr_ps.protos.spec import (
    AdmissionSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.feature_life.removal import EVICTED_SHARE, max_rows_of_shard
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.reference.feature_life import ReferenceLives
from tests.reference.table import ReferenceTable
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.needs import IN_CI
from tests.support.rows import resident_bytes
from tests.support.statistics import Counted, counted_by, counted_on
from tests.support.stores import push_id

EXACT = StatisticsSpec(nonclk_coeff=0.25, click_coeff=2.0, decay=0.5)
"""Powers of two, so that float32 and float64 agree to the last bit."""

SPEC = TableSpec(
    name="t",
    dim=2,
    initializer=InitializerSpec(kind="uniform", scale=0.5),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    num_shards=4,
    statistics=EXACT,
)
EXPIRIES = st.builds(
    ExpirySpec,
    delete_threshold=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    max_unseen=st.sampled_from([0, 1, 2]),
    ttl_s=st.sampled_from([0.0, 10.0, 25.5]),
)
SEEN = st.dictionaries(
    st.integers(0, 60) | st.sampled_from([2**63, 2**64 - 1]),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (max(pair), min(pair))),
    max_size=40,
)


class LifeMachine(RuleBasedStateMachine):
    """Any sequence of pushes, shrinks and pulls leaves a cluster like a dict."""

    largest: ClassVar[int] = 3

    @initialize(num_servers=st.integers(1, largest), expiry=EXPIRIES)
    def build(self, num_servers: int, expiry: ExpirySpec) -> None:
        self.now = 1_000.0
        self.stores = [
            ParameterStore(
                server_index=index, num_servers=num_servers, clock=lambda: self.now, wait_limit_s=0
            )
            for index in range(num_servers)
        ]
        spec = replace(SPEC, expiry=expiry)
        self.client = joined_client(LocalTransport(self.stores))
        self.client.create_table(spec)
        self.lives = ReferenceLives(EXACT, expiry)
        self.rows = ReferenceTable(spec)
        self.pushes = 0

    @rule(seen=SEEN, value=st.integers(-3, 3))
    def push(self, seen: dict[int, tuple[int, int]], value: int) -> None:
        keys = np.array(list(seen), np.uint64)
        counts = np.array(list(seen.values()), np.uint32).reshape(-1, 2)
        values = np.full((keys.size, 2), value, np.float32)
        gradients = Gradients({"t": SparseGrad(keys, values, 1, counts)})
        self.client.push_grad(gradients, push_id(sequence=self.pushes)).result()
        self.pushes += 1
        self.lives.push(((key, *pair) for key, pair in seen.items()), int(self.now))
        self.rows.push(list(seen), values.astype(np.float64), 1)

    @rule(seconds=st.sampled_from([0.4, 1.0, 9.5, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(dry_run=st.booleans(), max_norm=st.sampled_from([None, None, 0.3, 2.0]))
    def shrink(self, dry_run: bool, max_norm: float | None) -> None:
        weights = self.rows.weights
        small = [
            key
            for key, row in weights.items()
            if max_norm is not None and np.linalg.norm(row) <= max_norm
        ]
        before = self.client.status().tables["t"]

        shrunk = self.client.shrink(max_norm=max_norm, dry_run=dry_run)["t"]

        gone = self.lives.shrink(int(self.now), small, dry_run=dry_run)
        after = self.client.status().tables["t"]
        assert shrunk.rows == len(gone)
        if dry_run:
            assert after == before
            return
        assert shrunk.size_bytes == before.size_bytes - after.size_bytes
        assert after.expired - before.expired == len(gone)
        for key in gone:
            del weights[key]

    @rule(keys=st.lists(st.integers(0, 99), unique=True, max_size=20))
    def pull(self, keys: list[int]) -> None:
        asked = {"t": np.array(keys, np.uint64)}
        pulled = self.client.pull_sparse(asked, missing=Missing.ZEROS).result()

        expected = self.rows.pull(keys, reads_initial=False)
        np.testing.assert_allclose(pulled.rows["t"], expected, atol=1e-4)

    @invariant()
    def rows_have_counted_what_the_oracle_has(self) -> None:
        if hasattr(self, "stores"):
            expected = {
                key: Counted(life.show, life.click, life.unseen, life.last_seen)
                for key, life in self.lives.lives.items()
            }
            assert counted_on(self.stores, "t") == expected


LifeMachine.TestCase.settings = settings(max_examples=40 if IN_CI else 20, stateful_step_count=20)
test_cluster_is_a_dict = LifeMachine.TestCase


KEYS = np.arange(1000, dtype=np.uint64)


def filled(spec: TableSpec, counts: object = None, now: float = 0.0) -> SparseTable:
    table = SparseTable(spec, clock=lambda: now)
    numbers = np.tile(np.array([[2, 1]], np.uint32), (KEYS.size, 1)) if counts is None else counts
    table.push(SparseGrad(KEYS, np.ones((KEYS.size, 2), np.float32), 1, numbers))
    return table


@pytest.mark.parametrize(
    ("decay", "nonclk_coeff", "click_coeff"), [(0.98, 0.1, 1.0), (0.7, 0.3, 0.05), (1.0, 0.0, 1.0)]
)
def test_scores_are_those_of_the_oracle(
    decay: float, nonclk_coeff: float, click_coeff: float
) -> None:
    """With coefficients that no float32 has, to float rounding."""
    shows = np.random.default_rng(0).integers(1, 100, KEYS.size)
    clicks = np.minimum(shows, np.random.default_rng(1).integers(0, 30, KEYS.size))
    statistics = StatisticsSpec(decay=decay, nonclk_coeff=nonclk_coeff, click_coeff=click_coeff)
    spec = replace(SPEC, statistics=statistics, expiry=ExpirySpec(delete_threshold=3.333))
    table = filled(spec, np.stack([shows, clicks], axis=1).astype(np.uint32))
    reference = ReferenceLives(statistics, spec.expiry)
    reference.push(zip(KEYS.tolist(), shows.tolist(), clicks.tolist(), strict=True), 0)

    for _ in range(3):
        assert table.shrink().rows == len(reference.shrink(0))

    found = counted_by(table)
    assert 0 < len(found) < KEYS.size
    assert found.keys() == reference.lives.keys()
    for key, life in reference.lives.items():
        assert found[key].show == pytest.approx(life.show, rel=1e-6)
        assert found[key].click == pytest.approx(life.click, rel=1e-6)


def test_rows_live_for_their_time_and_not_a_second_more() -> None:
    now = [100.0]
    table = SparseTable(replace(SPEC, expiry=ExpirySpec(ttl_s=60.0)), clock=lambda: now[0])
    counts = np.ones((KEYS.size, 2), np.uint32)
    table.push(SparseGrad(KEYS, np.ones((KEYS.size, 2), np.float32), 1, counts))

    now[0] = 160.9
    assert table.shrink().rows == 0
    now[0] = 161.0
    assert table.shrink().rows == KEYS.size


def test_clock_that_is_set_back_expires_nothing() -> None:
    now = [1e9]
    table = SparseTable(replace(SPEC, expiry=ExpirySpec(ttl_s=60.0)), clock=lambda: now[0])
    counts = np.ones((KEYS.size, 2), np.uint32)
    table.push(SparseGrad(KEYS, np.ones((KEYS.size, 2), np.float32), 1, counts))

    now[0] = 0.0

    assert table.shrink().rows == 0


def test_table_without_statistics_is_left_as_it_is() -> None:
    table = SparseTable(replace(SPEC, statistics=None))
    table.push(SparseGrad(KEYS, np.ones((KEYS.size, 2), np.float32), 1))
    before = table.status

    assert table.shrink().rows == 0
    assert table.status == before


LIMITED = TableSpec(
    name="t",
    dim=2,
    initializer=InitializerSpec(kind="uniform", scale=0.5),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    num_shards=1,
    statistics=StatisticsSpec(nonclk_coeff=0.25),
    expiry=ExpirySpec(max_rows=160),
)


def push(table: SparseTable, keys: Keys, shows: object = 1) -> None:
    counts = np.zeros((keys.size, 2), np.uint32)
    counts[:, 0] = shows
    table.push(SparseGrad(keys, np.ones((keys.size, table.spec.dim), np.float32), 1, counts))


def some_keys(count: int, start: int = 0) -> Keys:
    return np.arange(start, start + count, dtype=np.uint64)


def test_full_table_loses_the_rows_that_were_not_seen_for_longest() -> None:
    now = [0.0]
    table = SparseTable(LIMITED, clock=lambda: now[0])
    order = np.random.default_rng(0).permutation(160).astype(np.uint64)
    for now[0], part in enumerate(np.split(order, 16), start=10):
        push(table, part)
    push(table, order[:5])  # half of the oldest, seen again

    push(table, some_keys(1, start=1000))

    left = counted_by(table).keys()
    oldest, next_oldest = set(order[5:10].tolist()), set(order[10:20].tolist())
    assert left.isdisjoint(oldest)
    assert len(left & next_oldest) == 5
    assert left - next_oldest == {1000, *order.tolist()} - oldest - next_oldest
    assert (table.status.rows, table.status.evicted) == (151, 10)


def test_full_table_loses_the_rows_of_the_lowest_score() -> None:
    table = SparseTable(replace(LIMITED, expiry=ExpirySpec(max_rows=160, evict="score")))
    shows = np.random.default_rng(0).permutation(160) + 5
    push(table, some_keys(160), shows)

    push(table, some_keys(1, start=1000))

    assert counted_by(table).keys() == {1000, *np.flatnonzero(shows >= 15).tolist()}


@pytest.mark.parametrize("evict", ["lru", "score"])
@pytest.mark.parametrize("max_rows", [1, 3, 15, 16, 17, 100, 1000])
def test_no_shard_ever_has_more_than_its_share(max_rows: int, evict: str) -> None:
    spec = replace(LIMITED, num_shards=4, expiry=ExpirySpec(max_rows=max_rows, evict=evict))
    table = SparseTable(spec)
    share = -(-max_rows // 4)

    for start in range(0, 5000, 500):
        push(table, some_keys(500, start))
        rows = np.bincount([shard_of(np.uint64(key), 4) for key in counted_by(table)], minlength=4)
        assert rows.max() <= share

    assert table.status.rows + table.status.evicted == 5000
    assert rows.min() >= share - -(-share // EVICTED_SHARE)


@pytest.mark.parametrize("evict", ["lru", "score"])
def test_same_rows_are_evicted_on_any_number_of_servers(evict: str) -> None:
    """Ties included: all were seen in one second, and many as often."""
    spec = replace(LIMITED, num_shards=8, expiry=ExpirySpec(max_rows=800, evict=evict))
    pushes = [
        np.random.default_rng(seed).choice(3000, 900, replace=False).astype(np.uint64)
        for seed in range(5)
    ]

    def trained(num_servers: int) -> dict[int, object]:
        tables = [
            SparseTable(
                spec, server_index=index, shard_map=ShardMap.of(num_servers), clock=lambda: 7.0
            )
            for index in range(num_servers)
        ]
        for keys in pushes:
            for table, where in zip(tables, ShardMap.of(num_servers).route(keys, 8), strict=True):
                push(table, keys[where], shows=keys[where] % np.uint64(3))
        return {key: row for table in tables for key, row in counted_by(table).items()}

    assert trained(1) == trained(2) == trained(3)


@pytest.mark.parametrize("evict", ["lru", "score"])
def test_which_of_equal_rows_go_does_not_depend_on_their_order(evict: str) -> None:
    """As when a checkpoint is loaded, whose rows ascend by key."""
    spec = replace(LIMITED, expiry=ExpirySpec(max_rows=160, evict=evict))
    tables = [SparseTable(spec, clock=lambda: 7.0) for _ in range(2)]
    push(tables[0], some_keys(160))
    push(tables[1], some_keys(160)[::-1])

    for table in tables:
        push(table, some_keys(1, start=1000))

    left, other = (counted_by(table).keys() for table in tables)
    assert left == other
    assert left & set(range(10)) != set()  # nor do the smallest keys go


@pytest.mark.parametrize(
    ("expiry", "rows"),
    [
        (ExpirySpec(max_rows=4), 1),
        (ExpirySpec(max_rows=5), 2),
        (ExpirySpec(max_rows=1000, max_bytes=4 * (8 * 64 + 3 * 32)), 3),
        (ExpirySpec(max_rows=4, max_bytes=10**9), 1),
        (ExpirySpec(max_bytes=4 * (8 * 128 + 96 * 32 + 31)), 96),
    ],
)
def test_share_of_a_shard_is_rounded_up(expiry: ExpirySpec, rows: int) -> None:
    """A row has 8 bytes of key, 8 of weights and 16 of statistics; an index at least 64 slots of 8."""
    assert max_rows_of_shard(replace(LIMITED, num_shards=4, expiry=expiry)) == rows


def test_limit_without_room_for_a_row_in_each_shard_is_refused() -> None:
    least = 4 * (8 * 64 + 32) - 3  # a part of a byte is rounded up
    limited = replace(LIMITED, num_shards=4, expiry=ExpirySpec(max_bytes=2000))
    fault = f"'t' has max_bytes 2000, too few .* set at least {least}"
    with pytest.raises(SpecError, match=fault):
        SparseTable(limited)
    assert max_rows_of_shard(replace(limited, expiry=ExpirySpec(max_bytes=least))) == 1
    with pytest.raises(SpecError, match=f"set at least {least}"):
        SparseTable(replace(limited, expiry=ExpirySpec(max_bytes=least - 1)))


def test_loaded_rows_beyond_the_limit_make_room_for_each_other() -> None:
    plain = SparseTable(replace(LIMITED, expiry=None))
    push(plain, some_keys(1000))
    table = SparseTable(LIMITED)

    table.write(plain.export_shard(0))

    assert 150 <= table.status.rows <= 160


def test_smaller_limit_of_the_next_job_holds_from_its_first_new_row() -> None:
    table = SparseTable(replace(LIMITED, expiry=None))
    push(table, some_keys(1000))

    table.declare(LIMITED)
    push(table, some_keys(1, start=5000))

    assert 140 < table.status.rows <= 160
    assert 5000 in counted_by(table)


def test_memory_stays_where_the_limit_is() -> None:
    """Ten times as many rows would take 150 MB more."""
    table = SparseTable(
        replace(LIMITED, dim=100, num_shards=16, expiry=ExpirySpec(max_rows=40_000))
    )
    push(table, some_keys(40_000))
    before = resident_bytes()

    for start in range(40_000, 400_000, 40_000):
        push(table, some_keys(40_000, start))

    assert resident_bytes() - before < 2 * table.status.size_bytes


@pytest.mark.parametrize("seed", range(5))
def test_snapshot_is_of_its_moment_while_rows_are_evicted(seed: int) -> None:
    """Copied in stretches of 7 rows, between pushes that replace all rows several times."""
    random = np.random.default_rng(seed)
    now = [0.0]
    table = SparseTable(replace(LIMITED, num_shards=2), clock=lambda: now[0])
    push(table, random.choice(10_000, 150, replace=False).astype(np.uint64))
    expected = {shard: table.export_shard(shard) for shard in table.shards}

    snapshot = table.begin_snapshot()
    copies = {shard: snapshot.copy_shard(shard, stretch_rows=7) for shard in table.shards}
    while not all(copy.is_done for copy in copies.values()):
        now[0] += 1
        push(table, random.choice(10_000, 20, replace=False).astype(np.uint64), shows=5)
        for copy in copies.values():
            if not copy.is_done:
                copy.step()
    table.end_snapshot(saved=True)

    assert table.status.evicted > 0
    for shard, copy in copies.items():
        rows = copy.rows()
        for field in ("keys", "weights", "state", "statistics"):
            wanted, found = getattr(expected[shard], field), getattr(rows, field)
            np.testing.assert_array_equal(wanted.view(np.uint32), found.view(np.uint32))


def test_full_table_evicts_nothing_for_keys_that_are_only_counted() -> None:
    """Their memory grows, which is no reason for a row to go."""
    admission = AdmissionSpec(policy="count", threshold=2)
    table = SparseTable(replace(LIMITED, admission=admission))
    push(table, some_keys(160), shows=2)

    push(table, some_keys(5000, start=1000))

    assert (table.status.rows, table.status.evicted) == (160, 0)
    assert table.status.candidates == 5000
