"""A table of rows: what it reads, creates, refuses and exports."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.protos.errors import (
    CheckpointError,
    GradientError,
    SpecError,
)
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap, shard_of
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.memory.arena import Arena
from ctr_ps.ps_server.table.memory.hash_index import BLOCK, INITIAL_SLOTS, MAX_LOAD_PERCENT
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_server.table.spec_checks import MAX_DIM, MAX_SHARDS
from tests.support.optimizers import plain_optimizer

EDGE_KEYS = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]


def spec_of(**changes: object) -> TableSpec:
    fields: dict[str, object] = {
        "name": "t",
        "dim": 2,
        "initializer": InitializerSpec(kind="uniform", scale=0.5),
        "optimizer": OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    }
    return TableSpec(**(fields | changes))  # type: ignore[arg-type]


def keys_of(*keys: int) -> Keys:
    return np.array(keys, np.uint64)


def ones(keys: Keys, dim: int = 2) -> SparseGrad:
    return SparseGrad(keys, np.ones((keys.size, dim), np.float32), 1)


def exported(table: SparseTable) -> dict[int, tuple[list[float], list[float]]]:
    shards = [table.export_shard(shard) for shard in table.shards]
    return {
        int(key): (weights.tolist(), state.tolist())
        for rows in shards
        for key, weights, state in zip(rows.keys, rows.weights, rows.state, strict=True)
    }


def random_keys(count: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)


# Initial values depend on seed, table and key alone


@pytest.mark.parametrize("num_servers", [2, 3, 70])
def test_rows_do_not_depend_on_the_number_of_servers(num_servers: int) -> None:
    spec = spec_of(optimizer=OptimizerSpec(name="adam"))
    keys = np.concatenate([random_keys(200), keys_of(*EDGE_KEYS)])
    gradient = ones(keys)
    alone = SparseTable(spec)
    alone.push(gradient)
    servers = [
        SparseTable(spec, server_index=server, shard_map=ShardMap.of(num_servers))
        for server in range(num_servers)
    ]

    for table, positions in zip(
        servers, ShardMap.of(num_servers).route(keys, spec.num_shards), strict=True
    ):
        table.push(ones(keys[positions]))

    together = [exported(table) for table in servers]
    assert sum(len(rows) for rows in together) == keys.size
    assert {key: row for rows in together for key, row in rows.items()} == exported(alone)


@settings(max_examples=20)
@given(order=st.permutations(range(120)), snapshot=st.integers(0, 120))
def test_rows_do_not_depend_on_the_order_in_which_keys_came(
    order: list[int], snapshot: int
) -> None:
    spec = spec_of(num_shards=2)
    keys = random_keys(120)
    expected, shuffled = SparseTable(spec), SparseTable(spec)
    expected.push(ones(keys))

    shuffled.push(ones(keys[order[:snapshot]]))
    shuffled.push(ones(keys[order[snapshot:]]))

    assert exported(shuffled) == exported(expected)


def test_tables_of_other_names_and_seeds_start_elsewhere() -> None:
    starts = [
        SparseTable(spec).pull(keys_of(1), Missing.INITIAL).tolist()[0][0]
        for spec in (spec_of(), spec_of(name="u"), spec_of(seed=1))
    ]

    assert len(set(starts)) == 3


# A key twice in one push


@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
@pytest.mark.parametrize("distance", [1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_key_twice_in_one_push_acts_as_two_pushes(name: str, distance: int, known: bool) -> None:
    """In one block of the kernel and across blocks."""
    spec = spec_of(optimizer=plain_optimizer(name))
    once, twice = SparseTable(spec), SparseTable(spec)
    keys = random_keys(3 * BLOCK)
    keys[5 + distance] = keys[5]
    values = np.random.default_rng(1).normal(size=(keys.size, 2)).astype(np.float32)
    if known:
        once.push(ones(keys[5:6]))
        twice.push(ones(keys[5:6]))

    twice.push(SparseGrad(keys, values, 1))
    for i in range(keys.size):
        once.push(SparseGrad(keys[i : i + 1], values[i : i + 1], 1))

    assert twice.status.rows == once.status.rows == keys.size - 1
    assert exported(twice) == exported(once)


# Refusals


@pytest.mark.parametrize("examples", [0, -1])
def test_values_that_sum_over_no_examples_are_refused(examples: int) -> None:
    table = SparseTable(spec_of())

    with pytest.raises(GradientError, match=f"over {examples} examples"):
        table.check(SparseGrad(keys_of(1), np.zeros((1, 2), np.float32), examples))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim 0, expected 1 to 4096"),
        ({"dim": MAX_DIM + 1}, "dim 4097"),
        ({"num_shards": 0}, "0 shards, expected a power of two"),
        ({"num_shards": -2}, "-2 shards"),
        ({"num_shards": 48}, "48 shards"),
        ({"num_shards": 2 * MAX_SHARDS}, "8192 shards"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"name": ""}, "invalid name ''"),
        ({"name": "../t"}, "invalid name '../t'"),
        ({"name": "a/b"}, "invalid name 'a/b'"),
        ({"name": ".hidden"}, "invalid name '.hidden'"),
        ({"name": "t\n"}, "invalid name 't"),
        ({"name": "t" * 101}, "invalid name 't"),
        ({"name": "té"}, "invalid name 'té'"),
        ({"initializer": InitializerSpec(kind="xavier")}, "initializer 'xavier'"),
        ({"initializer": InitializerSpec(scale=-1.0)}, "initial scale -1.0"),
        ({"initializer": InitializerSpec(scale=float("nan"))}, "initial scale nan"),
        ({"initializer": InitializerSpec(scale=1e39)}, "initial scale 1e+39"),
        ({"optimizer": OptimizerSpec(name="adamw")}, "did you mean 'adam'"),
        ({"optimizer": OptimizerSpec(name="sgd", params={"lr": 1.0})}, "did you mean"),
    ],
)
def test_impossible_spec_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        SparseTable(spec_of(**changes))


@pytest.mark.parametrize("name", ["t", "T_1", "0", "user.id-2", "t" * 100])
def test_names_of_letters_digits_and_some_marks_are_taken(name: str) -> None:
    assert SparseTable(spec_of(name=name)).spec.name == name


# Export and write


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_written_rows_are_exported_as_they_were(name: str) -> None:
    spec = spec_of(dim=3, num_shards=4, optimizer=plain_optimizer(name))
    trained, copy = SparseTable(spec), SparseTable(spec)
    for seed in range(3):
        trained.push(ones(random_keys(500, seed // 2), dim=3))

    for shard in trained.shards:
        rows = trained.export_shard(shard)
        assert (np.diff(rows.keys.astype(object)) > 0).all()
        copy.write(frozen(rows))

    assert copy.status.rows == trained.status.rows == 1000
    assert exported(copy) == exported(trained)


def frozen(rows: Rows) -> Rows:
    """Returns the rows as they come out of a checkpoint."""
    for column in (rows.keys, rows.weights, rows.state):
        column.flags.writeable = False
    return rows


def test_export_is_a_copy() -> None:
    table = SparseTable(spec_of(num_shards=1))
    table.push(ones(keys_of(1)))

    rows = table.export_shard(0)
    rows.weights[:] = 99.0

    assert 99.0 not in table.pull(keys_of(1), Missing.ZEROS)


def test_refused_declaration_changes_nothing() -> None:
    table = SparseTable(spec_of())

    with pytest.raises(SpecError):
        table.declare(spec_of(initializer=InitializerSpec(scale=-1.0)))

    assert table.spec == spec_of()


# Size


def test_status_counts_rows_and_bytes() -> None:
    table = SparseTable(spec_of(num_shards=2))

    table.push(ones(random_keys(10)))

    row_bytes = 8 + 2 * 4
    assert (table.status.rows, table.status.size_bytes) == (
        10,
        10 * row_bytes + 2 * INITIAL_SLOTS * 8,
    )


def test_status_counts_the_shards_of_this_server() -> None:
    table = SparseTable(spec_of(num_shards=64), server_index=0, shard_map=ShardMap.of(2))

    status = table.status
    assert status.size_bytes == 32 * INITIAL_SLOTS * 8
    assert (status.shards, status.index_slots) == (32, 32 * INITIAL_SLOTS)
    assert (status.smallest_shard, status.largest_shard) == (0, 0)


def test_status_tells_the_rows_of_the_fullest_and_the_emptiest_shard() -> None:
    table = SparseTable(spec_of(num_shards=4))
    keys = random_keys(100)

    table.push(ones(keys))

    rows = np.bincount([int(shard_of(key, np.uint64(4))) for key in keys], minlength=4)
    assert (table.status.smallest_shard, table.status.largest_shard) == (rows.min(), rows.max())
    assert rows.min() < rows.max()


@pytest.mark.parametrize("fails_at", [1, 2, 3], ids=["rows", "changes", "index"])
def test_table_that_runs_out_of_memory_keeps_its_rows(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its three arrays could not grow; and it works again once there is memory."""
    spec = spec_of(num_shards=1, initializer=InitializerSpec())
    full = INITIAL_SLOTS * MAX_LOAD_PERCENT // 100
    table = SparseTable(spec, num_subscribers=1, region_bytes=full * 16)  # full at once
    keys = random_keys(2 * full)
    table.push(ones(keys[:full]))
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "_zeros", failing_call(Arena._zeros, fails_at))
        with pytest.raises(MemoryError):
            table.push(ones(keys[full:]))

    table.push(ones(keys[:full]))
    assert table.pull(keys, Missing.ZEROS)[:, 0].tolist() == [-2.0] * full + [0.0] * full
    table.push(ones(keys))

    assert table.pull(keys, Missing.ZEROS)[:, 0].tolist() == [-3.0] * full + [-1.0] * full
    assert table.take_changed(0, 3 * full)[0].size == 2 * full


def failing_call(function: object, fails_at: int) -> object:
    calls = iter(range(1, 10))

    def call(*arguments: object) -> object:
        if next(calls) == fails_at:
            raise MemoryError
        return function(*arguments)  # type: ignore[operator]

    return call


@pytest.mark.parametrize(
    "widths", [(2, 0, 0), (2, 1, 0), (2, 3, 0), (1, 2, 0), (3, 2, 0), (2, 2, 1), (2, 2, 5)]
)
def test_rows_of_another_width_are_not_written(widths: tuple[int, int, int]) -> None:
    """The kernel copies them as they are: over the rows behind, and behind the last one over other memory."""
    table = SparseTable(spec_of(optimizer=plain_optimizer("adagrad")))
    keys = keys_of(1, 2, 3)
    own = Rows(keys, *(np.full((3, width), 7, np.float32) for width in (2, 2, 0)))
    table.write(own)

    with pytest.raises(CheckpointError, match=r"table 't' has .* of width"):
        table.write(Rows(keys, *(np.zeros((3, width), np.float32) for width in widths)))

    assert exported(table) == {key: ([7, 7], [7, 7]) for key in (1, 2, 3)}


def test_rows_without_statistics_of_a_table_with_them_are_not_wider() -> None:
    table = SparseTable(spec_of(statistics=StatisticsSpec()))

    with pytest.raises(CheckpointError, match=r"width 4, but 2 rows have .* shape \(2, 6\)"):
        table.write(Rows(keys_of(1, 2), *(np.zeros((2, width), np.float32) for width in (2, 0, 6))))
