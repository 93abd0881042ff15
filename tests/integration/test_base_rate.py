"""A fresh model starts at the click rate of worker 0's first rows, on every worker."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import JobError
from ctr_ps.protos.store import SaveRequest, Store
from ctr_ps.protos.wire.calls import BARRIER
from ctr_ps.protos.wire.requests import Barrier
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from ctr_ps.ps_worker.training.evaluation.base_rate import rates_of
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, small_model, together, worker_run

MODES = ["sync", "half_async", "async", "bounded_staleness", "geo"]
RARE = [random_batches(4, 16, seed=seed) for seed in (1, 2)]
for _batch in RARE[0]:
    assert _batch.labels is not None
    _batch.labels[1:] = 0.0  # of worker 0: another rate than that of worker 1


def bias_of(store: Store) -> list[float]:
    """The bias of the last layer, of the logits without and with a click."""
    dense = np.empty(small_model().num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    return dense[-2:].tolist()


def log_odds() -> float:
    [rate] = rates_of(RARE[0], ())
    return float(np.log(rate / (1 - rate)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_all_workers_start_at_the_rate_of_worker_0(mode: str, num_servers: int) -> None:
    biases = []

    with cluster(num_servers=num_servers, num_workers=2) as servers:

        def work(worker: int) -> None:
            store = servers.client(joins=False)
            with worker_run(store, small_model(), job(mode), worker=worker, num_workers=2) as run:
                run.start(RARE[worker])
                biases.append(bias_of(store))
                run.train(RARE[worker])
                run.leave()

        together(lambda: work(0), lambda: work(1))

    # Of the first to come; the other one may have trained by then.
    assert [0.0, pytest.approx(log_odds())] in biases


def test_rate_of_the_job_is_taken_without_a_look_at_the_data() -> None:
    store = ParameterStore()
    with worker_run(store, small_model(), job("async", "train.base_rate=0.2")) as run:
        run.start(RARE[0])

        assert bias_of(store) == [0.0, pytest.approx(np.log(0.25))]


@pytest.mark.parametrize("first", ["load", "evaluate"])
def test_model_that_is_there_before_the_start_stays_as_it_is(first: str, tmp_path: Path) -> None:
    saved = ParameterStore()
    with worker_run(saved, small_model(), job("async", "train.base_rate=0.9")) as run:
        run.start()
        run.save(SaveRequest(url=str(tmp_path / "model")))
        before = bias_of(saved)

    store = ParameterStore(num_workers=2)

    def work(worker: int) -> None:
        with worker_run(store, small_model(), job("async"), worker=worker, num_workers=2) as run:
            if worker == 0 and first == "load":
                run.load(str(tmp_path / "model"))
            elif worker == 1 and first == "evaluate":
                run.evaluate(RARE[1])
            run.start(RARE[worker])
            run.leave()

    together(lambda: work(0), lambda: work(1))

    assert bias_of(store) == (before if first == "load" else [0.0, 0.0])


def test_next_job_goes_on_from_the_parameters_of_the_last_one() -> None:
    """Servers that stay keep them; the rate of its data is another one."""
    store = ParameterStore()

    def train(batches: list[Batch], *settings: str) -> None:
        with worker_run(store, small_model(), job("async", *settings)) as run:
            run.start(batches)
            run.leave()
        store.engine.begin_job()

    train(RARE[0])
    train(RARE[1])
    train(RARE[1], "train.base_rate=0.9")

    assert bias_of(store) == [0.0, pytest.approx(log_odds())]


def test_workers_agree_on_the_rate_of_the_job() -> None:
    store = ParameterStore(num_workers=2)
    other = job("async", "train.base_rate=0.2")

    with (
        worker_run(store, small_model(), job("async"), worker=0, num_workers=2),
        pytest.raises(JobError, match=r"train\.base_rate"),
    ):
        worker_run(store, small_model(), other, worker=1, num_workers=2)


def test_process_in_worker_0s_place_reads_no_rows_once_all_have_started() -> None:
    def rows() -> Iterator[Batch]:
        pytest.fail("they were read")
        yield

    waiting = job("async", "cluster.on_worker_loss=wait")
    with cluster(num_servers=1, num_workers=1) as servers:
        with worker_run(
            servers.client(joins=False), small_model(), waiting, is_in_process=False
        ) as lost:
            lost.start(RARE[0])
            lost.end_early()

        store = servers.client(joins=False)
        with worker_run(store, small_model(), waiting, is_in_process=False) as run:
            run.start(rows())
            assert bias_of(store) == [0.0, pytest.approx(log_odds())]
            run.leave()


def test_process_in_worker_0s_place_tells_the_rate_that_the_first_server_has_not() -> None:
    """The lost one came to the start at the second server, which let it pass, and not at the first."""
    waiting = job("async", "cluster.on_worker_loss=wait")
    with cluster(num_servers=2, num_workers=1) as servers:
        store = servers.client(joins=False)
        with worker_run(store, small_model(), waiting, is_in_process=False) as lost:
            member = lost._membership.member
            arrival = Barrier(name="start", member=member, step=0, number=1)
            store._transport.call(1, BARRIER, arrival).result()
            lost.end_early()

        store = servers.client(joins=False)
        with worker_run(store, small_model(), waiting, is_in_process=False) as run:
            assert run.is_repeating
            run.start(RARE[0])
            assert bias_of(store) == [0.0, pytest.approx(log_odds())]
            run.leave()


@pytest.mark.parametrize("mode", MODES)
def test_biases_that_a_warm_start_leaves_out_start_at_the_rate(mode: str, tmp_path: Path) -> None:
    url = str(tmp_path / "model")
    with worker_run(ParameterStore(), small_model(), job(mode, "train.base_rate=0.9")) as run:
        run.start()
        run.save(SaveRequest(url=url))
    store = ParameterStore(num_workers=2)
    tables = [table.name for table in small_model().tables]

    def work(worker: int) -> None:
        with worker_run(store, small_model(), job(mode), worker=worker, num_workers=2) as run:
            if worker == 0:
                run.load(url, only=tables, head=RARE[0])
            run.start(RARE[worker])
            run.leave()

    together(lambda: work(0), lambda: work(1))

    assert bias_of(store) == [0.0, pytest.approx(log_odds())]


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_rows_that_sampling_leaves_out_tell_the_rate_too(mode: str, tmp_path: Path) -> None:
    generate(tmp_path, rows=300, test_rows=100, files=2, test_files=1, seed=3)
    nothing = "{name='sgd', learning_rate=1e-30}"
    settings = (
        "model=lr",
        f"data.train={tmp_path}/train/part-*",
        "data.negative_rate=0.2",
        f"strategy.mode={mode}",
        f"optimizer.sparse={nothing}",
        f"optimizer.dense={nothing}",
    )
    store = ParameterStore()

    train_job(plan_of(override_job({}, settings, source="test")), store)

    files = sorted(tmp_path.glob("train/part-*"))
    labels = [line[0] == "1" for file in files for line in file.read_text().splitlines()]
    rate = (sum(labels) + 0.5) / (len(labels) + 1)
    dense = np.empty(14, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    assert dense[-1] == pytest.approx(np.log(rate / (1 - rate)), rel=1e-6)
