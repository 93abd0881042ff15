"""Keys that wait for their row survive a restart, on another number of servers as well."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import AdmissionSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Missing, SaveRequest, Store
from ctr_ps.ps_server.store import ParameterStore
from tests.support.cluster import cluster
from tests.support.stores import DEEP, KEYS, NEWEST, push_id

EXACT = AdmissionSpec(threshold=8, default_value=0.25)
BLOOM = AdmissionSpec(threshold=8, counter="bloom", expected_keys=300, default_value=0.25)
UNSEEN = np.array([1, 2, 3], np.uint64)


def spec_of(admission: AdmissionSpec | None) -> TableSpec:
    return replace(DEEP, name="admitting", statistics=StatisticsSpec(), admission=admission)


def push(store: Store, sequence: int) -> None:
    random = np.random.default_rng(sequence)
    keys = random.choice(KEYS, 60, replace=False)
    shows = random.integers(1, 4, keys.size)
    counts = np.stack([shows, shows // 2], axis=1).astype(np.uint32)
    values = random.normal(size=(keys.size, DEEP.dim)).astype(np.float32)
    grad = SparseGrad(keys, values, 8, counts)
    store.push_grad(
        Gradients({"admitting": grad}), push_id(sequence=sequence, pulled=NEWEST)
    ).result()


def trained(pushes: int, admission: AdmissionSpec | None) -> ParameterStore:
    store = ParameterStore()
    store.create_table(spec_of(admission))
    for sequence in range(pushes):
        push(store, sequence)
    return store


@pytest.mark.parametrize("admission", [EXACT, BLOOM], ids=["exact", "bloom"])
@pytest.mark.parametrize("declared_first", [True, False])
def test_keys_are_counted_on_after_a_restart(
    admission: AdmissionSpec, declared_first: bool, tmp_path: Path
) -> None:
    expected = trained(16, admission)
    with ExitStack() as stack:
        saving = stack.enter_context(cluster(num_servers=2)).client()
        saving.create_table(spec_of(admission))
        for sequence in range(8):
            push(saving, sequence)
        digest = saving.save(SaveRequest(url=str(tmp_path / "model")))
        before = saving.status().tables["admitting"]
    with cluster(num_servers=3) as servers:
        loading = servers.client()
        if declared_first:
            loading.create_table(spec_of(admission))
        loading.load(str(tmp_path / "model"))
        assert loading.digest() == digest
        loading.create_table(spec_of(admission))
        after = loading.status().tables["admitting"]

        for sequence in range(8, 16):
            push(loading, sequence)

        assert (after.rows, after.candidates) == (before.rows, before.candidates)
        assert loading.digest() == expected.digest()
        assert 20 < before.rows < expected.status().tables["admitting"].rows - 20


@pytest.mark.parametrize("admission", [EXACT, BLOOM], ids=["exact", "bloom"])
def test_keys_are_counted_on_in_a_loaded_table_that_becomes_bfloat16(
    admission: AdmissionSpec, tmp_path: Path
) -> None:
    saved = trained(8, admission)
    saved.save(SaveRequest(url=str(tmp_path / "model")))
    store = ParameterStore()
    store.load(str(tmp_path / "model"))
    store.create_table(replace(spec_of(admission), is_bfloat16=True))
    before, after = (each.status().tables["admitting"] for each in (saved, store))
    for sequence in range(8, 16):
        push(store, sequence)

    assert (after.rows, after.candidates) == (before.rows, before.candidates)
    expected = trained(16, admission).status().tables["admitting"]
    assert store.status().tables["admitting"].rows == expected.rows


def test_loaded_table_reads_the_default_value_of_its_admission(tmp_path: Path) -> None:
    """Also where no job declares it, as when a model is tested."""
    trained(1, EXACT).save(SaveRequest(url=str(tmp_path / "model")))
    store = ParameterStore()
    store.load(str(tmp_path / "model"))

    pulled = store.pull_sparse({"admitting": UNSEEN}, missing=Missing.ZEROS).result()

    assert np.all(pulled.rows["admitting"] == 0.25)


def test_admission_that_counts_nothing_loses_no_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_score = AdmissionSpec(policy="score", threshold=1.0, table="scoring")
    saved, store = ParameterStore(), ParameterStore()
    for each in (saved, store):
        each.create_table(replace(spec_of(None), name="scoring"))
        each.create_table(spec_of(by_score))
    saved.save(SaveRequest(url=str(tmp_path / "model")))

    store.load(str(tmp_path / "model"))

    assert not caplog.messages


@pytest.mark.parametrize("declared", ["before", "after"])
@pytest.mark.parametrize("admission", [None, EXACT], ids=["none", "exact"])
def test_job_may_admit_otherwise_than_the_model_was_saved(
    admission: AdmissionSpec | None,
    declared: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = trained(12, BLOOM)
    saved.save(SaveRequest(url=str(tmp_path / "model")))
    store = ParameterStore()
    if declared == "before":
        store.create_table(spec_of(admission))
    with caplog.at_level(logging.WARNING):
        store.load(str(tmp_path / "model"))
        if declared == "after":
            store.create_table(spec_of(admission))

    assert store.digest() == saved.digest()
    assert store.status().tables["admitting"].candidates == 0
    fresh = [text for text in caplog.messages if "counts of keys without a row start at 0" in text]
    assert fresh == (
        [
            "counts of keys without a row start at 0, because admission.counter was 'bloom' and is 'exact', "
            "admission.expected_keys was 300 and is 0: table=admitting"
        ]
        if admission
        else []
    )
