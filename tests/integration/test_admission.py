"""Which keys get a row in synchronous training depends on nothing but the data."""

import functools
from collections.abc import Sequence

import pytest

from ctr_model.batch import Batch
from protos.store import Store, TableStatus
from ps_server.store import ParameterStore
from ps_worker.job import Job
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, together, train_worker

ADMISSIONS = {
    "count": "{policy='count', threshold=4}",
    "bloom": "{policy='count', threshold=4, counter='bloom', expected_keys=100}",
    "probability": "{policy='probability', threshold=0.2}",
    "score": "{policy='score', threshold=1.5}",
}


def train(
    stores: Sequence[Store], data: Sequence[Sequence[Batch]], settings: Job, *, is_in_process: bool
) -> tuple[str, TableStatus]:
    """Trains a worker for each element of `data`; returns the model's digest, and its table's status."""
    together(
        *(
            functools.partial(
                train_worker,
                store,
                batches,
                settings,
                worker=worker,
                num_workers=len(data),
                is_in_process=is_in_process,
            )
            for worker, (store, batches) in enumerate(zip(stores, data, strict=True))
        )
    )
    return stores[0].digest(), stores[0].status().tables["embedding"]


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_two_workers_train_the_same_model_on_any_number_of_servers(admission: str) -> None:
    settings = job("sync", f"life.admission={ADMISSIONS[admission]}")
    data = [random_batches(12, 16, seed=1), random_batches(12, 16, seed=2)]
    store = ParameterStore(num_workers=2, wait_limit_s=30)

    digest, expected = train([store] * 2, data, settings, is_in_process=True)

    assert expected.rows > 10
    assert expected.candidates > 0 or admission == "bloom"
    for num_servers in (1, 3):
        with cluster(num_servers=num_servers, num_workers=2) as servers:
            clients = [servers.client(joins=False), servers.client(joins=False)]
            found, status = train(clients, data, settings, is_in_process=False)
            assert found == digest
            assert (status.rows, status.candidates) == (expected.rows, expected.candidates)


def test_counts_are_added_up_before_they_decide() -> None:
    """Two workers with half the data each admit what one with all of it does."""
    settings = job("sync", f"life.admission={ADMISSIONS['count']}")
    batches = random_batches(24, 16, seed=3)

    alone, together_ = (
        train(
            [ParameterStore(num_workers=num_workers, wait_limit_s=30)] * num_workers,
            [batches[worker::num_workers] for worker in range(num_workers)],
            settings,
            is_in_process=True,
        )[1]
        for num_workers in (1, 2)
    )

    assert (alone.rows, alone.candidates) == (together_.rows, together_.candidates)
