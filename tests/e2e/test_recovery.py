"""Processes that are killed, paused and started again: the model is that of a run that nothing disturbed.

CTR_PS_RANDOM_RUNS is the number of runs of each kind whose processes are killed and paused at random.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from threading import Timer
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.store import Missing, SaveRequest
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect
from tests.support import pusher
from tests.support.commands import generated, run
from tests.support.disks import mounting_at
from tests.support.running_job import LIMIT_S, RunningJob, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RANDOM_RUNS = int(os.environ.get("CTR_PS_RANDOM_RUNS", "1"))
NUM_KILLS = 4
LONGEST_PAUSE_S = 2.5
EPOCHS, ROWS = 2, 20_000
LEASE_S = 1.5
LONG_LEASE_S = 600.0  # nobody is lost by it
STOPPED_S = 4.0  # longer than a lease
LONG_STOP_S = 10.0
SOON_S = 40.0  # for a process that ends by itself once it has started, on a busy machine
SAME = ("model_digest", "auc", "log_loss", "examples")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=ROWS, test_rows=2_000, files=2)


def settings_of(
    data: Path, mode: str = "sync", on_worker_loss: str = "wait", **others: str
) -> dict[str, str]:
    """Returns settings of a job; in those of `others` a double underscore is a dot."""
    return {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "model.hidden": "[16]",
        "train.batch_size": "32",
        "train.epochs": str(EPOCHS),
        "train.log_every_s": "0.1",
        "strategy": f"{{mode='{mode}'}}",
        "cluster.lease_s": str(LEASE_S),
        "cluster.on_worker_loss": on_worker_loss,
        **{name.replace("__", "."): value for name, value in others.items()},
    }


def saving(data: Path, folder: Path) -> dict[str, str]:
    """Returns settings of a job that saves deltas within its epochs."""
    return settings_of(
        data,
        model__name="wide_deep",
        train__row_dtype="{embedding='bfloat16'}",
        checkpoint__dir=str(folder / "checkpoints"),
        checkpoint__every_steps="40",
        checkpoint__mode="delta",
        checkpoint__keep_last="3",
    )


def figures(job: RunningJob) -> dict[str, Any]:
    """Waits for the end of a job without an error, and returns what must not depend on faults."""
    codes = job.wait()
    assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
    result = job.result()
    return {name: result[name] for name in SAME}


@contextmanager
def stopped(job: RunningJob, name: str, seconds: float) -> Iterator[None]:
    """Pauses a process; it goes on after some time, while the block runs, unless that has ended before."""
    timer = Timer(seconds, job.resume, [name])
    job.pause(name)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def segments(job: RunningJob, server: str) -> list[Path]:
    return sorted(job.update_log(server).glob("segment-*"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Figures of a run that nothing disturbs; the update logs of its servers are gone when it is over."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with RunningJob(folder, training(saving(data, folder))) as job:
        result = figures(job)
        assert [segments(job, server) for server in job.servers] == [[], []]
    return result


# Synchronous training: the same model


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_processes_killed_and_paused_at_random_moments_do_not_change_the_model(
    seed: int, data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    random = Random(seed)
    faults, suffered = random.sample([*["kill"] * NUM_KILLS, "pause"], NUM_KILLS + 1), []
    with RunningJob(tmp_path, training(saving(data, tmp_path))) as job, ExitStack() as pauses:
        job.wait_for_steps()
        for fault in faults:
            time.sleep(random.uniform(0, LONGEST_PAUSE_S))  # the moment is what is at random
            if not job.are_all_running:
                break
            name = random.choice([*job.servers, *job.workers])
            suffered.append((fault, name))
            if fault == "kill":
                job.restart(name)
            else:
                pauses.enter_context(stopped(job, name, LONG_STOP_S))

        assert undisturbed == figures(job), f"seed {seed}: {suffered}"


def test_paused_processes_do_not_change_the_model(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(saving(data, tmp_path))) as job:
        job.wait_for_steps()

        job.pause("worker.1")
        job.wait_for("server.0", "worker 1 is lost")
        job.resume("worker.1")
        job.wait_for("server.0", "worker 1 is back")
        job.pause("server.1")
        time.sleep(STOPPED_S)
        job.resume("server.1")

        assert undisturbed == figures(job)


def test_killed_workers_leave_validations_as_they_are(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    validating = {"data.valid": f"{data}/test/part-*", "valid.every_steps": "100"}
    results = []
    for name, kills in (("calm", []), ("killed", ["worker.0", "worker.1", "worker.0"])):
        folder = tmp_path / name
        folder.mkdir()
        with RunningJob(folder, training({**saving(data, folder), **validating})) as job:
            for victim in kills:
                job.wait_for_steps()
                job.restart(victim)
            assert figures(job) == undisturbed
            result = job.result()
            best = {**result["best"], "checkpoint": Path(result["best"]["checkpoint"]).name}
            results.append((result["validations"], best))
            assert (folder / "checkpoints/BEST").read_text().strip() == best["checkpoint"]

    assert len(results[0][0]) > EPOCHS
    assert results[0] == results[1]


def test_server_that_was_told_to_end_goes_on_when_it_is_started_again(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(saving(data, tmp_path))) as job:
        job.wait_for_steps()

        job.processes["server.0"].send_signal(signal.SIGTERM)
        assert job.wait("server.0", limit_s=SOON_S) == {"server.0": 0}
        assert segments(job, "server.0")
        job.start("server.0")

        assert undisturbed == figures(job)


def test_server_whose_disk_is_full_goes_on_when_there_is_room(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    disk = tmp_path / "server.1.updates"
    disk.mkdir()
    with mounting_at(disk) as mount:
        mount("size=1m")
        with RunningJob(tmp_path, training(saving(data, tmp_path))) as job:
            assert job.wait("server.1", limit_s=SOON_S) == {"server.1": 13}
            assert "No space left on device" in job.error("server.1")
            mount("size=200m")
            job.start("server.1")

            assert undisturbed == figures(job)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_log_without_its_end_ends_the_job(mode: str, data: Path, tmp_path: Path) -> None:
    """As after a machine that goes down with `--log-sync os`: workers know what was acknowledged."""
    with RunningJob(tmp_path, training(settings_of(data, mode, train__epochs="20"))) as job:
        job.wait_for_steps()
        joined = segments(job, "server.1")[-1].stat().st_size
        job.wait_for("worker.0", r" step=\d{3,} ")
        job.kill("server.1")
        last = segments(job, "server.1")[-1]
        os.truncate(last, (joined + last.stat().st_size) // 2)

        job.start("server.1")
        codes = job.wait(*job.workers, limit_s=SOON_S)

        assert set(codes.values()) <= {10, 12}, f"{codes}\n{job.tails}"
        assert ["are lost: " in job.error(worker) for worker in job.workers] == [True, True]


def test_workers_that_were_told_to_end_free_their_places(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Each, and all at once, as when a cluster moves all pods of a job: the servers have what was trained."""
    settings = saving(data, tmp_path) | {"cluster.lease_s": str(LONG_LEASE_S)}
    with RunningJob(tmp_path, training(settings)) as job:
        for ended in (["worker.0"], ["worker.1"], job.workers):
            job.wait_for_steps()
            for worker in ended:
                job.processes[worker].send_signal(signal.SIGTERM)
            assert set(job.wait(*ended, limit_s=SOON_S).values()) == {143}, job.tails
            assert all("Traceback" not in job.log(worker) for worker in ended), job.tails
            for worker in ended:
                job.start(worker)

        assert undisturbed == figures(job)


def test_second_process_of_a_living_worker_is_refused(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(saving(data, tmp_path))) as job:
        job.wait_for_steps()

        job.start("twin.1")
        codes = job.wait("twin.1", limit_s=SOON_S)

        assert codes == {"twin.1": 10}
        assert "two processes have PADDLE_TRAINER_ID=1" in job.error("twin.1")
        del job.processes["twin.1"]
        assert undisturbed == figures(job)


# Other modes: every example at least once


@pytest.mark.parametrize("mode", ["half_async", "async", "geo"])
def test_killed_processes_lose_no_examples(mode: str, data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, mode)
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for_steps()

        job.restart("worker.1")
        job.wait_for("worker.0", r" step=\d+ ")
        job.restart("server.0")
        job.wait_for("worker.1", r" step=\d+ ")
        job.restart("worker.0")

        codes = job.wait()
        assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
        result = job.result()
        assert result["examples"] >= EPOCHS * ROWS
        assert all(math.isfinite(result[name]) for name in ("auc", "log_loss", "train_loss"))


# Workers that are lost for good


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_others_continue_without_a_lost_worker(mode: str, data: Path, tmp_path: Path) -> None:
    with RunningJob(tmp_path, training(settings_of(data, mode, "continue"))) as job:
        job.wait_for_steps()

        job.kill("worker.1")

        codes = job.wait("worker.0", *job.servers)
        assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
        assert job.result()["examples"] >= EPOCHS * ROWS // 2
        assert job.result()["lost_workers"] == [1]
        assert "workers [1] were lost" in job.log("worker.0")


WHY = ("lost", "lease", "cluster.retry_s")


def allowed_codes(name: str, fault: str, lost: str) -> set[int]:
    """Returns how a process may end, in a job that continues without `lost`, unless that is worker 0."""
    if fault == "kill":
        return {-signal.SIGKILL} if name == lost else {0}
    if lost == "worker.0":
        return {12}
    if name == lost and name.startswith("worker"):
        return {10, 4}  # refused; or the others have finished, and the servers are gone
    return {0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_random_loss_leaves_a_whole_model_or_ends_the_job(
    fault: str, seed: int, data: Path, tmp_path: Path
) -> None:
    """Whatever is lost, each process ends by itself, and says why if it has failed."""
    random = Random(seed)
    settings = {
        **saving(data, tmp_path),
        "cluster.on_worker_loss": "continue",
        "cluster.retry_s": str(3 * LONG_STOP_S),
    }
    with RunningJob(tmp_path, training(settings), num_workers=3) as job, ExitStack() as pauses:
        job.wait_for_steps()
        time.sleep(random.uniform(0, LONGEST_PAUSE_S))
        if fault == "kill":
            lost = random.choice(job.workers[1:])
            job.kill(lost)
        else:
            lost = random.choice([*job.servers, *job.workers])
            pauses.enter_context(stopped(job, lost, LONG_STOP_S))

        codes = job.wait(limit_s=LIMIT_S + LONG_STOP_S)

        what = f"seed {seed}: {fault} {lost}: {codes}\n{job.tails}"
        for name, code in codes.items():
            assert code in allowed_codes(name, fault, lost), what
            assert "Traceback" not in job.log(name), what
            assert code <= 0 or any(word in job.error(name) for word in WHY), what
        if (tmp_path / "checkpoints/LATEST").exists():  # else the job ended before the first
            checkpoints = run("ps-ckpt", "verify", tmp_path / "checkpoints", "--all")
            assert checkpoints.returncode == 0, f"{checkpoints.stdout}{checkpoints.stderr}{what}"
        if codes["worker.0"] == 0:
            steps = [job.wait_for(name, r"worker 0 left step=(\d+)")[1] for name in job.servers]
            assert len(set(steps)) == 1, what
            lost_workers = [int(lost[-1])] if lost in job.workers else []
            num_left = 3 - len(lost_workers)
            result = job.result()
            assert result["lost_workers"] == lost_workers, what
            assert EPOCHS * ROWS * num_left // 3 <= result["examples"] <= EPOCHS * ROWS, what
            assert (num_left < 3) == (result["examples"] < EPOCHS * ROWS), what
            assert math.isfinite(result["log_loss"]), what


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_others_continue_without_a_worker_that_was_told_to_end(
    mode: str, data: Path, tmp_path: Path
) -> None:
    settings = settings_of(data, mode, "continue", cluster__lease_s=str(LONG_LEASE_S))
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for_steps()

        job.processes["worker.1"].send_signal(signal.SIGTERM)

        assert job.wait() == dict.fromkeys(job.processes, 0) | {"worker.1": 143}, job.tails
        assert job.result()["examples"] >= EPOCHS * ROWS // 2
        assert "worker 1 left" in job.log("server.0")


def test_job_ends_with_the_first_worker_if_it_is_told_to_end(data: Path, tmp_path: Path) -> None:
    settings = settings_of(data, "sync", "continue", cluster__lease_s=str(LONG_LEASE_S))
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for_steps()

        job.processes["worker.0"].send_signal(signal.SIGTERM)
        codes = job.wait(*job.workers, limit_s=SOON_S)

        assert codes == {"worker.0": 143, "worker.1": 12}, job.tails
        assert "worker 0 aborted the job: it was told to stop (SIGTERM)" in job.error("worker.1")


@pytest.mark.parametrize(
    ("on_worker_loss", "lost", "reason"),
    [
        ("continue", "worker.0", "and the job cannot continue without worker 0"),
        ("fail", "worker.1", r"no call from workers [1] for 1.5 s"),
    ],
)
def test_job_ends_without_a_worker_that_it_needs(
    on_worker_loss: str, lost: str, reason: str, data: Path, tmp_path: Path
) -> None:
    with RunningJob(tmp_path, training(settings_of(data, "sync", on_worker_loss))) as job:
        job.wait_for_steps()
        (survivor,) = set(job.workers) - {lost}

        job.kill(lost)
        codes = job.wait(survivor, limit_s=LEASE_S + SOON_S)

        assert {survivor: 12} == codes, job.tails
        assert reason in job.error(survivor)
        assert f"workers [{lost[-1]}]" in job.error(survivor)


# Servers that are away


def test_server_that_is_away_for_longer_than_a_lease_loses_no_worker(
    data: Path, tmp_path: Path
) -> None:
    settings = settings_of(data, "sync", "fail")
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for_steps()

        job.kill("server.0")
        time.sleep(STOPPED_S)
        job.start("server.0")

        codes = job.wait()
        assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
        assert job.result()["examples"] == EPOCHS * ROWS


@pytest.mark.timeout(300)
def test_job_whose_server_stayed_away_goes_on_when_all_are_started_again(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    settings = saving(data, tmp_path) | {"cluster.retry_s": "3"}
    with RunningJob(tmp_path, training(settings)) as job:
        job.wait_for_steps()

        job.kill("server.1")
        codes = job.wait(*job.workers, "server.0", limit_s=3 + SOON_S)

        # The first to give up tells the other one, by the server that is left.
        assert codes["server.0"] == 12
        assert {codes[worker] for worker in job.workers} <= {4, 12}, f"{codes}\n{job.tails}"
        for worker in job.workers:
            error = job.error(worker)
            assert job.endpoints[1] in error
            assert "times in 3 s, cluster.retry_s" in error
            calls = ("PushPull", "PushGrad", "PullSparse", "PullDense", "Renew")
            assert any(call in error for call in calls)
        assert "start all servers and workers again" in job.error("server.0")
        assert f"kept for a restart folder={job.update_log('server.0')}" in job.log("server.0")

        for name in (*job.servers, *job.workers):
            job.start(name)
        assert undisturbed == figures(job)


# Pushes on arrival: each exactly once


def numbers_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()]


def added_by(worker: int, sequences: list[int]) -> np.ndarray:
    """Returns how much pushes of a worker add to each counter: float64[NUM_KEYS]."""
    added = np.zeros(pusher.NUM_KEYS)
    for sequence in sequences:
        added[pusher.keys_of(worker, sequence).astype(np.int64)] += 1
    return added


class Count:
    """Bounds of each counter, by what the pushers have noted.

    Attributes:
        acknowledged: What was acknowledged.
        sent: What was sent.
    """

    def __init__(self) -> None:
        self.acknowledged = np.zeros(pusher.NUM_KEYS)
        self.sent = np.zeros(pusher.NUM_KEYS)

    def read(self, folder: Path, num_workers: int) -> None:
        """Adds what pushers of a job have noted in a folder."""
        for worker in range(num_workers):
            self.acknowledged += added_by(worker, numbers_in(folder / f"{worker}.acknowledged"))
            self.sent += added_by(worker, numbers_in(folder / f"{worker}.sent"))


NUM_PUSHERS, NUM_PUSHES = 3, 900


@contextmanager
def pushing(folder: Path, **settings: Any) -> Iterator[RunningJob]:
    """Pushers whose requests and replies are lost and duplicated; the test is the last worker of the job."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.support.pusher", folder, NUM_PUSHES]
    with RunningJob(
        folder,
        command,
        num_workers=NUM_PUSHERS,
        job_size=NUM_PUSHERS + 1,
        **settings,
    ) as job:
        yield job


def wait_for_pushes(job: RunningJob, worker: int, number: int) -> None:
    file, end = job.folder / f"{worker}.acknowledged", time.monotonic() + pusher.LEASE.seconds + 60
    while not file.exists() or len(numbers_in(file)) < number:
        assert time.monotonic() < end, job.tails
        assert job.is_running(f"worker.{worker}"), job.tails
        time.sleep(0.02)


def counters(client: ClusterClient) -> np.ndarray:
    client.create_table(pusher.COUNTERS)
    keys = {pusher.COUNTERS.name: np.arange(pusher.NUM_KEYS, dtype=np.uint64)}
    rows = client.pull_sparse(keys, missing=Missing.ZEROS).result().rows
    return rows[pusher.COUNTERS.name][:, 0].astype(np.float64)


def test_each_push_is_applied_exactly_once(tmp_path: Path) -> None:
    count, saved = Count(), tmp_path / "saved"
    with pushing(tmp_path / "first") as job:
        wait_for_pushes(job, 0, 200)
        job.restart("server.0")
        wait_for_pushes(job, 1, 400)
        job.restart("server.1")
        wait_for_pushes(job, 2, 600)
        job.kill("worker.2")
        with connect(job.endpoints) as client:
            client.join(NUM_PUSHERS, 1, terms={}, lease=pusher.LEASE).result()
            client.create_table(pusher.COUNTERS)
            job.restart("server.0")
            assert {0} == set(job.wait("worker.0", "worker.1").values()), job.tails
            client.save(SaveRequest(url=str(saved)))
            first = counters(client)
    count.read(job.folder, NUM_PUSHERS)

    assert (count.acknowledged <= first).all()
    assert (first <= count.sent).all()
    assert count.sent.sum() - count.acknowledged.sum() <= pusher.ON_THE_WAY * pusher.KEYS_A_PUSH

    second = Count()
    with pushing(tmp_path / "second", num_servers=3, server_options=["--load", str(saved)]) as job:
        for worker, server in enumerate(job.servers):
            wait_for_pushes(job, worker, 200 + 200 * worker)
            job.restart(server)
        assert {0} == set(job.wait(*job.workers).values()), job.tails
        with connect(job.endpoints) as client:
            last = counters(client)
    second.read(job.folder, NUM_PUSHERS)

    assert (second.acknowledged == second.sent).all()
    assert (last == first + second.acknowledged).all()
