"""Statistics on their way through checkpoints, and through jobs that want them and jobs that do not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import ExpirySpec, InitializerSpec, OptimizerSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from tests.support.statistics import Counted, counted_on
from tests.support.stores import push_id

KEYS = np.arange(50, dtype=np.uint64)
PLAIN = TableSpec(
    name="t", dim=2, initializer=InitializerSpec(), optimizer=OptimizerSpec(name="adagrad")
)
COUNTING = replace(PLAIN, statistics=StatisticsSpec())
LATE = 2**31 + 7
"""In 2038: the bits of these seconds are no ordinary float32."""


def trained(spec: TableSpec, clock: float = LATE) -> ParameterStore:
    store = ParameterStore(clock=lambda: clock)
    store.create_table(spec)
    counts = np.stack([KEYS + np.uint64(1), KEYS // np.uint64(2)], axis=1).astype(np.uint32)
    values = np.arange(2 * KEYS.size, dtype=np.float32).reshape(-1, 2)
    grad = SparseGrad(KEYS, values, 1, counts if spec.statistics else None)
    store.push_grad(Gradients({"t": grad}), push_id())
    return store


def saved(spec: TableSpec, folder: Path) -> str:
    trained(spec).save(SaveRequest(url=str(folder / "model")))
    return str(folder / "model")


def counted(store: ParameterStore) -> dict[int, Counted]:
    return counted_on([store], "t")


@pytest.mark.parametrize("declared", ["before", "after"])
def test_statistics_come_back_from_a_checkpoint(
    declared: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ParameterStore()
    if declared == "before":
        store.create_table(COUNTING)

    store.load(saved(COUNTING, tmp_path))
    store.create_table(COUNTING)

    assert not caplog.messages
    expected = trained(COUNTING)
    assert counted(store) == counted(expected)
    assert counted(store)[49] == Counted(50, 24, 0, LATE)
    assert store.digest() == expected.digest()


@pytest.mark.parametrize("declared", ["before", "after"])
def test_job_that_counts_goes_on_from_one_that_did_not(
    declared: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ParameterStore(clock=lambda: 99.0)
    spec = replace(COUNTING, expiry=ExpirySpec(ttl_s=5.0))
    if declared == "before":
        store.create_table(spec)

    store.load(saved(PLAIN, tmp_path))
    store.create_table(spec)

    (warning,) = caplog.messages
    assert warning.startswith(
        "statistics start at zero, as the checkpoint has none: leave out delete_threshold"
    )
    assert warning.endswith("all rows not shown since (table=t rows=50)")
    assert counted(store) == dict.fromkeys(KEYS.tolist(), Counted(0, 0, 0, 99))
    assert store.digest() == trained(PLAIN).digest()
    assert store.shrink()["t"].rows == 0


@pytest.mark.parametrize("declared", ["before", "after"])
def test_job_that_does_not_count_goes_on_from_one_that_did(
    declared: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, plain = ParameterStore(), trained(PLAIN)
    if declared == "before":
        store.create_table(PLAIN)

    store.load(saved(COUNTING, tmp_path))
    store.create_table(PLAIN)

    assert caplog.messages == [
        "statistics of the checkpoint are dropped, as this job keeps none; to keep them, set "
        "[life] statistics = true "
        "(table=t rows=50)"
    ]
    assert store.digest() == plain.digest()
    assert store.status().tables == plain.status().tables
    store.push_grad(Gradients({"t": SparseGrad(KEYS, np.ones((50, 2), np.float32), 1)}), push_id())


def test_rules_are_of_the_job_that_loads(tmp_path: Path) -> None:
    """Who loads to look has none: nothing is evicted from it, and nothing expires."""
    path = saved(replace(COUNTING, expiry=ExpirySpec(max_unseen=1)), tmp_path)
    reader, store = ParameterStore(), ParameterStore()
    store.create_table(replace(COUNTING, expiry=ExpirySpec(max_rows=64, ttl_s=1.0)))

    reader.load(path)
    store.load(path)

    assert [reader.shrink()["t"].rows for _ in range(3)] == [0, 0, 0]
    assert store.status().tables["t"].rows < 50


def test_digest_does_not_cover_statistics() -> None:
    assert trained(COUNTING).digest() == trained(PLAIN).digest() == trained(COUNTING, 7.0).digest()
