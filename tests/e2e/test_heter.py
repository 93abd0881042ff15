"""A heter trainer as a process of its own: the same model, Paddle's variables, and its death."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from tests.support.commands import COMMANDS, ROOT, clean_environment, generated, run
from tests.support.process_faults import Fault, launched_with
from tests.support.processes import free_port, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB = ROOT / "examples/torch_wide_deep.toml"
ATTENTION = ROOT / "examples/torch_attention.toml"
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=6000, test_rows=1000, files=2)


def settings(data: Path, **others: object) -> list[str]:
    own = {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "model.hidden": "[16]",
        **{name.replace("__", "."): value for name, value in others.items()},
    }
    given = {name: value for name, value in own.items() if value is not None}
    return [word for name, value in given.items() for word in ("--set", f"{name}={value}")]


def test_sync_gives_the_model_of_the_same_job_without_a_heter_trainer(
    data: Path, tmp_path: Path
) -> None:
    saved, results = [], []
    for num_heter, num_servers in ((0, 1), (1, 2)):  # the model is that of any number of servers
        folder = tmp_path / f"model-{num_heter}"
        cluster = ["--server-num", num_servers, "--worker-num", 2, "--heter-num", num_heter]
        own = settings(data, strategy__mode="sync", checkpoint__dir=folder)
        pauses = [Fault(5, "HETER_TRAINER", 0, pause_s=0.3)] * num_heter
        log_dir = tmp_path / f"log-{num_heter}"
        results.append(launched_with(pauses, log_dir, *cluster, JOB, *own))
        saved.append(SavedModel.open(folder))

    expected, found = results
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-6)
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-5)
    assert found["examples"] == expected["examples"] == 6000
    for block, values in saved[0].dense.items():
        np.testing.assert_allclose(saved[1].dense[block], values, atol=1e-5)
    figures = json.loads((tmp_path / "log-1/heter.0.log").read_text().splitlines()[-1])
    assert figures["examples"] == 6000


class Job:
    """Processes of a job that were started by hand, by the names of their logs."""

    def __init__(self, processes: dict[str, "Popen[str]"], heter_endpoints: list[str]) -> None:
        self.processes = processes
        self.heter_endpoints = heter_endpoints

    def wait_for_step(self, name: str) -> None:
        stream = self.processes[name].stderr
        assert stream is not None
        for line in stream:
            if re.search(r" step=\d+ ", line):
                return
        pytest.fail(f"{name} ended without a step")

    def end_of(self, name: str) -> tuple[int, str, str]:
        """Waits for a process; returns its exit code and what it wrote to stdout and stderr."""
        process = self.processes[name]
        out, error = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, error


@contextmanager
def job_by_hand(
    job: Path, own: Sequence[str], *, num_heter: int, variables: dict[str, str]
) -> Iterator[Job]:
    """Starts a server, two workers and heter trainers.

    Args:
        job: Of workers and heter trainers.
        own: Settings of workers and heter trainers.
        num_heter: Heter trainers.
        variables: More than the roles have; "{}" stands for the list of heter trainers.
    """
    with ExitStack() as ports:
        held = [ports.enter_context(free_port()) for _ in range(1 + num_heter)]
    server, *heter = [f"127.0.0.1:{port}" for port in held]
    shared = {
        **clean_environment(),
        "OMP_NUM_THREADS": "1",
        "PADDLE_PSERVERS_IP_PORT_LIST": server,
        "PADDLE_TRAINERS_NUM": "2",
        **{name: value.format(",".join(heter)) for name, value in variables.items()},
    }
    place = {"POD_IP": "127.0.0.1"}
    roles: dict[str, tuple[list[object], dict[str, str]]] = {
        "pserver": (
            [COMMANDS / "ps-server"],
            {"TRAINING_ROLE": "PSERVER", "PADDLE_PORT": server.split(":")[1], **place},
        )
    }
    for index, endpoint in enumerate(heter):
        roles[f"heter.{index}"] = (
            [COMMANDS / "ps-worker", "heter", str(job), *own, "--json"],
            {"TRAINING_ROLE": "HETER_TRAINER", "PADDLE_PORT": endpoint.split(":")[1], **place},
        )
    for index in range(2):
        roles[f"trainer.{index}"] = (
            [COMMANDS / "ps-worker", "train", str(job), *own, "--json"],
            {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)},
        )
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(started(command, {**shared, **role}))
            for name, (command, role) in roles.items()
        }
        yield Job(processes, heter)


def last_object(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_another_heter_trainer_takes_over_from_one_that_is_killed(data: Path) -> None:
    """With the variables of Paddle's first generation alone, no launcher, and attention over rows apart."""
    own = settings(
        data,
        model__hidden=None,
        train__batch_size=64,
        train__epochs=2,
        train__log_every_s=0.2,
        cluster__lease_s=4,
        cluster__on_worker_loss="continue",
        # So few rows need longer first steps than the default's, 2 / 64².
        optimizer__sparse="{name='adagrad', learning_rate=0.05, initial_accumulator=0.0001}",
    )
    variables = {"PADDLE_HETER_TRAINER_IP_PORT_LIST": "{}"}
    with job_by_hand(ATTENTION, own, num_heter=2, variables=variables) as job:
        job.wait_for_step("trainer.1")
        job.processes["heter.1"].kill()
        code, out, error = job.end_of("trainer.0")
        assert code == 0, error
        result = last_object(out)
        code, _, error = job.end_of("trainer.1")
        assert code == 0, error
        assert re.search(
            rf"heter trainer 1 \({job.heter_endpoints[1]}\) is lost, heter trainer 0 takes over",
            error,
        )
        code, out, error = job.end_of("heter.0")
        assert code == 0, error
        assert last_object(out)["examples"] > 6_000
        code, _, error = job.end_of("pserver")
        assert code == 0, error
        assert "heter trainer 1 joins" in error
        assert "heter trainer 1 is lost silent_s=4 on_worker_loss=continue" in error
    assert result["examples"] == 12_000
    assert result["lost_workers"] == []
    assert result["auc"] > 0.6


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_job_without_its_only_heter_trainer_ends_by_its_name(data: Path, mode: str) -> None:
    """With those of the second generation, which STAGE_NUM belongs to."""
    own = settings(
        data,
        train__epochs=50,
        train__log_every_s=0.2,
        cluster__lease_s=6,
        strategy__mode=mode,
    )
    variables = {"PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": "{}", "STAGE_NUM": "2"}
    with job_by_hand(JOB, own, num_heter=1, variables=variables) as job:
        job.wait_for_step("trainer.0")
        job.processes["heter.0"].kill()
        ends = [job.end_of(name) for name in ("trainer.0", "trainer.1", "pserver")]
    assert {code for code, _, _ in ends} <= {4, 12}  # one of them found it out, the others heard
    causes = [
        f"heter trainer 0 ({job.heter_endpoints[0]}) is lost, and there is no other heter trainer"
    ]
    if mode == "sync":  # it may have answered both, and died before its part of their step
        causes.append("no call from heter trainer 0 for 6 s (cluster.lease_s)")
    assert any(all(cause in error for _, _, error in ends) for cause in causes), ends


def test_script_for_all_roles_runs(data: Path, tmp_path: Path) -> None:
    in_paddle_s_words = ["--heter_worker_num", 1, "--heter_devices", "cpu"]
    cluster = ["--server-num", 1, "--worker-num", 2, *in_paddle_s_words, "--log-dir", tmp_path]
    files = [f"--train-files={data}/train/part-*", f"--test-files={data}/test/part-*"]
    script = ROOT / "examples/heter_wide_deep.py"

    done = run("ps-launch", *cluster, script, *files, "--passes", 2)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.6
