"""Parts in which a server gives what leaves it, whatever it is: none is larger than was asked for."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import AdmissionSpec, ExpirySpec, StatisticsSpec, TableSpec
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import WIDE, push_id

PART_BYTES = 4096
HEADERS = 200
NUM_KEYS = 5000
AFTER = replace(ShardMap.of(2, ("a:1", "b:1")), epoch=2)
COUNTED = replace(WIDE, num_shards=2, statistics=StatisticsSpec())
TABLES = {
    "rows": COUNTED,
    "removed": replace(COUNTED, expiry=ExpirySpec(max_unseen=1)),
    "candidates": replace(COUNTED, admission=AdmissionSpec(threshold=3)),
    "counters": replace(
        COUNTED, admission=AdmissionSpec(threshold=3, counter="bloom", expected_keys=30_001)
    ),
    "wide-counters": replace(
        COUNTED, admission=AdmissionSpec(threshold=999, counter="bloom", expected_keys=30_001)
    ),
}


def store_with(spec: TableSpec) -> ParameterStore:
    store = ParameterStore()
    store.create_table(spec)
    return store


def push(store: ParameterStore) -> None:
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    counts = np.ones((NUM_KEYS, 2), np.uint32)
    grad = SparseGrad(keys, np.ones((NUM_KEYS, 1), np.float32), 1, counts)
    store.push_grad(Gradients({WIDE.name: grad}), push_id()).result()


def moved(source: ParameterStore, target: ParameterStore) -> list[int]:
    """Moves what server 1 will have; returns the bytes of the parts."""
    sizes = []
    while True:
        taken = source.engine.parameters.take_moved(1, PART_BYTES, with_counts=True)
        message = calls.PUT_MOVED.request.encode(
            requests.PutMoved(token="m", number=1, moved=taken.moved)
        )
        sizes.append(len(message))
        target.engine.parameters.put_moved(calls.PUT_MOVED.request.decode(message).moved)
        if taken.is_all:
            return sizes


def contents(store: ParameterStore) -> list[np.ndarray]:
    """Returns all of the shard that moves."""
    table = store.engine.parameters.table(WIDE.name)
    parts = [regions.sorted_rows(1) for regions in table._moved_regions]
    rows = [getattr(part, name) for part in parts for name in ("keys", "weights", "statistics")]
    return [*rows, table.counters_of_shard(1)]


@pytest.mark.parametrize("what", TABLES)
def test_no_part_is_larger_than_was_asked_for(what: str) -> None:
    source, target = store_with(TABLES[what]), store_with(TABLES[what])
    push(source)
    target.engine.place(replace(AFTER, owners=(0,) * 1024), 1)
    source.engine.parameters.begin_move(AFTER)
    if what == "removed":
        moved(source, target)
        for _ in range(2):
            source.shrink()
    sizes = moved(source, target)

    assert len(sizes) > 5
    assert max(sizes) <= PART_BYTES + HEADERS
    for ours, theirs in zip(contents(target), contents(source), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_table_that_changes_all_the_time_does_not_hold_up_others() -> None:
    source = store_with(COUNTED)
    source.create_table(replace(COUNTED, name="cold"))
    push(source)
    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    cold = SparseGrad(
        keys, np.ones((NUM_KEYS, 1), np.float32), 1, np.ones((NUM_KEYS, 2), np.uint32)
    )
    source.push_grad(Gradients({"cold": cold}), push_id(sequence=1)).result()
    source.engine.parameters.begin_move(AFTER)

    taken: dict[str, int] = {}
    while taken.get("cold", 0) < source.engine.parameters.table("cold").loads_of_shards()[1][1]:
        taking = source.engine.parameters.take_moved(1, PART_BYTES, with_counts=False)
        for rows in taking.moved.rows:
            taken[rows.table] = taken.get(rows.table, 0) + rows.keys.size
        hot = SparseGrad(keys, np.ones((NUM_KEYS, 1), np.float32), 1, cold.counts)
        source.push_grad(
            Gradients({WIDE.name: hot}), push_id(sequence=1 + sum(taken.values()))
        ).result()
        assert taken.get(WIDE.name, 0) < 2 * NUM_KEYS, taken
