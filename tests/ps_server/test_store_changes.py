"""Which rows count as changed when tables are loaded before they are declared, and when jobs follow jobs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import push_id

KEYS = np.arange(50, dtype=np.uint64)
PLAIN = TableSpec(
    name="t", dim=2, initializer=InitializerSpec(), optimizer=OptimizerSpec(name="sum")
)
RECORDING = replace(PLAIN, records_changes=True)


def trained(spec: TableSpec, num_workers: int = 2) -> ParameterStore:
    store = ParameterStore(num_workers=num_workers)
    store.create_table(spec)
    values = np.arange(2 * KEYS.size, dtype=np.float32).reshape(-1, 2)
    store.push_grad(Gradients({"t": SparseGrad(KEYS, values, 1)}), push_id())
    return store


def saved(spec: TableSpec, folder: Path) -> str:
    trained(spec).save(SaveRequest(url=str(folder / "model")))
    return str(folder / "model")


def num_changed(store: ParameterStore, worker: int) -> int:
    keys, _ = store.pull_changed(["t"], worker, max_rows=1000).result().rows["t"]
    return keys.size


@pytest.mark.parametrize("spec", [PLAIN, RECORDING], ids=["plain", "recording"])
def test_rows_loaded_before_their_table_is_declared_have_changed(
    spec: TableSpec, tmp_path: Path
) -> None:
    store = ParameterStore(num_workers=2)
    store.load(saved(spec, tmp_path))

    store.create_table(RECORDING)

    assert store.digest() == trained(PLAIN).digest()
    assert [num_changed(store, worker) for worker in range(2)] == [50, 50]
    store.create_table(RECORDING)  # as the second worker does
    assert [num_changed(store, worker) for worker in range(2)] == [0, 0]


def test_who_loads_only_to_read_records_nothing(tmp_path: Path) -> None:
    store, plain = ParameterStore(), trained(PLAIN)
    store.load(saved(RECORDING, tmp_path))

    assert store.status().tables["t"] == plain.status().tables["t"]
    with pytest.raises(ProtocolError, match="'t' does not record changes"):
        num_changed(store, 0)
    store.create_table(PLAIN)
    assert store.digest() == plain.digest()


def test_next_job_gets_all_rows() -> None:
    store = trained(RECORDING)
    before = store.digest()
    assert num_changed(store, 1) == 50

    store.engine.begin_job()

    assert [num_changed(store, worker) for worker in range(2)] == [50, 50]
    assert store.digest() == before


def test_record_takes_memory_of_its_own() -> None:
    plain, recording = (trained(spec).status().tables["t"] for spec in (PLAIN, RECORDING))

    assert recording.rows == plain.rows
    assert recording.size_bytes == plain.size_bytes + plain.rows


def test_push_during_a_pull_of_changes_is_not_in_its_version(monkeypatch) -> None:
    """The rows may have more than the version says, never less."""
    store = trained(RECORDING)
    table = store.engine.parameters.table("t")
    take = table.take_changed

    def push_and_take(worker: int, max_rows: int):
        store.push_grad(Gradients(), push_id())
        return take(worker, max_rows)

    monkeypatch.setattr(table, "take_changed", push_and_take)

    assert store.pull_changed(["t"], 0, max_rows=100).result().version == 1
    assert store.status().version == 2
