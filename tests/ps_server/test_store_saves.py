"""Saving while others push: the checkpoint is of one moment."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError, ProtocolError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.spec import (
    DenseSegment,
    DenseSpec,
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
)
from ctr_ps.protos.store import InferenceSettings, SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.stores import NEWEST, in_process, pull, push_id, random_gradients

LIMIT_S = 20.0
SOON_S = 0.2  # for what must not happen: too short a wait hides a fault, but never makes one
TRIALS = 50
PUSH_KEYS = 500
FIRST = TableSpec(
    name="first",
    dim=3,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="adagrad"),
    num_shards=4,
)
SECOND = replace(FIRST, name="second")
COUNT = DenseSpec(
    name="count",
    segments=(DenseSegment(length=2, initializer=InitializerSpec()),),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
)


def twin_store() -> ParameterStore:
    """Returns a store with two tables of the same rows, and a block that counts what was pushed to them."""
    store = ParameterStore(num_workers=2)
    store.create_table(FIRST)
    store.create_table(SECOND)
    store.create_dense(COUNT)
    return store


def twin_push(keys: np.ndarray) -> Gradients:
    """Returns ones for the keys of both tables; the count goes down by the keys."""
    ones = SparseGrad(keys, np.ones((keys.size, FIRST.dim), np.float32), 1)
    count = DenseGrad(np.full(2, keys.size, np.float32), 1)
    return Gradients({"first": ones, "second": ones}, {"count": count})


@contextmanager
def while_pushing(store: ParameterStore) -> Iterator[None]:
    """Two workers push as fast as they can, keys that come again and ever more new ones."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def push_all(worker: int) -> None:
        random = np.random.default_rng(worker)
        keys = random.choice(2000, PUSH_KEYS, replace=False).astype(np.uint64)
        try:
            for sequence in range(10**9):
                if is_over.is_set():
                    return
                gradients = twin_push(keys + np.uint64(sequence % 1000))
                store.push_grad(gradients, push_id(worker, sequence, pulled=NEWEST)).result()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push_all, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)


def numbers_of(checkpoint: Checkpoint, table: str) -> list[np.ndarray]:
    shards = dict(checkpoint.read_shards(table, range(FIRST.num_shards)))
    rows = [shards[shard] for shard in range(FIRST.num_shards)]
    return [
        np.concatenate([getattr(each, column) for each in rows])
        for column in ("keys", "weights", "state")
    ]


def test_checkpoint_holds_each_push_in_all_tables_or_in_none(tmp_path: Path) -> None:
    """In weights, in moments, in the dense block and in what is said of the workers; 50 times of 50."""
    store = twin_store()
    seen = 0.0
    with while_pushing(store):
        for _ in range(TRIALS):
            store.save(SaveRequest(url=str(tmp_path / "c")))

            checkpoint = Checkpoint.open(str(tmp_path / "c"))
            first, second = numbers_of(checkpoint, "first"), numbers_of(checkpoint, "second")
            for ours, theirs in zip(first, second, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            # Adagrad's state of a weight is the sum of the squares of its gradients, which are all 1.
            pushed = float(first[2][:, 0].sum(dtype=np.float64))
            count = checkpoint.read_dense("count", slice(0, 2)).weights
            assert (-count).tolist() == [pushed, pushed]
            assert pushed == PUSH_KEYS * sum(
                progress.sequence + 1 for progress in checkpoint.manifest.workers.values()
            )
            assert pushed >= seen
            seen = pushed
    assert seen > PUSH_KEYS * TRIALS


def test_save_is_of_the_moment_of_its_snapshot(tmp_path: Path) -> None:
    store = in_process()
    store.push_grad(random_gradients(1), push_id()).result()
    before, digest = pull(store), store.digest()

    def push_on() -> None:
        for sequence in range(1, 4):
            store.push_grad(random_gradients(sequence), push_id(sequence=sequence)).result()

    assert store.save(SaveRequest(url=str(tmp_path / "c"), on_snapshot=push_on)) == digest

    loaded = in_process()
    loaded.load(str(tmp_path / "c"))
    assert loaded.digest() == digest != store.digest()
    for name, values in pull(loaded).items():
        np.testing.assert_array_equal(values, before[name])


def test_version_is_that_of_the_snapshot(tmp_path: Path) -> None:
    store = in_process()
    store.push_grad(random_gradients(1), push_id(sequence=0), at=0).result()

    def take_a_step() -> None:
        store.push_grad(random_gradients(2), push_id(sequence=1), at=1).result()

    store.save(SaveRequest(url=str(tmp_path / "c"), on_snapshot=take_a_step))

    manifest = Checkpoint.open(str(tmp_path / "c")).manifest
    assert manifest.version == 1
    assert manifest.workers[0].sequence == 0


def test_training_goes_on_after_a_save_that_failed(tmp_path: Path) -> None:
    store, other = in_process(), in_process()
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(CheckpointError):
        store.save(SaveRequest(url=str(tmp_path / "file" / "c")))

    for each in (store, other):
        each.push_grad(random_gradients(1), push_id()).result()
    assert store.digest() == other.digest()
    assert store.save(SaveRequest(url=str(tmp_path / "c"))) == other.digest()


def test_load_comes_between_two_pushes(tmp_path: Path) -> None:
    """A push that is being applied would leave its second half in what was loaded."""
    store, url = twin_store(), str(tmp_path / "c")
    store.save(SaveRequest(url=url))
    first = store.engine.parameters.table("first")

    with ThreadPoolExecutor(1) as threads:
        loads: list[Future[None]] = []

        def push_and_load(*arguments: Any, **settings: Any) -> None:
            SparseTable.push(first, *arguments, **settings)
            loads.append(threads.submit(store.load, url))
            wait(loads, SOON_S)

        first.push = push_and_load  # type: ignore[method-assign]
        store.push_grad(twin_push(np.arange(10, dtype=np.uint64)), push_id()).result()
        loads[0].result(LIMIT_S)

    assert {name: table.rows for name, table in store.status().tables.items()} == {
        "first": 0,
        "second": 0,
    }


def test_load_leaves_nothing_of_a_checkpoint_that_was_loaded_before(tmp_path: Path) -> None:
    twin_store().save(SaveRequest(url=str(tmp_path / "twins")))
    saved = in_process()
    saved.create_table(replace(FIRST, dim=FIRST.dim + 1))
    saved.save(SaveRequest(url=str(tmp_path / "other")))
    store = ParameterStore()

    store.load(str(tmp_path / "twins"))
    store.load(str(tmp_path / "other"))

    assert store.status().tables.keys() == saved.status().tables.keys()
    assert store.digest() == saved.digest()


def test_part_is_saved_of_a_snapshot_alone(tmp_path: Path) -> None:
    """As when a server was restarted between the two calls of a save."""
    store = in_process()
    store.engine.snapshot("some token")

    with pytest.raises(
        ProtocolError, match=r"snapshot 'another token' no longer exists.*save again"
    ):
        store.engine.save_share(str(tmp_path), "another token")


def test_status_tells_what_the_last_save_cost(tmp_path: Path) -> None:
    store = in_process()
    assert store.status().last_save is None
    store.push_grad(random_gradients(1), push_id()).result()

    store.save(SaveRequest(url=str(tmp_path / "c")))

    save = store.status().last_save
    assert save is not None
    assert save.is_over
    assert 0 <= save.pause_s <= save.duration_s
    assert save.number == 1
    store.save(SaveRequest(url=str(tmp_path / "d")))
    save = store.status().last_save
    assert save is not None
    assert save.number == 2


@pytest.mark.parametrize("inference", [None, InferenceSettings()], ids=["training", "inference"])
def test_every_kind_of_save_stays_in_the_roots(
    inference: InferenceSettings | None, tmp_path: Path
) -> None:
    store = in_process(checkpoint_roots=[str(tmp_path / "root")])
    store.save(SaveRequest(url=str(tmp_path / "root/model"), inference=inference))

    with pytest.raises(CheckpointError, match=r"outside of .*/root: .* \(--checkpoint-root\)"):
        store.save(SaveRequest(url=str(tmp_path / "elsewhere"), inference=inference))

    assert not (tmp_path / "elsewhere").exists()
