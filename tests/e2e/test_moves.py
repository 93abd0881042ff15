"""Servers come and go while real processes train, and are killed: the model stays that of a calm run.

CTR_PS_RANDOM_RUNS is the number of runs with moves and kills at random.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.extras.moves.move import connected, states_of
from ctr_ps.ps_worker.extras.moves.plan import with_server, without_server
from tests.e2e.test_recovery import LIMIT_S, Count, counters, figures, saving, wait_for_pushes
from tests.support.commands import COMMANDS, clean_environment, generated, run
from tests.support.crashed_moves import (
    STEPS,
    Crash,
    CrashingTransport,
    DriverKilledError,
    Plan,
    move,
    transport_by,
)
from tests.support.pusher import KEYS_A_PUSH, ON_THE_WAY
from tests.support.running_job import RunningJob, training
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANDOM_RUNS = int(os.environ.get("CTR_PS_RANDOM_RUNS", "1"))
EPOCHS = "6"
MANY, PACE_S = 1_000_000, 0.02  # pushes of a worker that counts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=20_000, test_rows=2_000, files=2)


def settings(data: Path, folder: Path) -> dict[str, str]:
    return {**saving(data, folder), "train.epochs": EPOCHS}


@pytest.fixture(scope="module")
def calm(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calm")
    with RunningJob(folder, training(settings(data, folder))) as job:
        return figures(job)


def finished(job: RunningJob) -> dict[str, Any]:
    """Waits for the end of a job some of whose servers were drained, and returns its figures."""
    codes = job.wait(*job.workers)
    assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
    result = job.result()
    return {name: result[name] for name in ("model_digest", "auc", "log_loss", "examples")}


def moved(job: RunningJob, *command: object) -> str:
    told = []
    for _ in range(3):  # a move that waits too long for processes that were killed is ended
        process = job.cluster(*command)
        output, _ = process.communicate(timeout=LIMIT_S)
        if process.returncode == 0:
            return output
        told.append(output)
    raise AssertionError(f"{command}: {told}\n{job.tails}")


def test_servers_that_come_and_go_leave_the_model_of_a_calm_run(
    data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(settings(data, tmp_path))) as job:
        job.wait_for_steps()
        assert "calls waited" in moved(job, "add", job.start_spare())
        job.restart("server.2")
        job.restart("worker.1")
        moved(job, "drain", 1)
        assert job.wait("server.1", limit_s=LIMIT_S) == {"server.1": 0}
        job.restart("server.0")
        job.restart("worker.0")
        moved(job, "replace", 2, job.start_spare())
        assert "2 servers" in moved(job, "status")
        assert finished(job) == calm


def test_an_added_server_that_is_started_without_its_log_is_waited_for(
    data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(settings(data, tmp_path))) as job:
        job.wait_for_steps()
        moved(job, "add", job.start_spare())
        job._update_logs = False
        job.restart("server.2")
        job.wait_for("server.2", "workers of a cluster call, but this server started empty")
        job.restart("worker.1")
        job.wait_for(
            "worker.1", f"{job.endpoints[2]} started empty, and waits to be added: stop it"
        )
        job._update_logs = True
        job.restart("server.2")
        assert finished(job) == calm


@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_moves_and_kills_at_random_leave_the_model_of_a_calm_run(
    seed: int, data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(settings(data, tmp_path))) as job:
        job.wait_for_steps()
        happened = disturbed(job, random.Random(seed))
        assert finished(job) == calm, "\n".join(happened)


@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_moves_and_kills_at_random_leave_counters_exact(seed: int, tmp_path: Path) -> None:
    with counting(tmp_path) as job:
        happened = disturbed(job, random.Random(seed))
        require_exact(job, "\n".join(happened))


def disturbed(job: RunningJob, chance: random.Random) -> list[str]:
    """Has five moves, and a process killed in each, while the job trains; returns what happened."""
    happened: list[str] = []
    in_map = {0: "server.0", 1: "server.1"}
    for _ in range(5):
        others = [index for index in in_map if index]
        kinds = ["add"] if not others else ["add", "drain", "replace"]
        kind = chance.choice(kinds if len(in_map) < 4 else ["drain", "replace"])
        command: list[object] = [kind]
        if kind != "add":
            command.append(chance.choice(others))
        if kind != "drain":
            command.append(job.start_spare())
        process = job.cluster(*command)
        time.sleep(chance.uniform(0, 2.0))
        victim = chance.choice([*in_map.values(), *job.workers, job.servers[-1], "driver"])
        if victim == "driver":
            process.kill()
        elif job.is_running("worker.0"):
            job.restart(victim)
        output = output_of(process, job)
        happened.append(f"{command}: kill {victim}: {process.returncode} {output[-300:]}")
        if not job.is_running("worker.0"):
            break
        in_map = _map_of(job, in_map)
    return happened


def output_of(process: subprocess.Popen[str], job: RunningJob) -> str:
    """Waits for the end of a command, but no longer than the job trains."""
    try:
        wait_until(
            lambda: process.poll() is not None or not job.is_running("worker.0"), 2 * LIMIT_S
        )
    finally:
        process.kill()
    return process.communicate()[0]


@contextmanager
def counting(folder: Path) -> Iterator[RunningJob]:
    """Two workers that count until they are told that it is enough; the test is the job's third."""
    command = [sys.executable, "-m", "tests.support.pusher", folder, MANY, PACE_S]
    with RunningJob(folder, command, num_workers=2, job_size=3) as job:
        for worker in range(2):
            wait_for_pushes(job, worker, 10)
        yield job


def require_exact(job: RunningJob, what: str) -> None:
    (job.folder / "enough").touch()
    codes = job.wait(*job.workers)
    assert set(codes.values()) == {0}, f"{codes}\n{what}\n{job.tails}"
    with connect(job.endpoints[:2]) as client:
        found = counters(client)
    count = Count()
    count.read(job.folder, len(job.workers))
    assert (count.acknowledged <= found).all(), what
    assert (found <= count.sent).all(), what  # more than acknowledged: of workers that were killed
    most = job.num_starts(*job.workers) - len(job.workers)
    assert count.sent.sum() - count.acknowledged.sum() <= most * ON_THE_WAY * KEYS_A_PUSH, what


def _map_of(job: RunningJob, before: dict[int, str]) -> dict[int, str]:
    process = job.cluster("status")
    output = output_of(process, job)
    if process.returncode:  # the job has ended meanwhile
        return before
    names = dict(zip(job.endpoints, job.servers, strict=True))
    found = re.findall(r"^server (\d+)  (\S+)", output, re.MULTILINE)
    return {int(index): names[endpoint] for index, endpoint in found}


POINTS = [(step, is_after) for step in STEPS for is_after in (False, True)]
VICTIMS = ("source", "target", "server.0", "driver", "worker.1")
CRASHES = [(*point, VICTIMS[number % len(VICTIMS)]) for number, point in enumerate(POINTS)]
OF_SYNC = [crash for number, crash in enumerate(CRASHES) if number % 4 in (0, 3)]
OF_COUNTERS = [crash for crash in CRASHES if crash not in OF_SYNC]
HALVES = [slice(None, 5), slice(5, None)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", HALVES)
def test_crashes_at_steps_of_moves_leave_the_model_of_a_calm_run(
    half: slice, data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(settings(data, tmp_path))) as job:
        job.wait_for_steps()
        crash_at_each(job, OF_SYNC[half])
        assert finished(job) == calm


@pytest.mark.timeout(600)
@pytest.mark.parametrize("half", HALVES)
def test_crashes_at_steps_of_moves_leave_counters_exact(half: slice, tmp_path: Path) -> None:
    with counting(tmp_path) as job:
        crash_at_each(job, OF_COUNTERS[half])
        require_exact(job, str(OF_COUNTERS[half]))


def crash_at_each(job: RunningJob, crashes: Sequence[tuple[str, bool, str]]) -> None:
    """Has a server added, or another drained, for each crash; the move is given again until it is done."""
    shard_map = ShardMap.of(2, tuple(job.endpoints))
    for step, is_after, victim in crashes:
        source, *rest = shard_map.servers[1:]
        if rest:
            plan = partial(without_server, server=source)
            target = shard_map.endpoint_of(rest[0])
        else:
            with stopped(job):
                target = started_spare(job)
            plan = partial(with_server, endpoint=target)
        names = dict(zip(job.endpoints, job.servers, strict=True))
        victims = {"source": names[shard_map.endpoint_of(source)], "target": names[target]}
        name = victims.get(victim, victim)
        what = f"{step}, {'after' if is_after else 'before'}: {victim}"
        crash = Crash(step, is_after=is_after)
        until = time.monotonic() + LIMIT_S
        while not crash.has_happened:  # on a busy machine a move may take too long
            assert time.monotonic() < until, f"nothing was killed: {what}\n{job.tails}"
            transport = CrashingTransport(transport_by(shard_map), crash)
            crash.kill = transport.dies if name == "driver" else partial(job.restart, name)
            with closing(transport), suppress(CtrPsError, DriverKilledError):
                move(transport, plan, shard_map.epoch)
        shard_map = given_again(job, shard_map, plan, what)
        assert job.is_running("worker.0"), f"the job was over before {what}\n{job.tails}"


def started_spare(job: RunningJob) -> str:
    endpoint = job.start_spare()
    job.wait_for(job.servers[-1], " serving ")
    return endpoint


def given_again(job: RunningJob, before: ShardMap, plan: Plan, what: str) -> ShardMap:
    """Returns the map after the move, which all its servers have."""
    until = time.monotonic() + LIMIT_S
    while True:
        with closing(transport_by(before)) as transport:
            with stopped(job):
                wait_until(partial(has_no_move, transport), LIMIT_S)
            try:
                after = move(transport, plan, before.epoch)
            except CtrPsError:
                assert time.monotonic() < until, f"{what}\n{job.tails}"
                continue
            assert after.epoch == before.epoch + 1, what
            states = states_of(transport)
            if all(each.shard_map == after and not each.move for each in states.values()):
                return after


def has_no_move(transport: GrpcTransport) -> bool:
    try:
        transport.use(connected(transport))
        return not any(each.move for each in states_of(transport).values())
    except CtrPsError:  # of a server that starts
        return False


@contextmanager
def stopped(job: RunningJob) -> Iterator[None]:
    """Has no worker train meanwhile, so that the job is not over too soon."""
    for worker in job.workers:
        job.pause(worker)
    try:
        yield
    finally:
        for worker in job.workers:
            job.resume(worker)


class Launched:
    """A job of the launcher, with a server that waits to be added; starting it again goes on."""

    def __init__(self, data: Path, folder: Path, num_servers: int) -> None:
        self.log = folder / "log"
        self._environment = {**clean_environment(), "CTR_PS_TOKEN": "a-token-of-this-test"}
        options = [f"--server-num={num_servers}", "--worker-num=2", "--spare-num=1", "--json"]
        options += [f"--log-dir={self.log}", "--durability=log", "--max-restarts=1"]
        job = training(settings(data, folder))[2:]
        self._command = [str(COMMANDS / "ps-launch"), *options, *map(str, job)]
        self._out, self._err = folder / "out", folder / "err"

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        with self._out.open("wb") as output, self._err.open("wb") as error:
            launch = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=error
            )
        try:
            yield launch
        finally:
            launch.kill()
            launch.wait()

    def endpoints(self) -> tuple[str, str]:
        """Waits until it trains, and returns the endpoints of server 0 and the spare."""
        self.wait_for("trainer.0", " step=")
        said = re.search(r"servers ([^,]+)\S*, workers: 2, spares (\S+),", self._err.read_text())
        assert said is not None
        return said[1], said[2]

    def moved(self, *command: object) -> None:
        done = run("ps-cluster", *map(str, command), environment=self._environment)
        assert done.returncode == 0, done.stdout + done.stderr

    def wait_for(self, name: str, text: str) -> None:
        log = self.log / f"{name}.log"
        wait_until(lambda: log.exists() and text in log.read_text(), LIMIT_S)

    def digest(self, launch: subprocess.Popen[bytes]) -> str:
        assert launch.wait(LIMIT_S) == 0, self._err.read_text()[-3000:]
        return str(json.loads(self._out.read_text().splitlines()[-1])["model_digest"])


def test_a_spare_of_the_launcher_is_added(data: Path, tmp_path: Path, calm: dict[str, Any]) -> None:
    job = Launched(data, tmp_path, num_servers=1)
    with job.started() as launch:
        server, spare = job.endpoints()
        job.moved(server, "add", spare)
        assert job.digest(launch) == calm["model_digest"]
    assert "worker 0 left" in (job.log / "spare.0.log").read_text()


def test_a_launcher_that_is_killed_as_a_drained_server_ends_goes_on_without_that(
    data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    job = Launched(data, tmp_path, num_servers=2)
    with job.started() as launch:
        server, spare = job.endpoints()
        job.moved(server, "add", spare)
        job.moved(server, "drain", 1)
        job.wait_for("pserver.1", "ended reason='its shards have moved")
        launch.kill()
    ended = (job.log / "pserver.1.log").stat().st_mtime_ns
    with job.started() as launch:
        assert job.digest(launch) == calm["model_digest"]
    assert (job.log / "pserver.1.log").stat().st_mtime_ns == ended
    assert re.search(r" serving server=2 servers=\S+,\S+ ", (job.log / "spare.0.log").read_text())
