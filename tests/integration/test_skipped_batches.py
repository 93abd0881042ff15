"""Batches that are not finite, in every mode: skipped, they leave no trace in the model."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import GradientError
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.run import Run
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, small_model, together, worker_run

SIZE = 16
SKIP = 'train.non_finite="skip"'
GOOD = random_batches(20, SIZE, seed=3)
BAD = replace(GOOD[0], dense=np.full_like(GOOD[0].dense, np.inf))
MIXED = [BAD, *GOOD[:7], BAD, BAD, *GOOD[7:], BAD]


def train(store: Store, batches: list[Batch], settings: Job, **where: object) -> Run:
    with worker_run(store, small_model(), settings, **where) as run:
        run.train(batches)
        run.barrier("end")
        return run


@pytest.mark.parametrize("mode", ["sync", "half_async", "async"])
def test_model_is_that_of_the_batches_that_were_not_skipped(mode: str) -> None:
    """Of one thread in process all modes are deterministic."""
    expected, store = ParameterStore(), ParameterStore()
    train(expected, GOOD, job(mode))

    run = train(store, MIXED, job(mode, SKIP))

    assert store.digest() == expected.digest()
    assert store.status().examples == {0: len(GOOD) * SIZE}
    assert (run.progress.steps, run.progress.examples) == (len(MIXED), len(GOOD) * SIZE)
    assert run.progress.mean_loss < 1
    assert run.non_finite.skipped == 4
    assert run.non_finite.by_name == {"dense": 4, "loss": 4}


@pytest.mark.parametrize("thread_num", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "bounded_staleness", "geo"])
def test_workers_of_a_cluster_skip_their_own_batches(mode: str, thread_num: int) -> None:
    settings = job(mode, SKIP, f"train.thread_num={thread_num}")
    skipped = {}

    with cluster(num_servers=2, num_workers=2) as servers:
        clients = [servers.client(joins=False) for _ in range(2)]

        def work(worker: int) -> None:
            batches = MIXED if worker == 0 else GOOD
            run = train(
                clients[worker],
                batches,
                settings,
                worker=worker,
                num_workers=2,
                is_in_process=False,
            )
            skipped[worker] = run.non_finite.skipped

        together(*(functools.partial(work, worker) for worker in range(2)))
        status = clients[0].status()

    assert skipped == {0: 4, 1: 0}
    assert status.examples == {0: len(GOOD) * SIZE, 1: len(GOOD) * SIZE}


@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "bounded_staleness", "geo"])
def test_without_the_policy_the_run_ends_with_the_number_of_the_batch(mode: str) -> None:
    with cluster() as servers:
        client = servers.client(joins=False)
        with pytest.raises(GradientError, match=r"^batch 3: .* set non_finite = 'skip'"):
            train(client, [*GOOD[:2], BAD, *GOOD[2:]], job(mode), is_in_process=False)


def test_error_of_a_run_with_several_workers_names_the_worker() -> None:
    run = worker_run(
        ParameterStore(num_workers=2), small_model(), job("async"), worker=1, num_workers=2
    )

    with pytest.raises(GradientError, match=r"^worker 1: batch 1: "):
        run.non_finite.is_skipped(Gradients(), math.nan, 1)
