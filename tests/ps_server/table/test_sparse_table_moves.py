"""Shards that move from table to table while rows and candidates change and are removed."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import UnknownChangesError
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
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.feature_life.candidates import ExactCandidates
from ctr_ps.ps_server.table.sparse_table import SparseTable

SPEC = TableSpec(
    name="t",
    dim=2,
    initializer=InitializerSpec(scale=0.1),
    optimizer=OptimizerSpec(name="adagrad"),
    num_shards=8,
    statistics=StatisticsSpec(),
    admission=AdmissionSpec(threshold=2),
    # 10 rows a shard, so pushes remove others, whose keys are candidates when they come again.
    expiry=ExpirySpec(max_rows=80, max_unseen=1),
)
BEFORE, AFTER = ShardMap.of(1), ShardMap.of(3)
TARGETS = (1, 2)

pushes = st.tuples(st.just("push"), st.integers(0, 20), st.integers(1, 150))
shrinks = st.tuples(st.just("shrink"), st.just(0), st.just(0))
takes = st.tuples(st.just("take"), st.sampled_from(TARGETS), st.integers(1, 40))


@given(steps=st.lists(pushes | takes | shrinks, max_size=30))
def test_targets_end_with_the_rows_and_candidates_of_the_source(
    steps: list[tuple[str, int, int]],
) -> None:
    source = SparseTable(SPEC)
    targets = {each: SparseTable(SPEC, server_index=each, shard_map=BEFORE) for each in TARGETS}
    leaving = {each: frozenset(AFTER.shards_of(each, SPEC.num_shards)) for each in TARGETS}
    push(source, 0, 200)
    push(source, 0, 100)
    source.begin_move(sorted(frozenset.union(*leaving.values())))
    for what, number, size in steps:
        if what == "push":
            push(source, 10 * number, size)
        elif what == "shrink":
            source.shrink()
        else:
            assert move(source, targets[number], leaving[number], size) <= size
    for number, target in targets.items():
        while move(source, target, leaving[number], 7) == 7:
            pass
        assert move(source, target, leaving[number], 7) == 0
        target.place(AFTER, number)
        for shard in leaving[number]:
            for ours, theirs in zip(contents(target, shard), contents(source, shard), strict=True):
                for name in ("keys", "weights", "state", "statistics"):
                    np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_shards_take_turns() -> None:
    """So a move ends however often the rows of one shard change."""
    source = SparseTable(SPEC)
    push(source, 0, 100)
    shards = frozenset(range(SPEC.num_shards))
    source.begin_move(sorted(shards))
    taken: set[int] = set()
    for _ in range(2 * 100 // 5):
        for rows, _removed in source.take_moved(shards, 5):
            taken.update(rows.keys.tolist())
        push(source, 1000, 4)

    assert taken >= set(range(100))


def test_a_delta_of_a_table_whose_shards_have_moved_is_refused() -> None:
    """It would lack the rows of shards that came."""
    table = SparseTable(SPEC)
    table.begin_snapshot()
    table.end_snapshot(saved=True)
    table.begin_snapshot(changes_only=True)
    table.end_snapshot(saved=True)
    table.place(AFTER, 0)

    with pytest.raises(UnknownChangesError):
        table.begin_snapshot(changes_only=True)


def move(source: SparseTable, target: SparseTable, shards: frozenset[int], max_rows: int) -> int:
    taken = source.take_moved(shards, max_rows)
    for (rows, removed), candidates in zip(taken, (False, True), strict=True):
        target.put_moved(rows, removed, candidates=candidates)
    return sum(rows.keys.size + removed.size for rows, removed in taken)


def contents(table: SparseTable, shard: int) -> Iterator[Rows]:
    yield table.export_shard(shard)
    assert isinstance(table._candidates, ExactCandidates)
    yield table._candidates.regions.sorted_rows(shard)


def push(table: SparseTable, first: int, size: int) -> None:
    keys = np.arange(first, first + size, dtype=np.uint64)
    grad = np.random.default_rng(size).normal(size=(size, SPEC.dim)).astype(np.float32)
    table.push(SparseGrad(keys, grad, 1, counts=np.ones((size, 2), np.uint32)))
