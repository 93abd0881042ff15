"""A rolling upgrade: processes are replaced by those of the next release while training runs."""

import json
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.format import FORMAT
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.rpc.journal import RESUMED, STATE
from ctr_ps.ps_worker.cluster.connect import connect
from tests.e2e.test_recovery import NUM_PUSHERS, Count, counters, pushing, wait_for_pushes
from tests.support.commands import generated
from tests.support.running_job import RunningJob, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 40.0  # for a process that ends by itself once it has started, on a busy machine
SAME = ("model_digest", "auc", "log_loss", "examples")
ENDED_WELL = {0, 143}  # of a server and a worker after SIGTERM


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=24_000, test_rows=2_000, files=2)


def settings_of(data: Path, folder: Path) -> dict[str, str]:
    return {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "model.name": "wide_deep",
        "model.hidden": "[16]",
        "train.batch_size": "32",
        "train.epochs": "2",
        "train.log_every_s": "0.1",
        "strategy": "{mode='sync'}",
        "cluster.lease_s": "1.5",
        "cluster.on_worker_loss": "wait",
        "checkpoint.dir": str(folder / "checkpoints"),
        "checkpoint.every_steps": "40",
        "checkpoint.mode": "delta",
        "checkpoint.keep_last": "3",
    }


def job_of(data: Path, folder: Path) -> RunningJob:
    return RunningJob(folder, training(settings_of(data, folder)))


def figures(job: RunningJob) -> dict[str, Any]:
    """Waits for the end of a job without an error, and returns what must not depend on upgrades."""
    codes = job.wait()
    assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
    return {name: job.result()[name] for name in SAME}


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with job_of(data, tmp_path_factory.mktemp("undisturbed")) as job:
        return figures(job)


def replace(job: RunningJob, name: str, release: str | None, *, kills: bool = False) -> None:
    """Replaces a process by one of a release, None: the present one, and waits until all train again."""
    if kills:
        job.kill(name)
    else:
        job.processes[name].send_signal(signal.SIGTERM)
        assert set(job.wait(name, limit_s=SOON_S).values()) <= ENDED_WELL, job.tails
    start(job, name, release)
    if name in job.servers:
        job.wait_for(name, "recovered ")
        job.wait_for(name, "saved folder=")  # by calls that come after the recovery: all train
    else:
        job.wait_for(name, r" step=\d+ ")


def start(job: RunningJob, name: str, release: str | None) -> None:
    job.releases.pop(name, None)
    if release is not None:
        job.releases[name] = release
    job.start(name)


def written_in(job: RunningJob, server: str) -> list[int]:
    """Returns the formats that the log of a killed server names, in the order of its records."""
    with closing(read_log(job.update_log(server))) as saved:
        heads = [saved.head(segment)[0] for segment in saved.segments]
        records = [*heads, *saved.records_from(saved.segments[0])]
    said = [each for each in records if each.kind in (STATE, RESUMED)]
    return [json.loads(bytes(each.payload))["format"] for each in said]


SERVERS_FIRST = ("server.0", "server.1", "worker.0", "worker.1")
MIXED = ("worker.1", "server.0", "worker.0", "server.1")


@pytest.mark.parametrize("order", [SERVERS_FIRST, MIXED], ids=["servers-first", "mixed"])
def test_upgrade_does_not_change_the_model(
    order: Sequence[str], data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Old workers call new servers, and in the other order new ones old servers, whose log it is then."""
    with job_of(data, tmp_path) as job:
        job.wait_for_steps()
        for number, name in enumerate(order):
            replace(job, name, "next", kills=number % 2 == 1)

        assert figures(job) == undisturbed
        log = job.log("server.0")
        assert all(f"a push of release {release}" in log for release in (0, 2)), "of both releases"


def test_way_back_does_not_change_the_model(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """A server of the present release takes over a log whose head the next one has written."""
    with job_of(data, tmp_path) as job:
        job.wait_for_steps()
        for name in ("server.0", "worker.1"):
            replace(job, name, "next")
        job.kill("server.0")
        assert set(written_in(job, "server.0")[-1:]) == {FORMAT + 1}, "a save has begun a segment"
        start(job, "server.0", None)
        job.wait_for("server.0", "saved folder=")
        replace(job, "worker.1", None, kills=True)

        assert figures(job) == undisturbed


def test_each_push_to_servers_that_are_replaced_is_applied_exactly_once(tmp_path: Path) -> None:
    """Pushes on arrival, whose requests and replies are lost and duplicated besides."""
    count = Count()
    with pushing(tmp_path / "job") as job:
        for number, (server, release) in enumerate(
            [("server.0", "next"), ("server.1", "next"), ("server.0", None)]
        ):
            wait_for_pushes(job, number, 200 + 200 * number)
            job.kill(server)
            start(job, server, release)
        assert {0} == set(job.wait(*job.workers).values()), job.tails
        with connect(job.endpoints) as client:
            last = counters(client)
    count.read(job.folder, NUM_PUSHERS)

    assert (count.acknowledged == count.sent).all()
    assert (last == count.acknowledged).all()


def test_release_two_formats_further_is_refused_and_nothing_is_lost(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    apart = r"has format {} of .* but this process has format {}, and only formats .* by at most 1"
    with job_of(data, tmp_path) as job:
        job.wait_for_steps()
        job.kill("worker.1")
        start(job, "worker.1", "after-next")
        assert job.wait("worker.1", limit_s=SOON_S) == {"worker.1": 10}, job.tails
        job.wait_for("worker.1", apart.format(FORMAT, FORMAT + 2))
        assert all(map(job.is_running, (*job.servers, "worker.0"))), job.tails
        start(job, "worker.1", None)
        job.wait_for("worker.1", r" step=\d+ ")

        job.kill("server.1")
        start(job, "server.1", "after-next")
        assert job.wait("server.1", limit_s=SOON_S) == {"server.1": 13}, job.tails
        job.wait_for("server.1", "by ctr-ps 0.*" + apart.format(FORMAT, FORMAT + 2))
        start(job, "server.1", None)

        assert figures(job) == undisturbed


def test_log_that_the_present_release_cannot_read_is_refused_and_kept(
    data: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """As of a release that breaks the rule: it writes the new name of a field alone."""
    with job_of(data, tmp_path) as job:
        job.wait_for_steps()
        replace(job, "server.0", "renamed")
        job.kill("server.0")
        start(job, "server.0", None)
        assert job.wait("server.0", limit_s=SOON_S) == {"server.0": 13}, job.tails
        told = rf"has a state of format {FORMAT + 1} that this release, of format {FORMAT}, cannot read"
        job.wait_for("server.0", rf"by ctr-ps 9\.1\.0, {told}: start 9\.1\.0 to resume")
        start(job, "server.0", "renamed")

        assert figures(job) == undisturbed
