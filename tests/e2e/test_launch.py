"""`ps-launch` with the real server and the real worker."""

import json
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.processes import started

ROOT = Path(__file__).parents[2]
COMMANDS = Path(sys.executable).parent
LIMIT_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generate = [COMMANDS / "ps-data", "generate", "data/demo", "--rows", "20000"]
    options = ["--test-rows", "4000", "--files", "4", "--seed", "1"]
    subprocess.run([*generate, *options], check=True, capture_output=True)
    return tmp_path


def launched(*arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [COMMANDS / "ps-launch", "--server-num", "2", "--worker-num", "2"]
    return started([*command, ROOT / "examples/demo.toml", *arguments])


def test_demo_ends_with_the_result_of_trainer_0(demo: Path) -> None:
    with launched("--json", "--set", "train.epochs=2") as process:
        out, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert 0.6 < result["auc"] < 1.0
    assert (demo / result["checkpoint"] / "MANIFEST.json").is_file()
    logs = sorted(path.name for path in (demo / "log").glob("*.log"))
    assert logs == ["pserver.0.log", "pserver.1.log", "trainer.0.log", "trainer.1.log"]


def test_ctrl_c_in_training_lets_all_end_in_order(demo: Path) -> None:
    with launched("--set", "train.epochs=1000", "--set", "train.log_every_s=0.1") as process:
        assert process.stderr is not None
        while "examples/s=" not in (line := process.stderr.readline()):
            assert line, "the launcher ended before it trained"

        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)

    assert process.returncode == 128 + signal.SIGINT
    for index in range(2):
        assert "ended reason='SIGTERM'" in (demo / f"log/pserver.{index}.log").read_text()
        worker = (demo / f"log/trainer.{index}.log").read_text()
        assert "SIGTERM: this worker ends" in worker
        assert "retrying" not in worker
        assert "not ended within" not in worker


def test_a_mistake_in_the_job_is_the_launchers_exit_code(demo: Path) -> None:
    with launched("--set", "train.batchsize=512") as process:
        _, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert "batch_size" in err  # the nearest known key, from the end of the worker's log


@pytest.mark.timeout(600)
def test_second_launch_goes_on_from_the_update_logs_of_one_that_was_killed(demo: Path) -> None:
    settings = ("strategy.mode=sync", "train.epochs=3", "train.batch_size=64", "cluster.lease_s=2")
    options = ["--json", "--durability", "log"]
    options += [word for each in settings for word in ("--set", each)]

    def result_of(*arguments: str) -> tuple[str, str]:
        with launched(*options, *arguments) as process:
            out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1])["model_digest"], err

    undisturbed, _ = result_of("--log-dir", "base", "--set", "checkpoint.dir=base-model")
    with launched(*options, "--set", "train.log_every_s=0.1") as process:
        assert process.stderr is not None
        while "examples/s=" not in (line := process.stderr.readline()):
            assert line, "the launcher ended before it trained"
        process.kill()

    digest, said = result_of("--set", "train.log_every_s=0.1")

    assert "resuming from the update logs of an earlier run in log/update-log" in said
    assert digest == undisturbed
    assert not (demo / "log/update-log").exists()
