"""Schedules, weight decay, clipping, dropout: one job in every mode, with any workers, and resumed."""

import re
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.store import Missing, SaveRequest, Store
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from tests.support.cluster import cluster
from tests.support.training import (
    job,
    random_batches,
    small_model,
    together,
    train_worker,
    train_workers,
    worker_run,
)

NUM_BATCHES = 12
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.1}",
)
COSINE = "optimizer.schedule={kind='cosine', warmup_steps=5, total_steps=22, end_factor=0.125}"
KNOBS = (COSINE, "train.weight_decay=0.01", "train.clip_norm=0.05")
MODES = ["sync", "half_async", "async", "bounded_staleness", "geo"]
DATA = [random_batches(NUM_BATCHES, 16, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Workers would wait for each other's first batches while these compile."""
    train_worker(ParameterStore(), DATA[0][:1], job("sync", *KNOBS, "train.dropout=0.25"))


def trained(settings: Job, data: list[list[Batch]]) -> ParameterStore:
    store = ParameterStore(num_workers=len(data), wait_limit_s=30)
    train_workers([store] * len(data), data, settings, is_in_process=True)
    return store


def dense_of(store: Store) -> np.ndarray:
    dense = np.empty(small_model().num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    return dense


@pytest.mark.parametrize(
    ("thread_num", "lengths", "more"),
    [
        (1, (12, 12), ()),
        (2, (12, 12), ()),
        (1, (9, 4), ()),
        (1, (0, 5), ()),
        (1, (5, 0), ()),
        (1, (12, 12), ("train.row_dtype=bfloat16",)),
        (2, (9, 4), ("train.row_dtype=bfloat16",)),
    ],
)
def test_synchronous_digest_is_the_same_on_any_servers_and_in_process(
    thread_num: int, lengths: tuple[int, int], more: tuple[str, ...]
) -> None:
    """Also of workers with unequal data, or none, and of rows that are rounded at random."""
    knobs = (*KNOBS, *more)
    settings = job("sync", f"train.thread_num={thread_num}", "train.dropout=0.25", *knobs)
    data = [batches[:length] for batches, length in zip(DATA, lengths, strict=True)]
    digests = {trained(settings, data).digest()}

    for num_servers in (1, 2, 3):
        with cluster(num_servers=num_servers, num_workers=2) as servers:
            clients = [servers.client(joins=False) for _ in data]
            train_workers(clients, data, settings)
            digests.add(clients[0].digest())
            assert clients[0].status().batches == sum(lengths)

    assert len(digests) == 1


def test_workers_and_threads_go_through_the_same_rates() -> None:
    dealt = [batch for pair in zip(*DATA, strict=True) for batch in pair]

    workers = trained(job("sync", *KNOBS), DATA)
    threads = trained(job("sync", "train.thread_num=2", *KNOBS), [dealt])

    assert workers.digest() == threads.digest()
    assert workers.status().batches == threads.status().batches == 2 * NUM_BATCHES


def test_servers_keep_bfloat16_in_geo_training() -> None:
    store = trained(job("geo", "train.row_dtype=bfloat16"), DATA[:1])

    rows = parameters_of(store)[small_model().num_params :]
    assert rows.any()
    assert not (rows.view(np.uint32) & np.uint32(0xFFFF)).any()


def test_two_workers_learn_what_one_learns_with_a_double_batch() -> None:
    double = [joined(pair) for pair in zip(*DATA, strict=True)]
    num_params = small_model().num_params

    two, one = (parameters_of(trained(job("sync", *SGD), data)) for data in (DATA, [double]))

    for part in (slice(None, num_params), slice(num_params, None)):
        assert np.abs(two[part] - one[part]).max() <= 1e-5 * np.abs(one[part]).max()


def test_one_worker_learns_the_same_in_all_modes_that_apply_batch_by_batch() -> None:
    digests = {
        trained(job(mode, *KNOBS), DATA[:1]).digest() for mode in ("sync", "half_async", "async")
    }

    assert len(digests) == 1


def test_workers_leave_out_what_is_their_own() -> None:
    """They number their batches alike: by the same masks, on the same data, two learn what one does."""
    settings = job("sync", *SGD, "train.dropout=0.5")

    alike = [trained(settings, [DATA[0]] * num_workers) for num_workers in (1, 2)]

    assert np.abs(dense_of(alike[0]) - dense_of(alike[1])).max() > 1e-3


def test_geo_follows_the_schedule_on_its_replica() -> None:
    local = trained(job("async", *SGD, *KNOBS), DATA[:1])
    exchanged = trained(job("geo", "strategy.geo.k_steps=4", *SGD, *KNOBS), DATA[:1])

    np.testing.assert_allclose(dense_of(exchanged), dense_of(local), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_learnt_after_a_schedule_has_come_to_0(mode: str, num_workers: int) -> None:
    total = num_workers * NUM_BATCHES
    linear = f"optimizer.schedule={{kind='linear', warmup_steps=2, total_steps={total}}}"
    settings = job(mode, linear, "train.weight_decay=0.01")
    store = ParameterStore(num_workers=num_workers, wait_limit_s=30)
    seen: list[np.ndarray] = []

    def work(worker: int) -> None:
        with worker_run(
            store,
            small_model(),
            settings,
            worker=worker,
            num_workers=num_workers,
            is_in_process=False,
        ) as run:
            run.start()
            for _ in range(3):
                if worker == 0:
                    seen.append(parameters_of(store))
                run.barrier()
                if len(seen) < 3:
                    run.train(DATA[worker])
                run.barrier()

    together(*(lambda worker=worker: work(worker) for worker in range(num_workers)))

    initial, at_the_end, beyond_it = seen
    assert store.status().batches == 2 * total
    assert np.abs(at_the_end - initial).max() > 0.01
    # In GEO replicas add and subtract what they exchange, which rounds.
    np.testing.assert_allclose(beyond_it, at_the_end, rtol=0, atol=1e-6 if mode == "geo" else 0)


def parameters_of(store: Store) -> np.ndarray:
    keys = np.unique(np.concatenate([batch.keys for data in DATA for batch in data]))
    rows = store.pull_sparse({"embedding": keys}, missing=Missing.INITIAL).result().rows
    return np.concatenate([dense_of(store), rows["embedding"].reshape(-1)])


def test_resumed_run_goes_on_in_its_schedule(tmp_path: Path) -> None:
    """In another mode than it was in, in which the version counts other things."""
    knobs = [*SGD, *KNOBS, "train.dropout=0.25"]
    expected = trained(job("async", *knobs), DATA[:1])
    first, second = DATA[0][: NUM_BATCHES // 2], DATA[0][NUM_BATCHES // 2 :]
    store = trained(job("sync", *knobs), [first])
    store.save(SaveRequest(url=str(tmp_path / "saved")))
    manifest = Checkpoint.open(tmp_path / "saved").manifest

    resumed = ParameterStore()
    with worker_run(resumed, small_model(), job("async", *knobs)) as run:
        run.load(str(tmp_path / "saved"))
        run.resume(manifest.version, manifest.workers, batches=manifest.batches)
        run.train(second)

    assert resumed.digest() == expected.digest()
    assert resumed.status().batches == NUM_BATCHES


def test_line_of_progress_has_the_rates_and_an_end_at_0_is_warned_of_once(caplog) -> None:
    caplog.set_level("INFO")
    knobs = [
        "optimizer.sparse.schedule={kind='linear', total_steps=8}",
        "optimizer.dense.schedule={kind='step', step_size=1000, gamma=0.5}",
        "train.log_every_s=1e-9",
    ]

    trained(job("sync", *knobs), DATA[:1])

    found = re.findall(r"step=(\d+) .* rates=(\S+)", caplog.text)
    assert found[3] == ("4", "embedding:0.025,dense:0.001")
    assert found[-1] == ("12", "embedding:0,dense:0.001")
    [told] = [each for each in caplog.messages if "learning rate 0" in each]
    assert told.startswith(
        "embedding is no longer trained: by its schedule it has learning rate 0 after 9 batches of all "
        "workers"
    )


def test_each_batch_has_a_mask_of_its_own() -> None:
    """At a rate of 0 the same batch has the same loss, but for what is left out of it."""
    still = [f"optimizer.{part}={{name='sgd', learning_rate=0}}" for part in ("sparse", "dense")]
    losses = {}
    for dropout in (0.0, 0.5):
        settings = job("sync", *still, f"train.dropout={dropout}")
        with worker_run(ParameterStore(), small_model(), settings) as run:
            losses[dropout] = [step.loss for step in run.steps([DATA[0][0]] * 4)]

    assert len(set(losses[0.0])) == 1
    assert len(set(losses[0.5])) == 4
