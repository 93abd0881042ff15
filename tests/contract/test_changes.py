"""One suite for every store: rows that changed since a worker last asked, against a dictionary."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError, UnknownTableError
from ctr_ps.protos.gradients import Gradients, SparseGrad, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.protos.store import Missing, SaveRequest, Store
from ctr_ps.ps_server.store import ParameterStore
from tests.support.cluster import cluster
from tests.support.stores import DEEP, KEYS, WIDE, push_id
from tests.support.training import together

ADDING = OptimizerSpec(name="sum")
RECORDING = [
    replace(spec, optimizer=ADDING, records_changes=True) for spec in (DEEP, WIDE)
]  # dims 5 and 1
TABLES = ["deep", "wide"]
MOST = 10_000

OpenStores = Callable[..., list[Store]]


def declare(store: Store) -> None:
    for spec in RECORDING:
        store.create_table(spec)


@pytest.fixture
def open_stores(num_servers: int) -> Iterator[OpenStores]:
    """Returns the stores of a job's workers, with tables that record changes."""
    with ExitStack() as stack:

        def open_stores(num_workers: int = 2, chunk_bytes: int = CHUNK_BYTES) -> list[Store]:
            if num_servers == 0:
                stores: list[Store] = [ParameterStore(num_workers=num_workers)] * num_workers
            else:
                servers = stack.enter_context(
                    cluster(num_servers=num_servers, num_workers=num_workers)
                )
                stores = [servers.client(chunk_bytes=chunk_bytes) for _ in range(num_workers)]
            for store in stores:
                declare(store)
            return stores

        yield open_stores


def gradients(keys: Keys, seed: int) -> Gradients:
    random = np.random.default_rng(seed)

    def rows(dim: int) -> SparseGrad:
        return SparseGrad(keys, random.normal(size=(keys.size, dim)).astype(np.float32), 1)

    return Gradients({"deep": rows(5), "wide": rows(1)})


def as_dict(rows: tuple[Keys, Values]) -> dict[int, list[float]]:
    keys, values = rows
    assert np.unique(keys).size == keys.size
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def held(
    store: Store, keys: Keys, missing: Missing = Missing.ZEROS
) -> dict[str, dict[int, list[float]]]:
    rows = store.pull_sparse(dict.fromkeys(TABLES, keys), missing=missing).result().rows
    return {table: as_dict((keys, values)) for table, values in rows.items()}


def take_all(store: Store, worker: int, max_rows: int = MOST) -> dict[str, dict[int, list[float]]]:
    """Asks until there is no more; what comes later counts."""
    taken: dict[str, dict[int, list[float]]] = {table: {} for table in TABLES}
    has_more = True
    while has_more:
        changed = store.pull_changed(TABLES, worker, max_rows=max_rows).result()
        for table, rows in changed.rows.items():
            taken[table] |= as_dict(rows)
        has_more = changed.has_more
    return taken


def test_each_worker_gets_what_others_changed_since_it_asked(open_stores: OpenStores) -> None:
    first, second = open_stores()
    first.push_grad(gradients(KEYS[:60], 0), push_id(0)).result()
    second.push_grad(gradients(KEYS[40:90], 1), push_id(1)).result()

    assert take_all(first, 0) == held(first, KEYS[40:90])
    second.push_grad(gradients(KEYS[80:120], 2), push_id(1, 1)).result()

    assert take_all(first, 0) == held(first, KEYS[80:120])
    assert take_all(second, 1) == held(first, KEYS[:60])


def test_nothing_changed_is_empty_rows_of_each_table(open_stores: OpenStores) -> None:
    store, _ = open_stores()

    changed = store.pull_changed(TABLES, 0, max_rows=5).result()

    assert {
        table: (keys.dtype, values.shape) for table, (keys, values) in changed.rows.items()
    } == {
        "deep": (np.uint64, (0, 5)),
        "wide": (np.uint64, (0, 1)),
    }
    assert (changed.version, changed.has_more) == (0, False)
    assert store.pull_changed([], 0, max_rows=5).result().rows == {}


@pytest.mark.parametrize("max_rows", [1, 7, 30])
def test_rows_come_in_calls_of_at_most_so_many_a_server(
    open_stores: OpenStores, num_servers: int, max_rows: int
) -> None:
    store, _ = open_stores()
    store.push_grad(gradients(KEYS, 0), push_id()).result()

    changed = store.pull_changed(TABLES, 1, max_rows=max_rows).result()

    assert changed.has_more
    num_rows = sum(keys.size for keys, _ in changed.rows.values())
    assert 0 < num_rows <= max_rows * max(1, num_servers)
    rest = take_all(store, 1, max_rows=max_rows)
    taken = {table: as_dict(changed.rows[table]) | rows for table, rows in rest.items()}
    assert taken == held(store, KEYS)


def test_answers_of_many_messages_bring_all_rows(open_stores: OpenStores) -> None:
    store, _ = open_stores(chunk_bytes=300)
    store.push_grad(gradients(KEYS, 0), push_id()).result()

    assert take_all(store, 1) == held(store, KEYS)


def test_one_table_alone_may_be_asked_for(open_stores: OpenStores) -> None:
    store, _ = open_stores()
    store.push_grad(gradients(KEYS, 0), push_id()).result()

    changed = store.pull_changed(["wide"], 1, max_rows=MOST).result()

    assert {"wide": as_dict(changed.rows["wide"])} == {"wide": held(store, KEYS)["wide"]}
    assert take_all(store, 1) == {"deep": held(store, KEYS)["deep"], "wide": {}}


def test_every_row_has_changed_for_everyone_after_a_load(open_stores: OpenStores, tmp_path) -> None:
    """Saved where nothing was recorded."""
    saved = ParameterStore()
    for spec in RECORDING:
        saved.create_table(replace(spec, records_changes=False))
    saved.push_grad(gradients(KEYS[:70], 0), push_id()).result()
    saved.save(SaveRequest(url=str(tmp_path / "model")))
    first, second = open_stores()
    first.push_grad(gradients(KEYS[70:], 1), push_id()).result()
    take_all(first, 0)

    first.load(str(tmp_path / "model"))

    assert first.digest() == saved.digest()
    assert take_all(first, 0) == take_all(second, 1) == held(saved, KEYS[:70])


def test_model_of_recording_tables_is_loaded_where_nothing_is_recorded(
    open_stores: OpenStores, tmp_path
) -> None:
    store, _ = open_stores()
    store.push_grad(gradients(KEYS, 0), push_id()).result()
    digest = store.save(SaveRequest(url=str(tmp_path / "model")))
    plain = ParameterStore()
    for spec in RECORDING:
        plain.create_table(replace(spec, records_changes=False))

    plain.load(str(tmp_path / "model"))

    assert plain.digest() == store.digest() == digest
    assert plain.status().tables["deep"].rows == KEYS.size
    assert plain.status().tables["deep"].size_bytes < store.status().tables["deep"].size_bytes


def test_wrong_pulls_of_changes_take_nothing(open_stores: OpenStores) -> None:
    store, _ = open_stores()
    store.create_table(replace(DEEP, name="silent"))
    store.push_grad(gradients(KEYS, 0), push_id()).result()

    with pytest.raises(ProtocolError, match="'silent' does not record changes"):
        store.pull_changed([*TABLES, "silent"], 0, max_rows=MOST).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.pull_changed([*TABLES, "nowhere"], 0, max_rows=MOST).result()
    with pytest.raises(
        ProtocolError, match=r"worker 2 (called, but this job has 2|has not joined the)"
    ):
        store.pull_changed(TABLES, 2, max_rows=MOST).result()
    for max_rows in (0, -1):
        with pytest.raises(ProtocolError, match=f"max_rows is {max_rows}, expected at least 1"):
            store.pull_changed(TABLES, 1, max_rows=max_rows).result()

    assert take_all(store, 1) == held(store, KEYS)


def test_workers_that_push_and_ask_at_once_miss_nothing(open_stores: OpenStores) -> None:
    """A worker adds what it pushed to its copy of the rows, and takes over those that others changed."""
    stores = open_stores(num_workers=3)
    replicas = [held(stores[0], KEYS, Missing.INITIAL) for _ in stores]

    def work(worker: int) -> None:
        for step in range(15):
            keys = np.random.default_rng([worker, step]).choice(KEYS, 40, replace=False)
            pushed = gradients(keys, step)
            stores[worker].push_grad(pushed, push_id(worker, step)).result()
            add(replicas[worker], pushed)
            merge(replicas[worker], take_all(stores[worker], worker, max_rows=25))

    together(*(lambda worker=worker: work(worker) for worker in range(3)))

    expected = held(stores[0], KEYS, Missing.INITIAL)
    for worker, replica in enumerate(replicas):
        merge(replica, take_all(stores[worker], worker))
        for table, rows in expected.items():
            np.testing.assert_allclose(
                [replica[table][key] for key in rows], list(rows.values()), rtol=1e-4, atol=1e-5
            )


def add(replica: dict[str, dict], pushed: Gradients) -> None:
    for table, grad in pushed.sparse.items():
        for key, values in zip(grad.keys.tolist(), grad.values, strict=True):
            replica[table][key] = (np.float32(replica[table][key]) + values).tolist()


def merge(replica: dict[str, dict], taken: dict[str, dict]) -> None:
    for table, rows in taken.items():
        replica[table] |= rows
