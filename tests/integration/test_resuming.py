"""A whole cluster dies in mid-run, and another one, of other servers, goes on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import Summary, train_job
from tests.support.cluster import LIMIT_S, cluster
from tests.support.killed import KilledError, KilledStore, resumed_job, wait_for_saves
from tests.support.training import plan_as

ROWS, NUM_WORKERS = 600, 2


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clicks")
    generate(folder, rows=ROWS, test_rows=100, files=3, test_files=1, seed=1)
    return folder


def job_of(clicks: Path, folder: Path, *settings: str) -> Job:
    own = ["checkpoint.every_steps=2", "checkpoint.keep_last=3", "train.batch_size=16"]
    return resumed_job(clicks, folder, *own, *settings)


def run(job: Job, *, num_servers: int, pushes: int | None = None) -> list[Summary]:
    """Runs a job on a new cluster; with `pushes`, worker 0 dies after so many and the servers with it."""
    plan = plan_of(job)
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        with cluster(num_servers=num_servers, num_workers=NUM_WORKERS) as servers:
            stores = [servers.client(joins=False) for _ in range(NUM_WORKERS)]
            if pushes is not None:
                stores[0] = KilledStore(stores[0], pushes)
            endings = [
                pool.submit(
                    train_job,
                    plan_as(plan, worker, NUM_WORKERS, is_in_process=False),
                    store,
                )
                for worker, store in enumerate(stores)
            ]
            error = endings[0].exception()
            if error is None:
                return [ending.result() for ending in endings]
        assert endings[1].exception() is not None  # its connections were closed
        raise error


def kill(job: Job, *, num_servers: int, pushes: int) -> None:
    with pytest.raises(KilledError):
        run(job, num_servers=num_servers, pushes=pushes)
    wait_for_saves(LIMIT_S)


@pytest.mark.parametrize("seed", range(3))
def test_cluster_that_went_on_has_the_bytes_of_one_that_was_never_stopped(
    seed: int, clicks: Path, tmp_path: Path
) -> None:
    sync = ["strategy.mode=sync", "train.thread_num=2", "data.shuffle_files=true"]
    expected = run(job_of(clicks, tmp_path / "whole", *sync), num_servers=2)[0]
    job, random = job_of(clicks, tmp_path / "killed", *sync), Random(seed)

    kill(job, num_servers=2, pushes=random.randint(2, 5))
    kill(job, num_servers=2, pushes=random.randint(2, 5))
    ended = run(job, num_servers=3)[0]

    assert ended.model_digest == expected.model_digest
    assert Checkpoint.open(tmp_path / "killed").manifest.version == (
        Checkpoint.open(tmp_path / "whole").manifest.version
    )


@pytest.mark.parametrize(
    ("mode", "deal"),
    [
        *((mode, "fixed") for mode in ("half_async", "async", "geo", "bounded_staleness")),
        *((mode, "queue") for mode in ("half_async", "async")),
    ],
)
def test_cluster_goes_on_in_every_mode_and_leaves_no_row_out(
    mode: str, deal: str, clicks: Path, tmp_path: Path
) -> None:
    settings = [f"strategy.mode={mode}", "train.epochs=1", "train.thread_num=2"]
    settings.append(f"data.deal={deal}")
    settings.append("strategy.geo.k_steps=2")
    run(job_of(clicks, tmp_path / "whole", *settings), num_servers=1)
    job = job_of(clicks, tmp_path / "killed", *settings)

    kill(job, num_servers=2, pushes=1 if mode == "geo" else 3)
    ended = run(job, num_servers=3)[0]

    assert keys_of(tmp_path / "killed") == keys_of(tmp_path / "whole")
    assert ROWS / 3 < ended.examples <= ROWS


def keys_of(folder: Path) -> set[int]:
    """Returns the keys that have a row: those of the rows that were trained on."""
    shards = Checkpoint.open(folder).read_shards("embedding", range(64))
    return {int(key) for _, rows in shards for key in rows.keys}
