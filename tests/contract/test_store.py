"""One suite for every store: embedded, and a client of one and of three real servers."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from protos.channel import PART_BYTES
from protos.errors import (
    CheckpointError,
    GradientError,
    ProtocolError,
    SpecConflictError,
    UnknownTableError,
    WaitTimeoutError,
)
from protos.gradients import DenseGrad, Gradients, SparseGrad
from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from protos.staleness import Staleness
from protos.store import Missing, Pulled, Stamp, Store
from ps_server.store import ParameterStore
from tests.support.cluster import cluster

DEEP = TableSpec(
    name="deep",
    dim=5,
    initializer=InitializerSpec(kind="normal", scale=0.1),
    optimizer=OptimizerSpec(name="adagrad", params={"learning_rate": 0.05}),
    seed=3,
)
WIDE = TableSpec(
    name="wide",
    dim=1,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.5}),
    num_shards=4,
)
TOWER = DenseSpec(
    name="tower",
    segments=(
        DenseSegment(length=20, initializer=InitializerSpec(kind="uniform", scale=0.3)),
        DenseSegment(length=3, initializer=InitializerSpec()),
    ),
    optimizer=OptimizerSpec(name="adam"),
    seed=5,
)
KEYS = np.random.default_rng(0).integers(0, 2**64, 200, dtype=np.uint64)

OpenJob = Callable[..., list[Store]]


def declare(store: Store) -> None:
    store.create_table(DEEP)
    store.create_table(WIDE)
    store.create_dense(TOWER)


def embedded(**settings) -> ParameterStore:
    store = ParameterStore(**settings)
    declare(store)
    return store


def stamp(worker=0, sequence=0, examples=1, batches=1, pulled=0) -> Stamp:
    return Stamp(
        worker=worker,
        incarnation=7,
        sequence=sequence,
        step=sequence,
        examples=examples,
        batches=batches,
        pulled=pulled,
    )


def random_gradients(seed: int, examples: int = 8) -> Gradients:
    random = np.random.default_rng(seed)

    def rows(dim: int) -> SparseGrad:
        keys = random.choice(KEYS, 60, replace=False)
        return SparseGrad(keys, random.normal(size=(60, dim)).astype(np.float32), examples)

    values = random.normal(size=TOWER.length).astype(np.float32)
    return Gradients(
        sparse={"deep": rows(5), "wide": rows(1)}, dense={"tower": DenseGrad(values, examples)}
    )


def pull(store: Store, missing: Missing = Missing.INITIAL, at=None):
    rows = store.pull_sparse({"deep": KEYS, "wide": KEYS}, missing=missing, at=at).result().rows
    tower = np.empty(TOWER.length, np.float32)
    store.pull_dense({"tower": tower}, at=at).result()
    return {**rows, "tower": tower}


def assert_same_parameters(expected: Store, actual: Store) -> None:
    wanted, found = pull(expected), pull(actual)
    for name, values in wanted.items():
        np.testing.assert_array_equal(values, found[name])
    assert expected.digest() == actual.digest()


@pytest.fixture(params=[0, 1, 3], ids=["embedded", "one-server", "three-servers"])
def num_servers(request) -> int:
    return request.param


@pytest.fixture
def open_job(num_servers) -> Iterator[OpenJob]:
    """Returns the stores of a job's workers, with tables and dense blocks declared."""
    with ExitStack() as stack:

        def open_job(num_workers=1, wait_limit_s=10.0, part_bytes=PART_BYTES) -> list[Store]:
            if num_servers == 0:
                return [embedded(num_workers=num_workers, wait_limit_s=wait_limit_s)] * num_workers
            servers = stack.enter_context(
                cluster(num_servers=num_servers, num_workers=num_workers, wait_limit_s=wait_limit_s)
            )
            clients = [servers.client(part_bytes=part_bytes) for _ in range(num_workers)]
            for client in clients:
                declare(client)
            return clients

        yield open_job


@pytest.fixture
def store(open_job) -> Store:
    return open_job()[0]


def test_initial_values_are_those_of_the_seed_anywhere(store):
    assert_same_parameters(embedded(), store)
    assert np.count_nonzero(pull(store)["deep"]) == KEYS.size * 5


def test_pull_never_creates_a_row(store):
    before = store.digest()

    pull(store, Missing.INITIAL)
    pull(store, Missing.ZEROS)

    assert store.status().tables["deep"].rows == 0
    assert store.digest() == before


def test_missing_rows_read_zeros_where_asked(store):
    known = KEYS[:10]
    grad = SparseGrad(known, np.ones((10, 5), np.float32), 1)
    store.push_grad(Gradients({"deep": grad}), stamp()).result()

    rows = pull(store, Missing.ZEROS)["deep"]

    assert np.count_nonzero(rows[10:]) == 0
    np.testing.assert_array_equal(rows[:10], pull(store)["deep"][:10])
    assert np.count_nonzero(rows[:10]) == 50


def test_rows_come_in_the_order_of_the_keys(store):
    order = np.random.default_rng(1).permutation(KEYS.size)

    rows = store.pull_sparse({"deep": KEYS[order]}, missing=Missing.INITIAL).result().rows["deep"]

    np.testing.assert_array_equal(rows, pull(store)["deep"][order])


def test_pull_of_no_keys_is_empty(store):
    keys = np.empty(0, np.uint64)

    pulled = store.pull_sparse({"deep": keys, "wide": KEYS[:2]}, missing=Missing.INITIAL).result()

    assert pulled.rows["deep"].shape == (0, 5)
    assert pulled.rows["wide"].shape == (2, 1)
    assert store.pull_sparse({}, missing=Missing.INITIAL).result() == Pulled({}, 0)


def test_pushes_move_rows_as_a_dict_would(store):
    """Table "wide" has SGD: w -= 0.5 * (sum of gradients / examples)."""
    oracle = dict.fromkeys(KEYS.tolist(), np.float32(0.0))

    for sequence in range(5):
        gradients = random_gradients(sequence)
        store.push_grad(gradients, stamp(sequence=sequence)).result()
        grad = gradients.sparse["wide"]
        for key, value in zip(grad.keys.tolist(), grad.values[:, 0], strict=True):
            oracle[key] -= np.float32(0.5) * (value * np.float32(1 / 8))

    np.testing.assert_allclose(
        pull(store)["wide"][:, 0], [oracle[key] for key in KEYS.tolist()], rtol=1e-5, atol=1e-7
    )
    touched = {key for key, value in oracle.items() if value}
    assert store.status().tables["wide"].rows == len(touched)


def test_same_pushes_make_the_same_model_anywhere(store):
    reference = embedded()

    for sequence in range(5):
        for each in (reference, store):
            each.push_grad(random_gradients(sequence), stamp(sequence=sequence)).result()

    assert_same_parameters(reference, store)


def test_parts_of_large_pushes_and_pulls_make_the_same_model(open_job):
    (store,) = open_job(part_bytes=100)
    reference = embedded()

    for sequence in range(3):
        for each in (reference, store):
            each.push_grad(random_gradients(sequence), stamp(sequence=sequence)).result()

    assert_same_parameters(reference, store)
    assert store.status().examples == {0: 3}


def test_empty_gradients_change_nothing(store):
    before = store.digest()
    empty = SparseGrad(np.empty(0, np.uint64), np.empty((0, 5), np.float32), 0)

    store.push_grad(Gradients(), stamp()).result()
    store.push_grad(Gradients({"deep": empty}), stamp(sequence=1)).result()

    assert store.digest() == before
    assert store.status().tables["deep"].rows == 0


def test_equal_spec_may_be_declared_again(store):
    store.push_grad(random_gradients(0), stamp()).result()
    before = store.digest()

    declare(store)

    assert store.digest() == before


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec(name="deep", dim=6, initializer=DEEP.initializer, optimizer=DEEP.optimizer),
        TableSpec(name="tower", dim=1, initializer=DEEP.initializer, optimizer=DEEP.optimizer),
        TableSpec(name="new", dim=0, initializer=DEEP.initializer, optimizer=DEEP.optimizer),
        TableSpec(
            name="new", dim=1, initializer=DEEP.initializer, optimizer=OptimizerSpec(name="x")
        ),
    ],
    ids=["other-dim", "name-of-a-block", "no-dim", "unknown-optimizer"],
)
def test_table_that_cannot_be_is_refused(store, spec):
    with pytest.raises(SpecConflictError):
        store.create_table(spec)

    assert set(store.status().tables) == {"deep", "wide"}


def test_dense_block_of_another_length_is_refused(store):
    with pytest.raises(SpecConflictError, match="tower"):
        store.create_dense(
            DenseSpec(name="tower", segments=TOWER.segments[:1], optimizer=TOWER.optimizer)
        )


def bad_gradients() -> dict[str, Gradients]:
    good = random_gradients(0)
    deep, tower = good.sparse["deep"], good.dense["tower"]
    with_nan, with_infinity = deep.values.copy(), tower.values.copy()
    with_nan[-1, -1] = np.nan
    with_infinity[-1] = -np.inf

    def push(sparse: SparseGrad = deep, dense: DenseGrad = tower) -> Gradients:
        return Gradients({**good.sparse, "deep": sparse}, {"tower": dense})

    return {
        "nan-in-a-row": push(SparseGrad(deep.keys, with_nan, 8)),
        "infinity-in-a-block": push(dense=DenseGrad(with_infinity, 8)),
        "rows-too-narrow": push(SparseGrad(deep.keys, deep.values[:, :4].copy(), 8)),
        "row-missing": push(SparseGrad(deep.keys, deep.values[:-1], 8)),
        "block-too-short": push(dense=DenseGrad(tower.values[:-1], 8)),
        "rows-of-no-examples": push(SparseGrad(deep.keys, deep.values, 0)),
        "block-of-no-examples": push(dense=DenseGrad(tower.values, 0)),
    }


@pytest.mark.parametrize("fault", list(bad_gradients()))
def test_bad_gradient_changes_nothing(store, fault):
    store.push_grad(random_gradients(1), stamp()).result()
    before = store.digest()

    with pytest.raises(GradientError, match="deep" if "row" in fault else "tower"):
        store.push_grad(bad_gradients()[fault], stamp(sequence=1)).result()

    assert store.digest() == before
    assert store.status().examples == {0: 1}


def test_pull_into_a_vector_of_another_length_is_refused(store):
    with pytest.raises(ProtocolError, match="tower"):
        store.pull_dense({"tower": np.empty(TOWER.length + 1, np.float32)}).result()


def test_worker_that_left_without_a_push_is_in_the_status(store):
    store.done(0, step=0)

    assert store.status().examples == {0: 0}
    assert store.status().done == {0}


def test_unknown_names_are_refused(store):
    before = store.digest()
    grad = SparseGrad(KEYS[:1], np.ones((1, 5), np.float32), 1)
    block = DenseGrad(np.ones(2, np.float32), 1)

    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.pull_sparse({"nowhere": KEYS}, missing=Missing.INITIAL).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.pull_dense({"nowhere": np.empty(2, np.float32)}).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.push_grad(Gradients({"deep": grad, "nowhere": grad}), stamp()).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.push_grad(Gradients({"deep": grad}, {"nowhere": block}), stamp()).result()

    assert store.digest() == before


def train_steps(store: Store, worker: int, num_steps: int) -> None:
    """Takes part in steps of synchronous training, and leaves."""
    for step in range(num_steps):
        pull(store, at=step)
        gradients = random_gradients(1000 * worker + step, examples=3 + worker)
        store.push_grad(gradients, stamp(worker, step, 3 + worker), at=step).result()
    store.done(worker, step=num_steps)


def train_together(stores: list[Store], num_steps: list[int]) -> None:
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(train_steps, stores, range(len(stores)), num_steps))


@pytest.mark.parametrize("num_servers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "num_steps", [[4, 4, 4], [2, 5, 3], [4, 0, 1]], ids=["equal", "less", "none"]
)
def test_sync_model_depends_on_neither_timing_nor_servers(open_job, num_steps):
    """The reference gets the workers' parts in the other order, one after the other.

    Three workers, because the sum of two numbers is the same in either order.
    """
    stores = open_job(num_workers=3)
    reference = embedded(num_workers=3)

    train_together(stores, num_steps)
    for step in range(max(num_steps) + 1):
        for worker in (2, 1, 0):
            if step == num_steps[worker]:
                reference.done(worker, step=step)
            elif step < num_steps[worker]:
                gradients = random_gradients(1000 * worker + step, examples=3 + worker)
                reference.push_grad(gradients, stamp(worker, step, 3 + worker), at=step).result()

    assert_same_parameters(reference, stores[0])
    status = stores[0].status()
    assert status.version == max(num_steps)
    assert status.done == {0, 1, 2}
    for worker, steps in enumerate(num_steps):
        assert status.examples.get(worker, 0) == (3 + worker) * steps


def test_pull_waits_for_its_version(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), stamp(0), at=0).result()

    pulled = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=1)
    assert np.count_nonzero(pull(first)["wide"]) == 0
    second.push_grad(random_gradients(1), stamp(1), at=0).result()

    assert np.count_nonzero(pulled.result().rows["wide"]) > 0


def test_version_that_does_not_come_names_who_is_behind(open_job):
    first, _ = open_job(num_workers=2, wait_limit_s=0.1)
    first.push_grad(random_gradients(0), stamp(0), at=0).result()

    with pytest.raises(WaitTimeoutError, match=r"version 1 .* workers \[1\]"):
        first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=1).result()


def test_push_out_of_step_is_refused(open_job):
    first, _ = open_job(num_workers=2)

    with pytest.raises(ProtocolError, match="worker 0 pushed step 1, expected 0"):
        first.push_grad(random_gradients(0), stamp(0), at=1).result()


def test_barrier_lets_all_go_on_at_one_version(open_job):
    """Worker 0 waits from step 1 on, so worker 1 takes steps 1 and 2 alone."""
    first, second = open_job(num_workers=2)
    versions: dict[int, int] = {}

    def wait() -> None:
        first.push_grad(random_gradients(0), stamp(0), at=0).result()
        versions[0] = first.barrier("pass", 0, step=1).result()

    thread = threading.Thread(target=wait)
    thread.start()
    for step in range(3):
        pull(second, at=step)
        second.push_grad(random_gradients(step), stamp(1, step), at=step).result()
    pull(second, at=3)  # worker 0 has come, or this would wait
    versions[1] = second.barrier("pass", 1, step=3).result()
    thread.join(10)

    assert versions == {0: 3, 1: 3}


def test_barrier_that_some_do_not_reach_names_them(open_job):
    first, *_ = open_job(num_workers=3, wait_limit_s=0.1)

    with pytest.raises(WaitTimeoutError, match=r"barrier 'pass': workers \[1, 2\] did not come"):
        first.barrier("pass", 0, step=0).result()


def test_barrier_does_not_wait_for_workers_that_are_done(open_job):
    first, second = open_job(num_workers=2)
    second.done(1, step=0)

    assert first.barrier("pass", 0, step=0).result() == 0


def test_status_counts_rows_examples_and_workers(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), stamp(0, 0, examples=8)).result()
    first.push_grad(random_gradients(0), stamp(0, 1, examples=8)).result()
    second.push_grad(random_gradients(0), stamp(1, 0, examples=5)).result()
    second.done(1, step=0)

    status = first.status()

    assert status.examples == {0: 16, 1: 5}
    assert status.done == {1}
    assert status.version == 3
    assert status.tables["deep"].rows == 60
    assert status.tables["deep"].size_bytes > 60 * 4 * 10


def test_version_counts_the_batches_pushed_on_arrival(open_job):
    """A pull for a version waits for them, too, and says which it has."""
    first, second = open_job(num_workers=2)
    waiting = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=5)

    versions = [
        first.push_grad(random_gradients(0), stamp(0, batches=3)).result(),
        second.push_grad(random_gradients(1), stamp(1, batches=0)).result(),
        second.push_grad(random_gradients(2), stamp(1, 1, batches=2)).result(),
    ]

    assert versions == [3, 3, 5]
    assert waiting.result().version == 5
    assert np.count_nonzero(waiting.result().rows["wide"]) > 0
    assert first.pull_dense({"tower": np.empty(TOWER.length, np.float32)}).result() == 5


def test_steps_go_on_after_a_barrier_where_pushes_on_arrival_ended(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), stamp(0, batches=3)).result()

    meetings = [
        store.barrier("pass", worker, step=0) for worker, store in enumerate((first, second))
    ]
    assert [met.result() for met in meetings] == [3, 3]
    for worker, store in enumerate((first, second)):
        store.push_grad(random_gradients(1), stamp(worker, 1), at=3).result()

    assert pull(first, at=4)["wide"].any()
    assert first.status().version == 4


def test_push_on_arrival_while_a_step_waits_for_parts_changes_nothing(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), stamp(0), at=0).result()
    before, status = first.digest(), first.status()

    with pytest.raises(ProtocolError, match="worker 1 pushed to be applied on arrival"):
        second.push_grad(random_gradients(1), stamp(1)).result()

    assert first.digest() == before
    assert first.status() == status


def test_status_counts_how_stale_batches_were(open_job, num_servers):
    """Every server counts every batch."""
    first, second = open_job(num_workers=2)
    pulled = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL).result().version

    first.push_grad(random_gradients(0), stamp(0, batches=4, pulled=pulled)).result()
    second.push_grad(random_gradients(1), stamp(1, batches=2, pulled=pulled)).result()
    second.push_grad(random_gradients(1), stamp(1, 1, batches=0, pulled=pulled)).result()
    second.push_grad(random_gradients(1), stamp(1, 2, pulled=99)).result()

    times = max(1, num_servers)
    assert first.status().staleness == Staleness().add(0, 5 * times).add(4, 2 * times)


def test_steps_in_common_are_never_stale(open_job, num_servers):
    """A worker's part counts once, however many batches it sums over."""
    stores = open_job(num_workers=2)
    for step in range(2):
        for worker, store in enumerate(stores):
            gradients = random_gradients(step)
            store.push_grad(
                gradients, stamp(worker, step, batches=3, pulled=step), at=step
            ).result()

    assert stores[0].status().staleness == Staleness().add(0, 4 * max(1, num_servers))


def test_saved_model_is_loaded_anywhere(store, tmp_path):
    for sequence in range(2):
        store.push_grad(random_gradients(sequence), stamp(sequence=sequence)).result()

    digest = store.save(str(tmp_path / "model"), {"job.toml": b"[model]"})
    loaded = embedded()
    loaded.load(str(tmp_path / "model"))

    assert digest == store.digest() == loaded.digest()
    for each in (store, loaded):
        each.push_grad(random_gradients(2), stamp(sequence=2)).result()
    assert_same_parameters(loaded, store)


def test_model_saved_elsewhere_is_loaded(store, tmp_path):
    saved = embedded()
    saved.push_grad(random_gradients(0), stamp()).result()
    saved.save(str(tmp_path / "model"), {})

    store.load(str(tmp_path / "model"))

    assert_same_parameters(saved, store)


def test_load_of_no_checkpoint_changes_nothing(store, tmp_path):
    store.push_grad(random_gradients(0), stamp()).result()
    before = store.digest()

    with pytest.raises(CheckpointError, match="nowhere"):
        store.load(str(tmp_path / "nowhere"))

    assert store.digest() == before


def test_worker_that_is_not_of_the_job_is_refused(open_job):
    first, _ = open_job(num_workers=2)
    before = first.digest()

    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        first.done(2, step=0)
    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        first.push_grad(random_gradients(0), stamp(2)).result()

    assert first.status().done == frozenset()
    assert first.digest() == before


def test_checkpoint_without_a_declared_table_is_refused(store, tmp_path):
    other = ParameterStore()
    other.create_table(DEEP)
    other.create_dense(TOWER)
    other.push_grad(Gradients({"deep": random_gradients(0).sparse["deep"]}), stamp()).result()
    other.save(str(tmp_path / "other"), {})
    before = store.digest()

    with pytest.raises(CheckpointError, match="has no wide, only deep, tower"):
        store.load(str(tmp_path / "other"))

    assert store.digest() == before
