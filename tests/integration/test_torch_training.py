"""Modules of PyTorch are trained as the built-in models are: in every mode, on any number of servers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.batch import Batch  # noqa: E402
from ctr_ps.ctr_model.models.model import Model  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import TorchModel  # noqa: E402
from ctr_ps.protos.errors import SpecConflictError  # noqa: E402
from ctr_ps.protos.store import Missing, Store  # noqa: E402
from ctr_ps.ps_server.store import ParameterStore  # noqa: E402
from ctr_ps.ps_worker.data.blocks import joined  # noqa: E402
from ctr_ps.ps_worker.job import Job  # noqa: E402
from ctr_ps.ps_worker.job.model import DENSE_BLOCK  # noqa: E402
from tests.support.cluster import cluster  # noqa: E402
from tests.support.torch_models import CtrDnn, params_of_twin  # noqa: E402
from tests.support.training import (  # noqa: E402
    NUM_DENSE,
    NUM_SLOTS,
    job,
    random_batches,
    small_model,
    together,
    worker_run,
)

OPTIONS = {"dim": 4, "hidden": [16, 8]}
MODES = ("sync", "half_async", "async", "bounded_staleness", "geo")
SETTINGS = (
    "optimizer.sparse={name='adagrad', initial_accumulator=0.0}",
    "optimizer.dense=adam",
    "strategy.geo.k_steps=4",
)


def torch_model(seed: int = 0) -> TorchModel:
    return TorchModel(Schema.numbered(NUM_DENSE, NUM_SLOTS), CtrDnn, OPTIONS, seed=seed)


def settings_of(mode: str, *overrides: str) -> Job:
    return job(mode, *SETTINGS, *overrides)


def train(
    stores: Sequence[Store],
    model: Model,
    settings: Job,
    data: Sequence[Sequence[Batch]],
    *,
    is_in_process: bool,
) -> None:
    """Trains a worker for each element of `data`."""

    def worker(index: int) -> None:
        with worker_run(
            stores[index],
            model,
            settings,
            worker=index,
            num_workers=len(data),
            is_in_process=is_in_process,
        ) as run:
            run.train(data[index])
            run.barrier("end")

    works: list[Callable[[], object]] = [partial(worker, index) for index in range(len(data))]
    together(*works)


def data_of(num_workers: int) -> list[list[Batch]]:
    return [random_batches(12, 16, seed=worker) for worker in range(num_workers)]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns_what_the_built_in_model_learns(mode: str) -> None:
    """From the same initial values; what a pull finds in the asynchronous modes is a matter of time."""
    original, twin = small_model(), torch_model()
    settings, data = settings_of(mode), [random_batches(40, 32, seed=1)]
    stores = [ParameterStore(), ParameterStore()]
    with worker_run(stores[0], original, settings) as run:
        run.start()
    initial = dense_of(stores[0], original)
    twin.initial_values = params_of_twin(twin, original, initial)
    stores[0] = ParameterStore()
    replace_range(original, 0.01)

    for store, model in zip(stores, (original, twin), strict=True):
        train([store], model, settings, data, is_in_process=True)

    losses = [loss_of(store, model) for store, model in zip(stores, (original, twin), strict=True)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] < loss_of(untrained(twin), twin) - 0.01


def replace_range(model: Model, init_range: float) -> None:
    """Gives the built-in model's embeddings the initial range of its twin's."""
    (table,) = model.tables
    object.__setattr__(table, "init_range", init_range)


def untrained(model: Model) -> ParameterStore:
    store = ParameterStore()
    with worker_run(store, model, settings_of("sync")) as run:
        run.start()
    return store


def dense_of(store: Store, model: Model) -> Any:
    out = np.empty(model.num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: out}).result()
    return out


def loss_of(store: Store, model: Model) -> float:
    """Returns the log loss on examples that were not trained on."""
    from ctr_ps.ps_worker.training.lookups import keys_of_batch

    batch = joined(random_batches(20, 32, seed=99))
    keys = keys_of_batch(batch, model.tables)
    rows = store.pull_sparse(keys.unique, missing=Missing.INITIAL).result().rows
    found = model.predict(
        dense_of(store, model), batch, keys.lookups(rows), model.workspace(batch.size)
    )
    clicks = np.where(batch.labels == 1, found, 1 - found)
    return float(-np.log(clicks).mean())


@pytest.mark.parametrize("num_servers", [1, 3])
def test_geo_replicas_begin_with_the_values_that_workers_give(num_servers: int) -> None:
    model, data = torch_model(), data_of(2)
    with cluster(num_servers=num_servers, num_workers=2) as servers:
        clients = [servers.client(joins=False) for _ in data]
        train(clients, model, settings_of("geo"), data, is_in_process=False)

        loss = loss_of(clients[0], model)

    store = ParameterStore(num_workers=2, wait_limit_s=30)
    train([store] * 2, model, settings_of("geo"), data, is_in_process=True)
    assert loss == pytest.approx(loss_of(store, model), rel=0.01)
    assert loss < loss_of(untrained(model), model) - 0.005


def test_workers_with_other_initial_values_are_refused() -> None:
    store = ParameterStore(num_workers=2)
    worker_run(store, torch_model(1), job("sync"), worker=0, num_workers=2).close()

    with pytest.raises(SpecConflictError, match="'dense' exists with other initial values"):
        worker_run(store, torch_model(2), job("sync"), worker=1, num_workers=2)
