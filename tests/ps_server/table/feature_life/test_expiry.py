"""Which rows go at a shrink, on any number of servers."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import ExpirySpec, InitializerSpec, OptimizerSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.reference.feature_life import ReferenceLives
from tests.reference.table import ReferenceTable
from tests.support.local_transport import LocalTransport, joined_client
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


LifeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
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
