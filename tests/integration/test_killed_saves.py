"""Servers and workers that are killed while they save: the old checkpoint is there, or the new one."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_server.store import ParameterStore
from tests.support.kill_target import NUMBER
from tests.support.processes import free_port
from tests.support.s3 import BUCKET
from tests.support.waiting import wait_until

LIMIT_S = 60.0


class Targets:
    """Forks processes to be killed."""

    def __init__(self, folder: Path) -> None:
        self._errors = (folder / "errors").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kill_target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def fork(self, **task: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@pytest.fixture
def targets(tmp_path: Path, s3: dict[str, str]) -> Iterator[Targets]:
    found = Targets(tmp_path)
    yield found
    found.close()


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def saved_number(url: str) -> int:
    """Returns the number of the save that is there, after a look at all of it."""
    checkpoint = Checkpoint.open(url)
    checkpoint.verify()
    store = ParameterStore()
    store.load(url)
    assert store.digest() == checkpoint.model_digest
    return int(checkpoint.attachment(NUMBER))


def kill_while_saving(targets: Targets, url: str, tmp_path: Path, num_kills: int) -> int:
    """Kills, and looks at what is there, so many times; returns how many saves were cut short."""
    rng = random.Random(1)
    num_cut, number = 0, 0
    for trial in range(num_kills):
        log = tmp_path / f"log-{trial}"
        with free_port() as port:
            pass
        processes = [targets.fork(role="server", port=port)]
        try:
            wait_until(lambda port=port: is_open(port), LIMIT_S)
            processes.append(
                targets.fork(role="worker", port=port, url=url, first=number + 1, log=str(log))
            )
            wait_until(lambda log=log: log.exists() and log.read_text().endswith("\n"), LIMIT_S)
            time.sleep(rng.uniform(0, 0.3))  # a save takes some 20 ms, on S3 200 ms
            kill(processes[trial % 2])
        finally:
            for process in processes:
                kill(process)
        whole = int(log.read_text().split("\n")[-2])
        number = saved_number(url)
        assert number in (whole, whole + 1), f"kill {trial}"
        num_folders = len(folder_at(url).folders())
        assert num_folders <= 2, "what others left is still there"
        num_cut += num_folders == 2
    return num_cut


@pytest.fixture(params=["local", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = f"{uuid.uuid4()}/model"
    return str(tmp_path / name) if request.param == "local" else f"s3://{BUCKET}/{name}"


def test_killed_while_saving_old_or_new_is_whole(targets: Targets, tmp_path: Path) -> None:
    kill_while_saving(targets, str(tmp_path / "model"), tmp_path, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_many_moments_old_or_new_is_whole(
    targets: Targets, url: str, tmp_path: Path
) -> None:
    # A save on S3 takes ten times as long, and more of them are cut.
    num_kills = 20 if url.startswith("s3:") else 40
    assert kill_while_saving(targets, url, tmp_path, num_kills) > num_kills // 10
