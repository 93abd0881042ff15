"""Sample weights: a row of weight 3 trains as three rows do, in every mode, over any number of workers.

Float sums in another order differ in their last bits, so that rows that share a parameter agree to a few
units of float32. What only copies of one row change is exact: g + g + g and 3 g round alike.
"""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.blocks import joined, rows_between
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from tests.support.training import (
    NUM_DENSE,
    NUM_SLOTS,
    job,
    random_batches,
    small_model,
    together,
    train_worker,
    worker_run,
)

WEIGHTS = np.float32([1, 3, 0, 2, 5, 1, 4, 2])
(ROWS,) = random_batches(1, WEIGHTS.size, seed=3)
WEIGHTED = replace(ROWS, weights=WEIGHTS)
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.5}",
    "train.batch_size=32",
)


def repeated(rows: Batch, weights: np.ndarray = WEIGHTS) -> Batch:
    """Returns each row as often as its weight says."""
    return joined(
        [
            rows_between(rows, row, row + 1)
            for row, weight in enumerate(weights.tolist())
            for _ in range(int(weight))
        ]
    )


def parameters(store: ParameterStore, keys: np.ndarray, length: int) -> dict[str, np.ndarray]:
    tables = dict.fromkeys(store.status().tables, keys)
    dense = np.empty(length, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    rows = store.pull_sparse(tables, missing=Missing.INITIAL).result().rows
    return {**rows, DENSE_BLOCK: dense}


def trained(*batches: Batch, mode: str = "sync", steps: int = 3) -> dict[str, np.ndarray]:
    """Returns the parameters after training, each of `batches` by a worker of its own."""
    store = ParameterStore(num_workers=len(batches))
    together(
        *(
            lambda worker=worker, batch=batch: train_worker(
                store,
                [batch] * steps,
                job(mode, *SGD),
                worker=worker,
                num_workers=len(batches),
                is_in_process=False,
            )
            for worker, batch in enumerate(batches)
        )
    )
    return parameters(store, np.unique(ROWS.keys), small_model().num_params)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-5, atol=2e-7, err_msg=name)


@pytest.mark.parametrize(("mode", "steps"), [("sync", 3), ("half_async", 3), ("async", 1)])
def test_weights_train_as_repeated_rows_do(mode: str, steps: int) -> None:
    weighted = trained(WEIGHTED, mode=mode, steps=steps)

    assert_close(weighted, trained(repeated(ROWS), mode=mode, steps=steps))


def test_a_step_of_two_workers_is_the_weighted_mean_over_both() -> None:
    """One has weights of 9 altogether, the other of 9.5: the mean of their means would be another."""
    first, second = rows_between(WEIGHTED, 0, 5), rows_between(WEIGHTED, 5, 8)
    second = replace(second, weights=np.float32([0.5, 7, 2]))

    assert_close(trained(first, second), trained(joined([first, second])))


def test_worker_whose_batch_weighs_nothing_takes_part_in_the_step() -> None:
    nothing = replace(ROWS, weights=np.zeros(ROWS.size, np.float32))

    assert_close(trained(WEIGHTED, nothing), trained(WEIGHTED))


def trained_by_threads(*batches: Batch, settings: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Returns the parameters after one step, each of `batches` in a thread of its own."""
    store, threads = ParameterStore(), f"train.thread_num={len(batches)}"
    progress = train_worker(store, batches, job("sync", *SGD, threads, *settings))
    assert progress.steps == len(batches)
    return parameters(store, np.unique(ROWS.keys), small_model().num_params)


def test_batch_of_a_thread_that_weighs_nothing_takes_part_in_the_step() -> None:
    nothing = replace(ROWS, weights=np.zeros(ROWS.size, np.float32))

    assert_close(trained_by_threads(WEIGHTED, nothing), trained_by_threads(WEIGHTED))


def test_batch_that_is_skipped_weighs_nothing_in_its_step() -> None:
    bad = replace(WEIGHTED, dense=np.full_like(ROWS.dense, np.inf))

    skipping = trained_by_threads(WEIGHTED, bad, settings=("train.non_finite=skip",))

    assert_close(skipping, trained_by_threads(WEIGHTED))


def test_rows_without_weights_have_weight_1_beside_others() -> None:
    alike = joined([WEIGHTED, replace(ROWS, weights=np.ones(ROWS.size, np.float32))])

    assert_close(trained_by_threads(WEIGHTED, ROWS), trained_by_threads(alike))


def test_batch_that_weighs_nothing_changes_nothing_and_is_counted() -> None:
    nothing = replace(ROWS, weights=np.zeros(ROWS.size, np.float32))
    store, idle = ParameterStore(), ParameterStore()

    progress = train_worker(store, [nothing], job("sync", *SGD))
    train_worker(idle, [], job("sync", *SGD))

    assert (progress.examples, progress.steps) == (ROWS.size, 1)
    assert store.digest() == idle.digest()


def test_row_of_weight_3_is_three_rows_to_the_last_bit_where_it_shares_nothing() -> None:
    """Keys of logistic regression that only copies of one row have, in one synchronous step."""
    schema = Schema.numbered(NUM_DENSE, NUM_SLOTS)
    model = build_model("lr", schema, {})
    weights = np.float32([3, 1, 2])
    rows = replace(
        rows_between(ROWS, 0, 3),
        keys=np.arange(3 * NUM_SLOTS, dtype=np.uint64),
        weights=weights,
    )
    found = []
    for batch in (rows, repeated(replace(rows, weights=None), weights)):
        store = ParameterStore()
        with worker_run(store, model, job("sync", *SGD)) as run:
            run.train([batch])
        found.append(parameters(store, rows.keys, model.num_params)["linear"])

    assert np.count_nonzero(found[0])
    assert found[0].tobytes() == found[1].tobytes()


def test_mean_loss_is_weighted() -> None:
    weighted = train_worker(ParameterStore(), [WEIGHTED], job("sync", *SGD))
    expected = train_worker(ParameterStore(), [repeated(ROWS)], job("sync", *SGD))

    assert weighted.mean_loss == pytest.approx(expected.mean_loss, rel=1e-6)
    assert (weighted.examples, expected.examples) == (8, 18)


def test_loss_of_a_step_is_weighted() -> None:
    losses = []
    for batch in (WEIGHTED, repeated(ROWS)):
        with worker_run(ParameterStore(), small_model(), job("sync", *SGD)) as run:
            (step,) = run.steps([batch])
            losses.append(step.loss)

    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
