"""What rows count, and which specs of it make sense."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import GradientError, SpecError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import (
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.optimizers import plain_optimizer
from tests.support.statistics import Counted, counted_by

SPEC = TableSpec(
    name="t",
    dim=3,
    initializer=InitializerSpec(kind="uniform", scale=0.5),
    optimizer=OptimizerSpec(name="adagrad"),
    num_shards=4,
    statistics=StatisticsSpec(),
)
KEYS = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)


def gradient(keys: np.ndarray, counts: object, dim: int = 3, examples: int = 8) -> SparseGrad:
    values = np.arange(keys.size * dim, dtype=np.float32).reshape(-1, dim)
    return SparseGrad(keys, values, examples, np.array(counts, np.uint32).reshape(-1, 2))


def counts_of(keys: np.ndarray, seed: int) -> np.ndarray:
    shows = np.random.default_rng(seed).integers(1, 9, keys.size)
    return np.stack([shows, shows // 2], axis=1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 2, 5])
def test_counting_leaves_weights_and_state_as_they_are(name: str, dim: int) -> None:
    counting = replace(SPEC, dim=dim, optimizer=plain_optimizer(name))
    table, plain = SparseTable(counting), SparseTable(replace(counting, statistics=None))
    keys = np.arange(1000, dtype=np.uint64)

    for seed in range(3):
        grad = gradient(keys, counts_of(keys, seed), dim)
        table.push(grad)
        plain.push(replace(grad, counts=None))

    for shard in table.shards:
        rows, expected = table.export_shard(shard), plain.export_shard(shard)
        for field in ("keys", "weights", "state"):
            np.testing.assert_array_equal(getattr(rows, field), getattr(expected, field))


def test_last_seen_outlives_the_range_of_signed_seconds_and_of_floats() -> None:
    """After 2038 its bits are those of no number, or of a negative one."""
    for now in (2**31 + 12345, 0x7F800001, 2**32 - 1):
        table = SparseTable(SPEC, clock=lambda now=now: now)
        table.push(gradient(KEYS, counts_of(KEYS, 0)))
        assert {row.last_seen for row in counted_by(table).values()} == {now}


def test_rows_that_come_without_statistics_were_seen_when_they_came() -> None:
    table, plain = SparseTable(SPEC, clock=lambda: 77), SparseTable(replace(SPEC, statistics=None))
    plain.push(replace(gradient(KEYS, counts_of(KEYS, 0)), counts=None))

    for shard in plain.shards:
        table.write(plain.export_shard(shard))

    assert counted_by(table) == dict.fromkeys(KEYS.tolist(), Counted(0, 0, 0, 77))
    expected = plain.pull(KEYS, Missing.ZEROS)
    np.testing.assert_array_equal(table.pull(KEYS, Missing.ZEROS), expected)


GOOD = counts_of(KEYS, 0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (None, "no counts, but the table keeps statistics"),
        (GOOD.astype(np.uint32)[:3], r"counts uint32\[3, 2\], expected uint32\[4, 2\]"),
        (GOOD.astype(np.uint32)[:, :1], r"counts uint32\[4, 1\]"),
        (GOOD.astype(np.int64), r"counts int64\[4, 2\]"),
        (
            np.array([[1, 1], [2, 3], [1, 0], [0, 0]], np.uint32),
            "more clicks than shows of key 1: 3 clicks, 2 shows",
        ),
    ],
    ids=["none", "too-few", "too-narrow", "signed", "more-clicks-than-occurrences"],
)
def test_counts_that_make_no_sense_are_refused(counts: object, message: str) -> None:
    grad = SparseGrad(KEYS, np.ones((4, 3), np.float32), 1, counts)

    with pytest.raises(GradientError, match=f"table 't' .*{message}"):
        SparseTable(SPEC).check(grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"statistics": StatisticsSpec(decay=0.0)}, "decay 0.0"),
        ({"statistics": StatisticsSpec(decay=1.01)}, "decay 1.01"),
        ({"statistics": StatisticsSpec(nonclk_coeff=-0.1)}, "nonclk_coeff -0.1"),
        ({"statistics": StatisticsSpec(click_coeff=float("nan"))}, "click_coeff nan"),
        ({"expiry": ExpirySpec(delete_threshold=-1.0)}, "delete_threshold -1.0"),
        ({"expiry": ExpirySpec(max_unseen=-1)}, "max_unseen -1"),
        ({"expiry": ExpirySpec(ttl_s=float("inf"))}, "ttl_s inf"),
        ({"expiry": ExpirySpec(evict="fifo")}, "evicts by 'fifo', expected one of lru, score"),
        ({"expiry": ExpirySpec(), "statistics": None}, "expiry but keeps no statistics"),
        ({"records_changes": True}, "records changes for replicas"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_specs_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=f"table 't' .*{message}"):
        SparseTable(replace(SPEC, **change))
