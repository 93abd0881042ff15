"""Tables with bfloat16 weights: rounded without bias, the same everywhere, half as large."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.gradients import Gradients, SparseGrad, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import (
    AdmissionSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing, ModelState, RowStates, SaveRequest
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.replica_table import ReplicaTable
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.optimizers import plain_optimizer
from tests.support.stores import push_id

KEYS = np.arange(1, 2001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
DIM = 5  # odd: the last column of a row's weights has one of them


def spec_of(**changes: object) -> TableSpec:
    fields: dict[str, object] = {
        "name": "t",
        "dim": DIM,
        "initializer": InitializerSpec(kind="uniform", scale=0.5),
        "optimizer": OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
        "is_bfloat16": True,
    }
    return TableSpec(**(fields | changes))  # type: ignore[arg-type]


def table_of(weights: Values, **changes: object) -> SparseTable:
    table = SparseTable(spec_of(**changes))
    write(table, weights)
    return table


def write(table: SparseTable, weights: Values, *, draw: int = 0) -> None:
    size = len(weights)
    state, none = np.zeros((size, table.state_width), np.float32), np.empty((size, 0), np.float32)
    table.write(Rows(keys=KEYS[:size], weights=weights, state=state, statistics=none), draw=draw)


def pull(table: SparseTable, keys: Keys = KEYS) -> Values:
    return table.pull(keys, Missing.INITIAL)


def neighbours(exact: Values) -> tuple[Values, Values]:
    """Returns the bfloat16 values nearest to zero from, and next after, float32 values."""
    near = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    far = (near.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    return near, np.where(near == exact, near, far)


HALFWAY = np.full((KEYS.size, DIM), 1 + 2.0**-8, np.float32)  # between two numbers of bfloat16


def grads(seed: int) -> Values:
    return np.random.default_rng(seed).normal(size=(KEYS.size, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_update_is_that_of_float32_rounded_to_a_neighbour(name: str) -> None:
    optimizer = plain_optimizer(name)
    table = SparseTable(spec_of(optimizer=optimizer))
    exact = SparseTable(spec_of(optimizer=optimizer, is_bfloat16=False))
    for step in range(3):
        before, state = table.pull_states(KEYS)
        none = np.empty((KEYS.size, 0), np.float32)
        exact.write(Rows(keys=KEYS, weights=before, state=state, statistics=none))
        for each in (table, exact):
            each.push(SparseGrad(KEYS, grads(step), 8), draw=step)

        (weights, state), (expected, state_of_exact) = (t.pull_states(KEYS) for t in (table, exact))
        near, far = neighbours(expected)
        assert ((weights == near) | (weights == far)).all()
        np.testing.assert_array_equal(state, state_of_exact)
        is_between = near != far
        if is_between.sum() > KEYS.size:
            share = (weights == far)[is_between].mean()
            assert 0.4 < share < 0.6  # of fractions that are spread evenly


def test_updates_smaller_than_a_bit_are_kept_in_the_mean() -> None:
    table = table_of(np.ones((KEYS.size, DIM), np.float32))
    smallest = 2.0**-8  # from 1 downwards
    steps, part = 64, 0.05
    for step in range(steps):
        push = np.full((KEYS.size, DIM), part * smallest, np.float32)
        table.push(SparseGrad(KEYS, push, 1), draw=step)

    lost = 1.0 - pull(table)
    expected = steps * part * smallest
    # A weight loses a bit or none in each step: of the mean of 10,000 weights this is five deviations.
    deviation = smallest * np.sqrt(steps * part * (1 - part) / lost.size)
    assert abs(lost.mean(dtype=np.float64) - expected) < 5 * deviation
    columns = lost.mean(axis=0, dtype=np.float64)
    assert (abs(columns - expected) < 5 * deviation * np.sqrt(DIM)).all()


@pytest.mark.parametrize("cut", [0, 1, 2**15 + 1, 2**16 - 1])
def test_the_share_that_is_rounded_up_is_the_part_that_is_cut(cut: int) -> None:
    table = SparseTable(spec_of())
    bits = np.full(HALFWAY.shape, 0x3F800000 + cut, np.uint32)
    ups = 0
    for draw in range(100):
        write(table, bits.view(np.float32), draw=draw)
        ups += np.count_nonzero(pull(table) > 1)

    size, share = 100 * bits.size, cut / 2**16
    assert abs(ups - size * share) <= 5 * np.sqrt(size * share * (1 - share))


def test_columns_keys_and_draws_are_rounded_apart() -> None:
    table = SparseTable(spec_of())
    keys = np.sort(np.concatenate([KEYS[:500] + np.uint64(i) for i in range(4)]))
    none = np.empty((keys.size, 0), np.float32)
    ups = []
    for draw in (0, 1):
        table.write(Rows(keys=keys, weights=HALFWAY, state=none, statistics=none), draw=draw)
        ups.append(pull(table, keys) > HALFWAY)

    columns = itertools.combinations([*ups[0].T, *ups[1].T], 2)
    for one, other in (*columns, (ups[0][1:], ups[1][:-1])):
        assert abs((one == other).mean() - 0.5) < 5 * 0.5 / np.sqrt(keys.size)


def test_a_pushed_state_is_rounded_by_its_push() -> None:
    store = ParameterStore()
    store.create_table(spec_of())
    nothing = np.empty((KEYS.size, 0), np.float32)
    rows = RowStates(keys=KEYS, weights=HALFWAY, state=nothing, optimizer="sgd")
    found = []
    for _ in range(2):
        store.push_state(ModelState({"t": rows}), push_id()).result()
        found.append(store.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result().rows["t"])

    assert (found[0] != found[1]).mean() > 0.4


def test_rows_admitted_by_score_are_rounded_by_their_push() -> None:
    admission = AdmissionSpec(policy="score", threshold=0.5, table="plain")
    zeros = {"initializer": InitializerSpec(), "statistics": StatisticsSpec(nonclk_coeff=1.0)}
    store = ParameterStore()
    store.create_table(spec_of(name="plain", **zeros))
    store.create_table(spec_of(name="admitted", admission=admission, **zeros))
    counts = np.ones((KEYS.size, 2), np.uint32)
    for seed in range(3):
        grad = SparseGrad(KEYS, grads(seed), 8, counts)
        store.push_grad(Gradients({"plain": grad, "admitted": grad}), push_id()).result()

    keys = {"plain": KEYS, "admitted": KEYS}
    rows = store.pull_sparse(keys, missing=Missing.ZEROS).result().rows
    assert rows["plain"].any()
    np.testing.assert_array_equal(rows["plain"], rows["admitted"])


def test_a_row_reads_the_same_before_and_after_it_exists() -> None:
    table = SparseTable(spec_of())
    initial, initial_states = pull(table), table.pull_states(KEYS)[0]

    table.push(SparseGrad(KEYS, np.zeros((KEYS.size, DIM), np.float32), 1), draw=7)

    assert not (initial.view(np.uint32) & np.uint32(0xFFFF)).any()
    assert np.unique(initial).size > 500
    np.testing.assert_array_equal(pull(table), initial)
    np.testing.assert_array_equal(initial_states, initial)


def test_rounding_depends_on_key_and_draw_alone() -> None:
    def trained(num_servers: int, first_draw: int) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        shard_map = ShardMap.of(num_servers)
        for server, own in enumerate(shard_map.route(KEYS, spec_of().num_shards)):
            table = SparseTable(spec_of(), server_index=server, shard_map=shard_map)
            for step in range(first_draw, first_draw + 5):
                order = np.random.default_rng(step).permutation(own)
                table.push(SparseGrad(KEYS[order], grads(step)[order], 8), draw=step)
            weights = pull(table, KEYS[own]).tolist()
            found |= dict(zip(KEYS[own].tolist(), weights, strict=True))
        return found

    alone = trained(1, 0)

    assert trained(2, 0) == alone
    assert trained(3, 0) == alone
    assert trained(1, 1) != alone


def test_numbers_at_the_ends_of_float32() -> None:
    ends = np.array(
        [np.inf, -np.inf, np.finfo(np.float32).max, -np.finfo(np.float32).max, -0.0], np.float32
    )
    tiny = np.array([0x7F800001, 1, 0x80000001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    table = table_of(np.stack([ends, tiny]))

    (infinite, negative, largest, lowest, zero), (low_nan, *small, nan, high_nan) = pull(
        table, KEYS[:2]
    )

    assert (infinite, negative) == (np.inf, -np.inf)
    assert 3.3e38 < largest < np.inf
    assert -np.inf < lowest < -3.3e38
    assert (zero, np.signbit(zero)) == (0, True)
    assert np.isnan([low_nan, nan, high_nan]).all()
    assert (np.abs(small) < 1e-40).all()


def test_what_is_written_again_stays_and_other_draws_round_otherwise() -> None:
    values = np.random.default_rng(5).normal(size=(KEYS.size, DIM)).astype(np.float32)
    table = table_of(values)
    first = pull(table)

    write(table, first, draw=9)
    assert (pull(table) == first).all()
    write(table, values, draw=9)
    assert (pull(table) != first).any()


def test_snapshot_export_and_changes_have_the_weights() -> None:
    table = SparseTable(spec_of(optimizer=plain_optimizer("adagrad_row")), num_subscribers=2)
    table.push(SparseGrad(KEYS, grads(1), 8))
    snapshot = table.begin_snapshot()
    expected, state = table.pull_states(KEYS)
    of_key = dict(
        zip(KEYS.tolist(), zip(expected.tolist(), state.tolist(), strict=True), strict=True)
    )
    later = SparseTable(table.spec)
    copies = [table.export_shard(shard) for shard in table.shards]
    table.push(SparseGrad(KEYS[::2], grads(2)[::2], 8), draw=1)  # its rows are copied before

    snapshots = [snapshot.export_shard(shard) for shard in table.shards]
    table.end_snapshot(saved=True)
    for rows in (*copies, *snapshots):
        for key, weights, states in zip(rows.keys, rows.weights, rows.state, strict=True):
            assert (weights.tolist(), states.tolist()) == of_key[int(key)]
    assert sum(rows.keys.size for rows in snapshots) == KEYS.size
    for rows in snapshots:
        later.write(rows)
    np.testing.assert_array_equal(pull(later), expected)

    changed, weights = table.take_changed(1, KEYS.size)
    assert changed.size == KEYS.size
    np.testing.assert_array_equal(weights, pull(table, changed))


def test_a_replica_has_the_rows_that_the_servers_have_rounded() -> None:
    adding = plain_optimizer("sum")
    table = SparseTable(spec_of(optimizer=adding, records_changes=True), num_subscribers=1)
    replica = ReplicaTable(spec_of(records_changes=True))
    for exchange in range(4):
        replica.push(SparseGrad(KEYS, grads(exchange), 8))
        keys, deltas = replica.take_deltas(1.0)
        table.push(SparseGrad(keys, deltas, 1), source=0, draw=exchange)
        replica.merge(*table.take_changed(0, KEYS.size))

        np.testing.assert_array_equal(pull(replica), pull(table))

    replica.push(SparseGrad(KEYS, np.full(HALFWAY.shape, 2.0**-20, np.float32), 1))
    assert (pull(replica) != pull(table)).all()  # a replica is of float32


@pytest.mark.parametrize("is_bfloat16", [True, False])
def test_statistics_are_beside_the_weights(is_bfloat16: bool) -> None:
    spec = spec_of(optimizer=plain_optimizer("adagrad_row"), statistics=StatisticsSpec())
    table, later = SparseTable(spec), SparseTable(replace(spec, is_bfloat16=is_bfloat16))
    counts = np.stack([np.arange(1, KEYS.size + 1)] * 2, axis=1).astype(np.uint32)
    table.push(SparseGrad(KEYS, grads(1), 8, counts))
    snapshot = table.begin_snapshot()
    for shard in table.shards:
        later.write(snapshot.export_shard(shard))
    table.end_snapshot(saved=True)

    np.testing.assert_array_equal(later.scores(KEYS), counts[:, 0])
    np.testing.assert_array_equal(pull(later), pull(table))


def test_a_loaded_table_that_becomes_bfloat16_records_changes(tmp_path: Path) -> None:
    exact, half = ParameterStore(), ParameterStore()
    exact.create_table(spec_of(is_bfloat16=False))
    exact.push_grad(Gradients({"t": SparseGrad(KEYS, grads(1), 8)}), push_id()).result()
    exact.save(SaveRequest(url=str(tmp_path / "0")))
    half.load(str(tmp_path / "0"))
    half.create_table(spec_of(records_changes=True))

    keys, _ = half.engine.parameters.recording_table("t").take_changed(0, KEYS.size)
    assert keys.size == KEYS.size


def test_shrink_by_norm_reads_the_weights() -> None:
    weights = np.zeros((KEYS.size, DIM), np.float32)
    weights[np.arange(100), np.arange(100) % DIM] = 2.0
    table = table_of(weights)

    assert table.shrink(max_norm=1.9).rows == KEYS.size - 100
    assert (pull(table, KEYS[:100]) == weights[:100]).all()


def test_a_limit_of_bytes_has_room_for_more_rows() -> None:
    rows = []
    for is_bfloat16 in (False, True):
        table = SparseTable(
            spec_of(
                dim=32,
                is_bfloat16=is_bfloat16,
                optimizer=plain_optimizer("adagrad_row"),
                statistics=StatisticsSpec(),
                expiry=ExpirySpec(max_bytes=2**20),
            )
        )
        keys = np.arange(20_000, dtype=np.uint64)
        counts = np.ones((keys.size, 2), np.uint32)
        table.push(SparseGrad(keys, np.ones((keys.size, 32), np.float32), 1, counts))
        assert table.status.size_bytes <= 2**20
        rows.append(table.status.rows)

    assert rows[1] > 1.4 * rows[0]


@pytest.mark.parametrize(("dim", "ratio"), [(16, 1.5), (32, 1.7), (64, 1.8)])
def test_rows_a_gib_with_rowwise_adagrad(dim: int, ratio: float) -> None:
    sizes = []
    for is_bfloat16 in (False, True):
        spec = spec_of(dim=dim, is_bfloat16=is_bfloat16, optimizer=plain_optimizer("adagrad_row"))
        table = SparseTable(spec)
        keys = np.arange(375_000, dtype=np.uint64)  # the index is nearly full
        table.push(SparseGrad(keys, np.zeros((keys.size, dim), np.float32), 1))
        sizes.append(table.status.size_bytes)

    assert sizes[0] / sizes[1] > ratio
