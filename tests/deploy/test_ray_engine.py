"""Launches on a Ray cluster of three nodes on this machine, which end as those of local processes do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.commands import generated, run
from tests.support.processes import started

if os.environ.get("CI") != "true":
    pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LIMIT_S = 120.0
EXIT_S = 20.0
# Ray takes 127.0.0.1 for a name of the machine's outer address, and no other address of loopback.
THREE_NODES = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "node_ip_address": "127.0.0.2", "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
SAME = ("model_digest", "auc", "log_loss", "examples")
CTR_DNN = Path(__file__).parents[2] / "examples" / "ctr_dnn.py"
COMMAND = [sys.executable, "-m", "ctr_ps.deploy.launch", "--server-num", "2", "--worker-num", "2"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", THREE_NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as nodes:
        assert nodes.stdout is not None
        # Ray tells of itself on stdout, too.
        yield next(line.strip() for line in nodes.stdout if line.startswith("127.0.0.2:"))
        nodes.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = generated(tmp_path_factory.mktemp("data"), rows=20_000, test_rows=2_000, files=2)
    (folder / "job.toml").write_text(f"""
[data]
format = "criteo"
train = "{folder}/train/part-*"
test = "{folder}/test/part-*"
[model]
name = "ctr_dnn"
hidden = [16]
[train]
batch_size = 32
epochs = 2
log_every_s = 0.1
[strategy]
mode = "sync"
[cluster]
lease_s = 5
""")
    return ["--json", "--max-restarts", "2", str(folder / "job.toml")]


@pytest.fixture(scope="module")
def expected(job: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The result of the same launch with processes of this machine."""
    folder = tmp_path_factory.mktemp("local")
    done = subprocess.run([*COMMAND, *job], cwd=folder, capture_output=True, text=True, check=True)
    return result_of(done.stdout)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def result_of(out: str) -> dict[str, object]:
    result = json.loads(out.splitlines()[-1])
    return {name: result[name] for name in SAME}


def on_ray(address: str) -> list[str]:
    return [*COMMAND, "--on", "ray", "--address", address]


def owned(role: str, folder: Path) -> list[tuple[int, int]]:
    """Returns (process, its actor) of all processes of a role whose folder is `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            if (
                f"TRAINING_ROLE={role}".encode() in environment
                and (path / "cwd").readlink() == folder
            ):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                found.append((int(path.name), parent))
        except OSError:  # it has ended
            continue
    return found


def actors() -> list[str]:
    """Returns the actors of launches that run on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::Host"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    end = time.monotonic() + EXIT_S
    while left := [*owned("PSERVER", folder), *owned("TRAINER", folder), *actors()]:
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.1)


def until_training(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    while "examples/s=" not in (line := process.stderr.readline()):
        assert line, "the launcher ended before it trained"


@pytest.mark.parametrize("lost", ["PSERVER", "TRAINER"])
def test_result_is_that_of_processes_whichever_actor_is_killed(
    lost: str, address: str, job: list[str], expected: dict[str, object], tmp_path: Path
) -> None:
    with started([*on_ray(address), "--durability", "log", *job]) as process:
        until_training(process)
        _, actor = min(owned(lost, tmp_path))
        os.kill(actor, signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0, err
    assert result_of(out) == expected
    assert json.loads(out.splitlines()[-1])["restarts"] == 1
    assert not Path("log/update-log").exists()
    assert_nothing_left(tmp_path)


def test_job_whose_worker_is_killed_goes_on_from_its_checkpoint(
    address: str, job: list[str], expected: dict[str, object], tmp_path: Path
) -> None:
    settings = ["--set", "checkpoint.dir=model", "--set", "checkpoint.every_steps=20"]
    command = [*on_ray(address), "--durability", "checkpoint", *job, *settings]
    with started(command) as process:
        while not (tmp_path / "model" / "LATEST").exists():
            until_training(process)
        _, actor = min(owned("TRAINER", tmp_path))
        os.kill(actor, signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0, err
    assert result_of(out)["model_digest"] == expected["model_digest"]
    assert json.loads(out.splitlines()[-1])["restarts"] == 1
    assert_nothing_left(tmp_path)


def test_script_runs_as_on_one_machine(address: str, job: list[str], tmp_path: Path) -> None:
    data = Path(job[-1]).parent
    script = [CTR_DNN, "--distributed", "--mode", "sync", "--output", tmp_path / "model"]
    files = ["--train-files", data / "train/part-*", "--test-files", data / "test/part-*"]
    with started([*on_ray(address), *script, *files]) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "test examples 2000 auc" in out
    assert run("ps-ckpt", "verify", tmp_path / "model" / "epoch-1").returncode == 0
    assert_nothing_left(tmp_path)


NO_PATIENCE = """
from functools import partial
from ctr_ps.deploy import launch
from ctr_ps.deploy import ray_engine
ray_engine.ray_engine = partial(ray_engine.ray_engine, place_seconds=1)
launch.main()
"""


def test_cluster_without_room_is_refused_and_the_next_job_gives_the_result_of_processes(
    address: str, expected: dict[str, object], job: list[str], tmp_path: Path
) -> None:
    options = ["--on", "ray", "--address", address, "--server-num", "2", "--worker-num", "5"]
    done = subprocess.run(
        [sys.executable, "-c", NO_PATIENCE, *options, *job],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 14
    assert "error: Ray found no place for 2 servers and 5 workers within 1 s" in done.stderr
    assert "4 are free" in done.stderr  # the servers have their place
    assert "--address" not in done.stderr

    own = os.environ | {"CTR_PS_TOKEN": "a-token-of-this-test", "CTR_PS_LOG_FORMAT": "json"}
    options = ["--durability", "log", "--spare-num", "1"]
    with started([*on_ray(address), *options, *job], own) as process:
        out, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 0, err
    assert result_of(out) == expected
    assert json.loads(out.splitlines()[-1])["restarts"] == 0
    assert not Path("log/update-log").exists()
    assert "serving" in Path("log/spare.0.log").read_text()
    for index in range(2):
        first, *_ = Path(f"log/pserver.{index}.log").read_text().splitlines()
        assert json.loads(first)["role"] == "server"  # the launcher's variables reach its processes
    assert_nothing_left(tmp_path)


def test_address_without_a_cluster_is_named(job: list[str]) -> None:
    with started([*on_ray("127.0.0.1:1"), *job]) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, err
    assert "127.0.0.1:1" in err
    assert "Traceback" not in err


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def variables_of(process: int) -> dict[str, str]:
    entries = Path(f"/proc/{process}/environ").read_text().split("\0")
    return {name: value for name, _, value in (each.partition("=") for each in entries)}


def test_servers_have_nodes_of_their_own_all_know_a_token_and_ctrl_c_ends_them_in_order(
    address: str, job: list[str], tmp_path: Path
) -> None:
    with started([*on_ray(address), *job, "--set", "train.epochs=1000"]) as process:
        until_training(process)
        servers, workers = owned("PSERVER", tmp_path), owned("TRAINER", tmp_path)
        nodes = {parent_of(actor) for _, actor in servers}
        tokens = [variables_of(each).get("CTR_PS_TOKEN") for each, _ in (*servers, *workers)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)

    assert (len(nodes), len(tokens)) == (2, 4)
    assert len({*tokens}) == 1
    assert tokens[0]
    assert process.returncode == 128 + signal.SIGINT
    for index in range(2):
        assert "ended reason='SIGTERM'" in Path(f"log/pserver.{index}.log").read_text()
    assert_nothing_left(tmp_path)


def test_update_logs_are_removed_on_the_node_of_each_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here the nodes have one disk, so the first of them removes the folder of all."""
    from ctr_ps.deploy import ray_engine

    class Actor:
        def __init__(self, name: str) -> None:
            self.remove = self
            self._name = name

        def remote(self, folder: str) -> tuple[str, str]:
            return self._name, folder

    removed: list[tuple[str, str]] = []
    monkeypatch.setattr(ray_engine.ray, "get", lambda call, **_: removed.append(call))
    found = ray_engine.RayEngine(cast(Any, None), cast(Any, None))
    found._actors = dict.fromkeys(("pserver.0", "trainer.0", "pserver.1", "spare.0"))
    monkeypatch.setattr(found, "_actor", Actor)

    found.remove(tmp_path)

    assert removed == [(name, str(tmp_path)) for name in ("pserver.0", "pserver.1", "spare.0")]


def test_text_that_is_no_address_is_refused(job: list[str]) -> None:
    with started([*on_ray("foo"), *job]) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, err
    assert "--address foo: expected HOST:PORT or auto" in " ".join(err.split())
    assert "Traceback" not in err

    from ctr_ps.deploy.ray_engine import AddressError, ray_engine

    for text in ("127.0.0.2", "foo:bar", ":", "", "127.0.0.2:65536"):
        with (
            pytest.raises(AddressError, match=r"^expected HOST:PORT or auto"),
            ray_engine(text, num_servers=1, num_workers=1),
        ):
            pytest.fail(f"{text!r} was taken")


def test_ctrl_c_ends_the_wait_for_room_of_which_it_tells(address: str, job: list[str]) -> None:
    with started([*on_ray(address), "--worker-num", "5", *job]) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "waiting" in line)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, err = process.communicate(timeout=LIMIT_S)
    assert "waiting up to 60 s for 5 CPUs of Ray, 4 are free" in said
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - start < EXIT_S
    assert "Traceback" not in err


def test_failure_ends_all_and_is_shown(address: str, job: list[str], tmp_path: Path) -> None:
    with started([*on_ray(address), *job, "--set", "train.batch_size=none"]) as process:
        _, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2, err
    assert "batch_size" in err
    assert_nothing_left(tmp_path)
