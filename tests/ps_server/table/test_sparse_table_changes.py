"""What a subscriber of a table is told: each row that changed since it last took it."""

import re

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.address_space import map_some

ALL = 10**9


def new_table(num_subscribers: int = 1, **settings: int) -> SparseTable:
    """Returns a table whose weights go down by what is pushed."""
    spec = TableSpec(
        name="t",
        dim=2,
        initializer=InitializerSpec(),
        optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
        num_shards=4,
    )
    return SparseTable(spec, num_subscribers=num_subscribers, **settings)


def push(table: SparseTable, *keys: int) -> None:
    table.push(SparseGrad(keys_of(*keys), np.ones((len(keys), 2), np.float32), 1))


def keys_of(*keys: int) -> Keys:
    return np.array(keys, np.uint64)


def take(table: SparseTable, subscriber: int = 0, max_rows: int = ALL) -> dict[int, list[float]]:
    keys, weights = table.take_changed(subscriber, max_rows)
    assert weights.shape == (keys.size, 2)
    return dict(zip(keys.tolist(), weights.tolist(), strict=True))


def test_row_that_changes_all_the_time_keeps_no_other_waiting() -> None:
    """The next call resumes where the last one stopped: within a shard, and from shard to shard."""
    table = new_table()
    push(table, *range(100))
    hot = next(iter(take(table, max_rows=1)))
    taken = {hot}

    for _ in range(110):
        push(table, hot)
        taken |= take(table, max_rows=1).keys()

    assert taken == set(range(100))


def test_server_without_shards_has_no_changes() -> None:
    table = new_table(server_index=5, shard_map=ShardMap.of(6))

    assert take(table) == {}


@pytest.mark.parametrize(("num_subscribers", "subscriber"), [(0, 0), (2, 2), (2, -1)])
def test_subscriber_that_the_table_does_not_know_is_refused(
    num_subscribers: int, subscriber: int
) -> None:
    table = new_table(num_subscribers)

    message = (
        f"'t' records changes for {num_subscribers} subscribers, not for subscriber {subscriber}"
    )
    with pytest.raises(ProtocolError, match=re.escape(message)):
        table.take_changed(subscriber, 1)


def test_taking_no_rows_leaves_all_for_the_next() -> None:
    """As when a pull is full before it comes to the last of its tables."""
    table = new_table()
    push(table, 1, 2)

    assert take(table, max_rows=0) == {}
    assert take(table).keys() == {1, 2}


@pytest.mark.parametrize(
    ("num_subscribers", "row_bytes"), [(0, 0), (1, 1), (7, 1), (8, 2), (64, 9)]
)
def test_status_counts_the_bytes_that_subscribers_take(
    num_subscribers: int, row_bytes: int
) -> None:
    """A bit each, and one for a move of shards."""
    table, plain = new_table(num_subscribers), new_table(0)

    push(table, 1, 2, 3)
    push(plain, 1, 2, 3)

    assert table.status.size_bytes - plain.status.size_bytes == 3 * row_bytes


def test_no_change_is_lost_where_only_the_rows_grow_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their bits are copied as they grow, where the system grants no more address space."""
    monkeypatch.setattr(
        "ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some([True, False, True, True])
    )
    table = new_table(num_subscribers=1000)
    keys = range(5000)

    push(table, *keys)

    assert take(table, 999).keys() == set(keys)
    assert take(table, 999) == {}


@pytest.mark.parametrize("source", [0, 1, 7, 8, 69])
def test_sender_of_a_push_does_not_hear_of_it(source: int) -> None:
    table = new_table(num_subscribers=70)
    grad = SparseGrad(np.arange(5, dtype=np.uint64), np.ones((5, table.spec.dim), np.float32), 1)

    table.push(grad, source)

    heard = [table.take_changed(subscriber, 10)[0].size for subscriber in range(70)]
    assert heard == [0 if subscriber == source else 5 for subscriber in range(70)]


def test_own_push_does_not_hide_what_others_changed_before() -> None:
    table = new_table(num_subscribers=2)
    grad = SparseGrad(np.arange(5, dtype=np.uint64), np.ones((5, table.spec.dim), np.float32), 1)

    table.push(grad, 1)
    table.push(grad, 0)

    assert table.take_changed(0, 10)[0].size == 5
    assert table.take_changed(1, 10)[0].size == 5


def test_table_begins_to_record_with_every_row_changed() -> None:
    table = new_table(num_subscribers=0)
    keys = np.arange(3000, dtype=np.uint64)
    push(table, *keys.tolist())

    table.record_changes(2)

    push(table, 3000)
    assert sorted(take(table, 0)) == list(range(3001))
    assert take(table, 0) == {}
    assert sorted(take(table, 1)) == list(range(3001))


def test_recording_begins_afresh_for_other_subscribers() -> None:
    table = new_table(num_subscribers=1)
    push(table, 1, 2)
    take(table)

    table.record_changes(70)

    assert take(table, 69) == {1: [-1, -1], 2: [-1, -1]}
    push(table, 2)
    assert sorted(take(table, 69)) == [2]
    assert sorted(take(table, 0)) == [1, 2]


def test_empty_table_begins_to_record() -> None:
    table = new_table(num_subscribers=0)

    table.record_changes(1)

    assert take(table) == {}
    push(table, 5)
    assert sorted(take(table)) == [5]
