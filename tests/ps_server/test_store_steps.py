"""Steps of synchronous training: any order in which workers call gives the same model."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Future, Missing, Version
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import push_id

DIM = 2
KEYS = np.arange(30, dtype=np.uint64)
UNIFORM = InitializerSpec(kind="uniform", scale=0.5)

Call = Future[object] | None


def new_store(num_workers: int, optimizer: str = "adagrad", rate: float = 0.1) -> ParameterStore:
    spec = OptimizerSpec(name=optimizer, params={"learning_rate": rate})
    store = ParameterStore(num_workers=num_workers, wait_limit_s=0.01)
    store.create_table(
        TableSpec(name="table", dim=DIM, initializer=UNIFORM, optimizer=spec, num_shards=2)
    )
    segments = (DenseSegment(length=DIM, initializer=UNIFORM),)
    store.create_dense(DenseSpec(name="block", segments=segments, optimizer=spec))
    return store


def gradients_of(worker: int, step: int, examples: int) -> Gradients:
    """Of numbers whose sum shows the order in which they were added."""
    rng = np.random.default_rng([worker, step])
    keys = rng.choice(KEYS, rng.integers(0, 9), replace=False)
    values = rng.normal(size=(keys.size, DIM)).astype(np.float32) * np.float32(10.0**worker)
    block = rng.normal(size=DIM).astype(np.float32)
    return Gradients(
        {"table": SparseGrad(keys, values, examples)}, {"block": DenseGrad(block, examples)}
    )


def is_pending(call: Call) -> bool:
    return isinstance(call, WaitingFuture) and not call.done()


def worker_calls(store: ParameterStore, worker: int, passes: list[int]) -> Iterator[Call]:
    """Makes a worker's calls one by one: `passes` says how many steps it takes before each barrier."""
    version: Version = 0
    for number, num_steps in enumerate(passes):
        for _ in range(num_steps):
            pull = store.pull_sparse({"table": KEYS}, missing=Missing.INITIAL, at=version)
            yield pull
            assert pull.result().rows["table"].shape == (KEYS.size, DIM)
            examples = 3 + worker
            yield store.push_grad(
                gradients_of(worker, version, examples),
                push_id(worker, version, examples, pulled=version),
                at=version,
            )
            version += 1
        met = store.barrier(f"pass-{number}", worker, step=version)
        yield met
        version = met.result()
    store.leave(worker, step=version)
    yield None


def run_in_order(passes: list[list[int]], choose: Callable[[list[int]], int]) -> ParameterStore:
    """Lets workers call in the order that `choose` picks among those that do not wait."""
    store = new_store(len(passes))
    workers = {worker: worker_calls(store, worker, own) for worker, own in enumerate(passes)}
    waits: dict[int, Call] = dict.fromkeys(workers)
    while workers:
        able = [worker for worker in sorted(workers) if not is_pending(waits[worker])]
        assert able, "all workers wait"
        worker = choose(able)
        try:
            waits[worker] = next(workers[worker])
        except StopIteration:
            del workers[worker]
    return store


@settings(max_examples=40)
@given(
    passes=st.integers(1, 3).flatmap(
        lambda num_passes: st.lists(
            st.lists(st.integers(0, 3), min_size=num_passes, max_size=num_passes),
            min_size=1,
            max_size=3,
        )
    ),
    data=st.data(),
)
def test_any_order_of_calls_gives_the_same_model(
    passes: list[list[int]], data: st.DataObject
) -> None:
    """Workers with unequal numbers of steps meet in barriers and go on at one version."""
    store = run_in_order(passes, lambda able: data.draw(st.sampled_from(able)))

    expected = run_in_order(passes, min)
    assert store.digest() == expected.digest()
    status = store.status()
    assert status == expected.status()
    assert status.version == sum(max(own) for own in zip(*passes, strict=True))
    assert store.engine.job.all_left()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_learn_what_one_learns_with_all_their_examples(num_workers: int) -> None:
    """Logistic regression by SGD, 20 steps, batches of unequal size."""
    rng = np.random.default_rng(0)
    features = rng.integers(0, KEYS.size, (20, 64, 3))  # [step, B, S]
    clicks = rng.random((20, 64)) < 0.3
    bounds = [0, *np.sort(rng.choice(np.arange(1, 64), num_workers - 1, replace=False)), 64]
    together, alone = (new_store(number, "sgd", rate=1.0) for number in (num_workers, 1))

    for step in range(20):
        for worker in range(num_workers):
            part = slice(bounds[worker], bounds[worker + 1])
            push_batch(together, worker, step, features[step, part], clicks[step, part])
        push_batch(alone, 0, step, features[step], clicks[step])

    np.testing.assert_allclose(weights_of(together), weights_of(alone), atol=1e-5)
    assert np.abs(weights_of(alone) - weights_of(new_store(1))).max() > 0.1


def weights_of(store: ParameterStore) -> np.ndarray:
    return store.pull_sparse({"table": KEYS}, missing=Missing.INITIAL).result().rows["table"]


def push_batch(
    store: ParameterStore, worker: int, step: int, features: np.ndarray, clicks: np.ndarray
) -> None:
    weights = (
        store.pull_sparse({"table": KEYS}, missing=Missing.INITIAL, at=step).result().rows["table"]
    )
    errors = 1 / (1 + np.exp(-weights[features, 0].sum(axis=1))) - clicks  # [B]
    gradient = np.zeros((KEYS.size, DIM), np.float32)
    np.add.at(gradient[:, 0], features, errors[:, None].astype(np.float32))
    touched = np.unique(features)
    examples = clicks.size
    grad = SparseGrad(KEYS[touched], gradient[touched], examples)
    store.push_grad(
        Gradients({"table": grad}), push_id(worker, step, examples, pulled=step), at=step
    )


def test_step_without_examples_passes_and_changes_nothing() -> None:
    store = new_store(2)
    before = store.digest()

    for worker in (0, 1):
        store.push_grad(Gradients(), push_id(worker, 0, 0), at=0)

    assert store.status().version == 1
    assert store.digest() == before


def test_part_that_was_under_way_when_its_worker_left_later_steps_counts() -> None:
    """A worker leaves by number: what it sent for earlier steps may come after that."""
    store, in_order = new_store(2), new_store(2)
    for each in (store, in_order):
        each.push_grad(gradients_of(0, 0, 3), push_id(0, 0, 3), at=0)

    store.leave(1, step=1)
    store.push_grad(gradients_of(1, 0, 4), push_id(1, 0, 4), at=0)
    in_order.push_grad(gradients_of(1, 0, 4), push_id(1, 0, 4), at=0)
    in_order.leave(1, step=1)

    assert store.digest() == in_order.digest()
    assert store.status() == in_order.status()
    with pytest.raises(ProtocolError, match="worker 1 pushed step 1 after it had left"):
        store.push_grad(Gradients(), push_id(1, 1, 0), at=1)


def test_pull_that_nobody_waits_for_any_more_is_dropped() -> None:
    store = new_store(1)
    pull = store.pull_sparse({"table": KEYS}, missing=Missing.INITIAL, at=1)
    assert isinstance(pull, WaitingFuture)

    pull.cancel()
    store.push_grad(gradients_of(0, 0, 3), push_id(0, 0, 3), at=0)

    assert pull.cancelled()


def test_dense_block_is_pulled_at_its_version() -> None:
    store = new_store(1)
    start, later = np.empty(DIM, np.float32), np.full(DIM, np.nan, np.float32)
    assert store.pull_dense({"block": start}, at=0).result() == 0
    pull = store.pull_dense({"block": later}, at=1)
    assert np.isnan(later).all()

    store.push_grad(gradients_of(0, 0, 3), push_id(0, 0, 3), at=0)

    assert pull.result() == 1
    assert (later != start).all()
