"""Candidates and counters in a snapshot, and loaded back."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError, SpecError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import (
    AdmissionSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.ps_server.table.contents import Rows, ShardSource
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_server.table.table_snapshot import TableSnapshot
from tests.reference.admission import ReferenceAdmission
from tests.support.rows import resident_bytes
from tests.support.statistics import candidates_of, counted_by

EXACT = TableSpec(
    name="t",
    dim=3,
    initializer=InitializerSpec(kind="uniform", scale=0.5),
    optimizer=OptimizerSpec(name="adagrad"),
    num_shards=4,
    statistics=StatisticsSpec(),
    admission=AdmissionSpec(threshold=6),
)
BLOOM = replace(EXACT, admission=AdmissionSpec(threshold=6, counter="bloom", expected_keys=2000))
UNIVERSE = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64)


def gradient(rng: np.random.Generator) -> SparseGrad:
    keys = rng.choice(UNIVERSE, 100, replace=False)
    shows = rng.integers(1, 4, keys.size)
    counts = np.stack([shows, shows // 2], axis=1).astype(np.uint32)
    return SparseGrad(keys, np.ones((keys.size, 3), np.float32), 1, counts)


def trained(spec: TableSpec, pushes: int = 8, seed: int = 1) -> SparseTable:
    table = SparseTable(spec, clock=lambda: 1000.0)
    rng = np.random.default_rng(seed)
    for _ in range(pushes):
        table.push(gradient(rng))
    return table


def test_candidates_of_a_snapshot_are_those_of_its_moment() -> None:
    """Others are counted, admitted and removed while it is copied."""
    table, reference = SparseTable(EXACT), ReferenceAdmission(EXACT)
    rng = np.random.default_rng(2)

    def push() -> None:
        grad = gradient(rng)
        table.push(grad)
        assert grad.counts is not None
        for key, (shows, clicks) in zip(grad.keys.tolist(), grad.counts.tolist(), strict=True):
            reference.push(key, shows, clicks)

    for _ in range(6):
        for _ in range(3):
            push()
        before = dict(reference.candidates)
        snapshot = table.begin_snapshot()
        assert isinstance(snapshot.candidates, TableSnapshot)
        copies = [snapshot.candidates.copy_shard(shard, stretch_rows=7) for shard in table.shards]
        while not all(copy.is_done for copy in copies):
            for copy in copies:
                if not copy.is_done:
                    copy.step()
            push()
        table.end_snapshot(saved=True)
        found = {
            int(key): (float(show), float(click))
            for copy in copies
            for key, (show, click, *_) in zip(copy.rows().keys, copy.rows().statistics, strict=True)
        }
        assert found == before
    assert len(reference.rows) > 400
    assert {key: (each.show, each.click) for key, each in candidates_of(table).items()} == (
        reference.candidates
    )


def test_written_candidates_are_counted_on() -> None:
    table, other = trained(EXACT), SparseTable(EXACT, clock=lambda: 1000.0)
    snapshot = table.begin_snapshot()
    assert isinstance(snapshot.candidates, TableSnapshot)
    for shard in table.shards:
        other.write(snapshot.export_shard(shard))
        other.write_candidates(snapshot.candidates.export_shard(shard))
    table.end_snapshot(saved=True)

    assert candidates_of(other) == candidates_of(table)
    assert len(candidates_of(other)) > 50
    for each in (table, other):
        each.push(gradient(np.random.default_rng(9)))

    assert candidates_of(other) == candidates_of(table)
    assert counted_by(other).keys() == counted_by(table).keys()


def test_written_counters_are_counted_on() -> None:
    table, other = trained(BLOOM), SparseTable(BLOOM)
    table._candidates.filter.decay(1, 0.9)  # type: ignore[union-attr]
    snapshot = table.begin_snapshot()
    assert isinstance(snapshot.candidates, ShardSource)
    for shard in table.shards:
        other.write(snapshot.export_shard(shard))
    table.push(gradient(np.random.default_rng(3)))  # after the snapshot
    for shard in table.shards:
        other.write_counters(shard, snapshot.candidates.export_shard(shard))
    table.end_snapshot(saved=True)
    other.push(gradient(np.random.default_rng(3)))

    filters = [each._candidates.filter for each in (table, other)]  # type: ignore[union-attr]
    np.testing.assert_array_equal(filters[0].arrays.counters, filters[1].arrays.counters)
    assert filters[1].passes.tolist() == [0, 1, 0, 0]
    assert counted_by(other).keys() == counted_by(table).keys()


def test_table_without_candidates_takes_none() -> None:
    rows = Rows(
        keys=UNIVERSE[:1],
        weights=np.empty((1, 0), np.float32),
        state=np.empty((1, 0), np.float32),
        statistics=np.ones((1, 4), np.float32),
    )

    for spec in (replace(EXACT, admission=None), BLOOM):
        with pytest.raises(SpecError, match="'t' has no exact counts of keys without a row"):
            SparseTable(spec).write_candidates(rows)
    with pytest.raises(SpecError, match="'t' has no counters"):
        SparseTable(EXACT).write_counters(0, np.zeros(9, np.uint8))


@pytest.mark.parametrize("widths", [(0, 0, 5), (0, 0, 0), (1, 0, 4), (0, 2, 4)])
def test_candidates_of_another_width_are_not_written(widths: tuple[int, int, int]) -> None:
    table = SparseTable(EXACT)
    rows = Rows(UNIVERSE[:1], *(np.ones((1, width), np.float32) for width in widths))

    with pytest.raises(CheckpointError, match=r"table 't' has .* of width"):
        table.write_candidates(rows)

    assert table.status.candidates == 0


@pytest.mark.parametrize("size", [0, 8, 9, 10**6])
def test_counters_of_another_size_are_not_written(size: int) -> None:
    with pytest.raises(CheckpointError, match=f"shard 0 was saved with {size}"):
        SparseTable(BLOOM).write_counters(0, np.zeros(size, np.uint8))


@pytest.mark.parametrize(
    ("saved", "can_load"),
    [
        (EXACT, True),
        (replace(EXACT, admission=AdmissionSpec(policy="score", threshold=1.0)), True),
        (replace(EXACT, admission=None), False),
        (BLOOM, False),
    ],
    ids=["same", "other-policy", "none", "other-counter"],
)
def test_counts_can_be_loaded_if_they_are_of_the_same_kind(
    saved: TableSpec, can_load: bool
) -> None:
    assert SparseTable(EXACT).counts_as(saved) is can_load


def test_counters_of_another_size_are_no_use() -> None:
    assert BLOOM.admission is not None
    larger = replace(BLOOM, admission=replace(BLOOM.admission, expected_keys=4000))

    assert SparseTable(BLOOM).counts_as(BLOOM)
    assert not SparseTable(BLOOM).counts_as(larger)


# The end of a pass


@pytest.mark.parametrize(
    "expiry",
    [None, ExpirySpec(delete_threshold=0.5), ExpirySpec(max_unseen=1), ExpirySpec(ttl_s=25.0)],
    ids=["none", "score", "unseen", "age"],
)
def test_candidates_age_and_expire_as_rows_do(expiry: ExpirySpec | None) -> None:
    """The same pushes to a table of which no key is admitted, and to one of which all are."""
    statistics = StatisticsSpec(decay=0.5)
    spec = replace(EXACT, statistics=statistics, expiry=expiry)
    now = [100.0]
    waiting = SparseTable(
        replace(spec, admission=AdmissionSpec(threshold=999)), clock=lambda: now[0]
    )
    admitted = SparseTable(replace(spec, admission=None), clock=lambda: now[0])
    rng = np.random.default_rng(4)

    sizes = []
    for _ in range(6):
        grad = gradient(rng)
        for table in (waiting, admitted):
            table.push(grad)
        before = waiting.status.candidates
        said = waiting.shrink(dry_run=True)
        admitted.shrink(dry_run=True)
        assert waiting.shrink() == said
        assert said.candidates == admitted.shrink().rows == before - waiting.status.candidates
        now[0] += 10.0
        assert candidates_of(waiting) == counted_by(admitted)
        sizes.append(len(candidates_of(waiting)))

    assert waiting.status.rows == 0
    assert (max(sizes) == sizes[-1] > 300) == (expiry is None)


def test_norm_is_for_rows_only() -> None:
    """Candidates have no weights that could be small."""
    table = trained(EXACT)
    before = candidates_of(table).keys()

    table.shrink(max_norm=1e9)

    assert table.status.rows == 0
    assert candidates_of(table).keys() == before


def test_filter_decays_at_the_end_of_a_pass() -> None:
    table = trained(replace(BLOOM, statistics=StatisticsSpec(decay=0.5)), pushes=3)
    counters = table._candidates.filter.arrays.counters  # type: ignore[union-attr]
    before = counters.sum(dtype=np.int64)

    table.shrink(dry_run=True)
    assert counters.sum(dtype=np.int64) == before
    table.shrink()

    assert counters.sum(dtype=np.int64) == pytest.approx(before / 2, rel=0.05)


def test_filter_takes_memory_only_for_the_shards_that_a_server_has() -> None:
    """Those of others were zeroed at the end of a move, which allocated all of the filter."""
    SparseTable(BLOOM, shard_map=ShardMap.of(2)).drop_others()  # compiles the kernels
    admission = AdmissionSpec(threshold=6, counter="bloom", expected_keys=14_000_000)
    table = SparseTable(replace(BLOOM, admission=admission), shard_map=ShardMap.of(2))
    counters = table._candidates.filter.arrays.counters  # type: ignore[union-attr]
    counters[0] = counters[2] = 1
    before = resident_bytes()

    table.place(ShardMap.of(4), 0)
    table.drop_others()

    assert before - resident_bytes() == pytest.approx(counters[2].nbytes, rel=0.2)
    assert counters[0].all()
    assert not counters[2].any()


# Limits


@pytest.mark.parametrize("evict", ["lru", "score"])
@pytest.mark.parametrize(
    "admission",
    [
        AdmissionSpec(threshold=4),
        AdmissionSpec(threshold=4, counter="bloom", expected_keys=10_000),
    ],
    ids=["exact", "bloom"],
)
def test_rows_and_candidates_stay_within_the_bytes_of_their_table(
    admission: AdmissionSpec, evict: str
) -> None:
    limit = 200_000
    expiry = ExpirySpec(max_bytes=limit, evict=evict)
    table = SparseTable(replace(EXACT, admission=admission, expiry=expiry))
    rng = np.random.default_rng(6)

    for _ in range(30):
        known, new = rng.integers(0, 6000, 2000), rng.integers(2**62, size=800)
        keys = np.unique(np.concatenate([known, new])).astype(np.uint64)
        shows = rng.integers(1, 5, keys.size)
        counts = np.stack([shows, shows // 2], axis=1).astype(np.uint32)
        table.push(SparseGrad(keys, np.ones((keys.size, 3), np.float32), 1, counts))
        assert table.status.size_bytes + table.status.candidate_bytes <= limit

    status = table.status
    assert status.evicted > 0
    assert status.size_bytes + status.candidate_bytes > 0.6 * limit
    if admission.counter == "exact":
        assert 0.6 * limit / 4 < status.candidate_bytes <= limit / 4


def test_full_shard_forgets_the_candidates_that_were_not_seen_for_longest() -> None:
    now = [0.0]
    spec = replace(EXACT, num_shards=1, expiry=ExpirySpec(max_bytes=4 * (8 * 64 + 32 * 24)))
    table = SparseTable(spec, clock=lambda: now[0])
    keys = np.arange(33, dtype=np.uint64)
    for now[0], key in enumerate(keys, start=10):
        grad = np.ones((1, 3), np.float32), 1, np.array([[1, 0]], np.uint32)
        table.push(SparseGrad(np.array([key]), *grad))

    assert candidates_of(table).keys() == set(range(2, 33))
    assert table.status.evicted == 0  # no row was


def test_next_job_may_leave_less_room_for_candidates() -> None:
    table = trained(replace(EXACT, num_shards=1), pushes=4)
    assert table.status.candidates > 200

    table.declare(replace(EXACT, num_shards=1, expiry=ExpirySpec(max_bytes=10_000)))
    for seed in range(2):
        table.push(gradient(np.random.default_rng(seed)))

    assert table.status.candidate_bytes <= 10_000 / 4


def test_limit_without_room_for_a_row_beside_the_counters_is_refused() -> None:
    for admission, count_bytes in ((EXACT.admission, 1000), (BLOOM.admission, 19_172)):
        spec = replace(EXACT, admission=admission, expiry=ExpirySpec(max_bytes=4000))
        with pytest.raises(SpecError, match=f"too few .* beside {count_bytes} bytes of counts"):
            SparseTable(spec)
