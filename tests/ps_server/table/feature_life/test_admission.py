"""Which keys get a row, what the others cost, and which specs of admission make sense."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import (
    AdmissionSpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.feature_life.admission import MAX_OCCURRENCES, admission_rule, needed
from ctr_ps.ps_server.table.memory.hash_index import BLOCK
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.reference.admission import ReferenceAdmission, occurrences_needed
from tests.reference.table import ReferenceTable
from tests.support.optimizers import plain_optimizer
from tests.support.statistics import Counted, candidates_of, counted_by
from tests.support.threads import run_together

# Powers of two: no rounding, so that the oracle in float64 decides alike.
WORTH = StatisticsSpec(nonclk_coeff=0.25, click_coeff=1.0)
SPEC = TableSpec(
    name="t",
    dim=2,
    initializer=InitializerSpec(kind="uniform", scale=0.5),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    num_shards=4,
    statistics=WORTH,
    admission=AdmissionSpec(threshold=3),
)
KEYS = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
POLICIES = {
    "count": AdmissionSpec(threshold=5),
    "probability": AdmissionSpec(policy="probability", threshold=0.2),
    "score": AdmissionSpec(policy="score", threshold=2.0),
}
BLOOM = AdmissionSpec(threshold=3, counter="bloom", expected_keys=10_000)


def spec_of(**changes: object) -> TableSpec:
    assert SPEC.admission is not None
    return replace(SPEC, admission=replace(SPEC.admission, **changes))  # type: ignore[arg-type]


def gradient(keys: np.ndarray, shows: object = 1, clicks: object = 0, dim: int = 2) -> SparseGrad:
    counts = np.empty((keys.size, 2), np.uint32)
    counts[:, 0], counts[:, 1] = shows, clicks
    return SparseGrad(keys, np.ones((keys.size, dim), np.float32), 1, counts)


def push(table: SparseTable, grad: SparseGrad, scores: np.ndarray | None = None) -> None:
    table.check(grad)
    table.push(grad, scores=scores)


# By count


def test_row_takes_over_what_its_candidate_counted() -> None:
    seconds = iter([100.0, 200.0, 300.0])
    table = SparseTable(SPEC, clock=lambda: next(seconds))
    key = KEYS[:1]

    push(table, gradient(key, shows=1, clicks=1))
    assert candidates_of(table) == {0: Counted(show=1, click=1, unseen=0, last_seen=100)}
    push(table, gradient(key, shows=1))
    assert candidates_of(table) == {0: Counted(show=2, click=1, unseen=0, last_seen=200)}
    push(table, gradient(key, shows=4, clicks=2))

    assert candidates_of(table) == {}
    assert counted_by(table) == {0: Counted(show=6, click=3, unseen=0, last_seen=300)}


@pytest.mark.parametrize("missing", Missing)
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_key_without_a_row_reads_the_default_value(missing: Missing, value: float) -> None:
    table = SparseTable(spec_of(default_value=value))
    push(table, gradient(KEYS[:2], shows=[3, 1]))

    pulled = table.pull(KEYS, missing)

    assert np.all(pulled[0] < -0.4)
    np.testing.assert_array_equal(pulled[1:], np.full((3, 2), value, np.float32))


def test_status_tells_what_candidates_cost() -> None:
    table = SparseTable(SPEC)
    empty = table.status
    keys = np.arange(1000, dtype=np.uint64)

    push(table, gradient(keys))

    assert (table.status.rows, table.status.size_bytes) == (0, empty.size_bytes)
    assert table.status.candidates == 1000
    assert 24_000 <= table.status.candidate_bytes - empty.candidate_bytes <= 60_000


@pytest.mark.parametrize("region_bytes", [400, 2**30])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_table_admits_and_learns_as_a_dictionary_does(
    policy: str, optimizer: str, region_bytes: int
) -> None:
    spec = replace(
        SPEC, admission=POLICIES[policy], optimizer=plain_optimizer(optimizer), num_shards=2
    )
    table = SparseTable(spec, region_bytes=region_bytes)
    admission, rows = ReferenceAdmission(spec), ReferenceTable(spec)
    rng = np.random.default_rng(5)
    universe = rng.integers(0, 2**64, 600, np.uint64)

    for _ in range(40):
        keys = rng.choice(universe, 3 * BLOCK + 5, replace=False)
        shows = rng.integers(1, 4, keys.size)
        grad = gradient(keys, shows, shows // 2)
        push(table, grad)
        applied = [
            admission.push(key, show, show // 2)
            for key, show in zip(keys.tolist(), shows.tolist(), strict=True)
        ]
        rows.push(keys[applied].tolist(), grad.values[applied].astype(np.float64), 1)

    assert len(admission.candidates) > 10
    assert len(admission.rows) > 100
    for expected, found in (
        (admission.candidates, candidates_of(table)),
        (admission.rows, counted_by(table)),
    ):
        assert {key: (each.show, each.click) for key, each in found.items()} == expected
    np.testing.assert_allclose(
        table.pull(universe[:100], Missing.ZEROS),
        rows.pull(universe[:100].tolist(), reads_initial=False),
        atol=1e-4,
    )


@pytest.mark.parametrize("region_bytes", [400, 2**30])
def test_threads_count_each_occurrence_once(region_bytes: int) -> None:
    """What candidates and rows have counted adds up, also where pushes waited for room to grow."""
    spec = replace(SPEC, admission=AdmissionSpec(threshold=60))
    table = SparseTable(spec, region_bytes=region_bytes)
    universe = np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64)

    def task(seed: int) -> Callable[[], None]:
        return partial(push_often, table, universe, seed)

    run_together([task(seed) for seed in range(3)])

    expected: dict[int, int] = {}
    for seed in range(3):
        for keys, shows in pushes_of(universe, seed):
            for key, show in zip(keys.tolist(), shows.tolist(), strict=True):
                expected[key] = expected.get(key, 0) + show
    rows, candidates = counted_by(table), candidates_of(table)
    assert not rows.keys() & candidates.keys()
    assert {key: each.show for key, each in (rows | candidates).items()} == expected
    assert rows.keys() == {key for key, count in expected.items() if count >= 60}


def pushes_of(universe: np.ndarray, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(universe, 2000, replace=False) for _ in range(30)]
    return [(keys, rng.integers(1, 4, keys.size)) for keys in chosen]


def push_often(table: SparseTable, universe: np.ndarray, seed: int) -> None:
    for keys, shows in pushes_of(universe, seed):
        push(table, gradient(keys, shows))


# By probability


def test_occurrences_needed_are_the_same_in_every_language() -> None:
    spec = spec_of(policy="probability", threshold=0.05)
    keys = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64).tolist()

    found = [needed(admission_rule(spec), np.uint64(key)) for key in [0, 2**64 - 1, *keys]]

    assert found == [occurrences_needed(spec, 0.05, key) for key in [0, 2**64 - 1, *keys]]


@pytest.mark.parametrize("probability", [0.5, 0.1, 0.02])
def test_occurrences_needed_are_geometric(probability: float) -> None:
    rule = admission_rule(spec_of(policy="probability", threshold=probability))
    keys = np.arange(40_000, dtype=np.uint64)

    found = np.array([needed(rule, key) for key in keys])

    # Of 40,000 draws the standard deviation of the mean is half a percent of it.
    assert found.min() == 1
    assert found.mean() == pytest.approx(1 / probability, rel=0.03)
    assert np.mean(found == 1) == pytest.approx(probability, rel=0.2)
    middle = round(1 / probability)
    assert np.mean(found > middle) == pytest.approx((1 - probability) ** middle, rel=0.05)


def test_no_key_needs_more_than_a_counter_holds() -> None:
    exact = admission_rule(spec_of(policy="probability", threshold=1e-6))
    bloom = admission_rule(
        replace(SPEC, admission=replace(BLOOM, policy="probability", threshold=1e-6))
    )

    most = {
        rule: max(needed(rule, np.uint64(key)) for key in range(2000)) for rule in (exact, bloom)
    }

    assert most == {exact: pytest.approx(7e6, rel=0.5), bloom: 65535}
    assert most[exact] < MAX_OCCURRENCES


def test_tables_and_seeds_draw_afresh() -> None:
    spec = spec_of(policy="probability", threshold=0.05)
    others = [replace(spec, name="u"), replace(spec, seed=1)]
    drawn = [
        [needed(admission_rule(each), np.uint64(key)) for key in range(100)]
        for each in [spec, *others]
    ]

    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


# By estimate


def test_filter_admits_all_that_the_exact_counter_does_and_few_more() -> None:
    exact, estimated = SparseTable(SPEC), SparseTable(replace(SPEC, admission=BLOOM))
    rng = np.random.default_rng(0)
    universe = rng.integers(0, 2**64, 10_000, np.uint64)
    for _ in range(6):
        grad = gradient(rng.choice(universe, 2500, replace=False))
        for table in (exact, estimated):
            push(table, grad)

    sure, all_ = counted_by(exact), counted_by(estimated)

    assert sure.keys() <= all_.keys()
    assert len(sure) > 1000
    assert len(all_) < 1.02 * len(sure)
    assert all(all_[key].show >= counted.show for key, counted in sure.items())
    assert estimated.status.candidates == 0
    assert estimated.status.candidate_bytes < exact.status.candidate_bytes


def test_filter_starts_rows_with_its_estimate() -> None:
    table = SparseTable(replace(SPEC, admission=BLOOM))

    push(table, gradient(KEYS, shows=2, clicks=1))
    push(table, gradient(KEYS, shows=4, clicks=1))

    assert {(each.show, each.click) for each in counted_by(table).values()} == {(6, 1)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_filter_and_growth_agree(name: str) -> None:
    """Rows that come while a push waits for room are made once."""
    spec = replace(
        SPEC, num_shards=1, admission=replace(BLOOM, threshold=2), optimizer=plain_optimizer(name)
    )
    table = SparseTable(spec)
    keys = np.arange(500, dtype=np.uint64)

    for _ in range(3):
        push(table, gradient(keys))

    assert {each.show for each in counted_by(table).values()} == {3}
    assert table.status.rows == 500


# By another table's score


def test_scores_decide_without_candidates() -> None:
    table = SparseTable(spec_of(policy="score", threshold=2.0, table="wide"))

    push(table, gradient(KEYS), scores=np.array([0, 1.99, 2.0, 7.0], np.float32))

    assert counted_by(table) == {
        key: each for key, each in counted_by(table).items() if key in (2**63, 2**64 - 1)
    }
    assert table.status.rows == 2
    assert (table.status.candidates, table.status.candidate_bytes) == (0, 0)


def test_row_stays_when_its_key_scores_less() -> None:
    table = SparseTable(spec_of(policy="score", threshold=2.0, table="wide"))
    push(table, gradient(KEYS), scores=np.full(4, 2.0, np.float32))

    push(table, gradient(KEYS), scores=np.zeros(4, np.float32))

    assert {each.show for each in counted_by(table).values()} == {2}


def test_score_of_a_key_is_that_of_its_row() -> None:
    table = SparseTable(SPEC)
    push(table, gradient(KEYS[:3], shows=[4, 7, 1], clicks=[2, 0, 1]))

    assert table.scores(KEYS).tolist() == [2 * 0.25 + 2, 7 * 0.25, 0, 0]


# Specs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "rank"}, "with policy 'rank', expected one of count, probability, score"),
        ({"counter": "sketch"}, "counter 'sketch', expected one of exact, bloom"),
        ({"threshold": 0.5}, "by count with threshold 0.5, expected occurrences from 1 to"),
        ({"threshold": float("nan")}, "with threshold nan, expected occurrences"),
        ({"threshold": 2.0**25}, "threshold 33554432.0, expected occurrences from 1 to 1.6777"),
        ({"policy": "probability", "threshold": 0.0}, "threshold 0.0, expected a probability"),
        ({"policy": "probability", "threshold": 1.5}, "threshold 1.5, expected a probability"),
        ({"policy": "score", "threshold": -1.0}, "threshold -1.0, expected a score from 0"),
        ({"default_value": float("inf")}, "default_value inf, expected a finite float32"),
        ({"default_value": 1e39}, "default_value 1e+39, expected a finite float32"),
        ({"table": "wide"}, "by count of table 'wide': only policy 'score' may use another table"),
        ({"policy": "score", "table": "t"}, "leave out the setting 'table'"),
        ({"expected_keys": 5}, "expected_keys 5, which counter 'exact' does not use"),
        ({"counter": "bloom"}, "expected_keys 0: set expected_keys to the number of keys"),
        ({"counter": "bloom", "expected_keys": 2**40}, "1099511627776, too many for 4 shards"),
        (
            {"counter": "bloom", "expected_keys": 9, "threshold": 65536},
            "threshold 65536, expected occurrences from 1 to 65535",
        ),
        (
            {"counter": "bloom", "expected_keys": 9, "false_positive_rate": 1.0},
            "false_positive_rate 1.0, expected above 0 and below 1",
        ),
        (
            {"counter": "bloom", "expected_keys": 9, "policy": "score"},
            "by score with counter 'bloom', which counts no clicks",
        ),
        (
            {"counter": "bloom", "expected_keys": 9, "policy": "score", "table": "wide"},
            "counter 'bloom': leave out the counter, as the counts of that table are used",
        ),
    ],
)
def test_impossible_admission_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        SparseTable(spec_of(**changes))


def test_admission_without_statistics_is_refused() -> None:
    with pytest.raises(SpecError, match="has admission but keeps no statistics"):
        SparseTable(replace(SPEC, statistics=None))


# Another spec for the same rows


def test_candidates_stay_where_the_new_spec_counts_alike() -> None:
    table = SparseTable(SPEC)
    push(table, gradient(KEYS))

    table.declare(spec_of(threshold=2))
    assert candidates_of(table).keys() == set(KEYS.tolist())
    push(table, gradient(KEYS))
    assert table.status.rows == KEYS.size


@pytest.mark.parametrize("admission", [None, BLOOM, AdmissionSpec(policy="score", table="wide")])
def test_candidates_go_where_the_new_spec_counts_otherwise(admission: AdmissionSpec | None) -> None:
    table = SparseTable(SPEC)
    push(table, gradient(KEYS))

    table.declare(replace(SPEC, admission=admission))

    assert table.status.candidates == 0
