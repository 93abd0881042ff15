"""What an evaluation says: of weights, of each task, and of a model that has diverged."""

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import GradientError
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.training.evaluation.evaluator import evaluate, figures
from tests.support.training import job, random_batches, small_model


class DivergedStore:
    """A store whose dense parameters are not numbers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def pull_dense(self, into, *, at=None):
        answer = self._store.pull_dense(into, at=at)
        for vector in into.values():
            vector[:] = np.nan
        return answer


def test_model_that_has_diverged_is_an_error_of_ours() -> None:
    model, store = small_model(), ParameterStore()
    declare(store, specs_of(model, job("async")))

    with pytest.raises(GradientError, match="diverged; lower the learning rate"):
        evaluate(DivergedStore(store), model, random_batches(1, 8, seed=1), batch_size=8)


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_of_an_evaluation_take_as_many_threads_as_it_is_told(num_threads: int) -> None:
    """Not one for each core: they would wait for each other where others have these cores."""
    model, store = small_model(), ParameterStore()
    declare(store, specs_of(model, job("async")))
    seen = []

    with threadpool_limits(limits=3 - num_threads, user_api="blas"):
        evaluate(
            store,
            model,
            random_batches(1, 8, seed=1),
            batch_size=8,
            num_threads=num_threads,
            on_predictions=lambda _: seen.append(blas_threads()),
        )
        assert blas_threads() == {3 - num_threads}

    assert seen == [{num_threads}]


def labelled(rows: list[int], weights: list[float] | None = None) -> Batch:
    """Returns rows by number: 0 without a click, 1 with one, 2 with a conversion, too."""
    clicks, bought = np.float32([row > 0 for row in rows]), np.float32([[row > 1] for row in rows])
    return Batch(
        labels=clicks,
        other_labels=bought,
        dense=np.empty((len(rows), 0), np.float32),
        keys=np.array(rows, np.uint64),
        offsets=np.arange(len(rows) + 1, dtype=np.int32),
        num_slots=1,
        weights=None if weights is None else np.float32(weights),
    )


def test_example_of_weight_3_is_three_examples_of_each_task() -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    schema = Schema(dense=(), slots=("item",), label="click", other_labels=("bought",))
    model, store = build_model("esmm", schema, {"dim": 2, "hidden": [4]}), ParameterStore()
    declare(store, specs_of(model, job("async")))

    weighted, repeated = (
        figures(evaluate(store, model, [batch], batch_size=8))
        for batch in (labelled([0, 1, 2], [1, 3, 1]), labelled([0, 1, 1, 1, 2]))
    )

    assert (weighted.pop("test_examples"), repeated.pop("test_examples")) == (3, 5)
    assert weighted.pop("unknown_values") == repeated.pop("unknown_values") == {"item": 1.0}
    tasks, of_repeated = weighted.pop("tasks"), repeated.pop("tasks")
    assert weighted == pytest.approx(repeated)
    assert [task.pop("test_examples") for task in tasks.values()] == [3, 2, 3]
    for name, task in tasks.items():
        del of_repeated[name]["test_examples"]
        assert task == pytest.approx(of_repeated[name])
