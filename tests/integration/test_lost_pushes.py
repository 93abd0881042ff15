"""Saves in the middle of training, on servers of which some calls are lost and sent again."""

from pathlib import Path

import pytest

from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.support.call_faults import faults_of_calls
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, small_model, worker_run

BATCHES = random_batches(10, 16, seed=4)


@pytest.mark.parametrize("mode", ["sync", "half_async"])
def test_checkpoint_after_a_step_has_that_step_on_every_server(mode: str, tmp_path: Path) -> None:
    """The answer to a push comes with the next pull: before that the push may have been lost."""
    saved: list[tuple[int, list[int], int]] = []

    with (
        cluster(num_servers=2, wait_limit_s=10.0) as servers,
        faults_of_calls(tmp_path / "journal", lost=0.3),
    ):
        store = servers.client(joins=False)
        with worker_run(store, small_model(), job(mode)) as run:

            def save() -> None:
                """As a saver does after a step."""
                run.settle()
                url = str(tmp_path / f"step-{run.progress.steps}")
                store.save(SaveRequest(url=url))
                versions = [each.status().version for each in servers.stores]
                progress = Checkpoint.open(url).manifest.workers
                saved.append((run.progress.steps, versions, progress[0].step))

            run.train(BATCHES, after_step=save)
        retries = store.num_retries

    assert retries > 0
    assert saved == [(step, [step, step], step) for step in range(1, len(BATCHES) + 1)]
