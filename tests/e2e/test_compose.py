"""Compose on a real engine: the demo, in step, so that a model has one digest, and the online example.

`CTR_DOCKER_START` names a script with the commands `start` and `stop`, for an engine, and `env`, which prints
the variables to export to reach it. Without it, CI uses the engine that `docker` finds by itself.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
START = os.environ.get("CTR_DOCKER_START")
STEPS_LIMIT_S = 300.0
ONLINE = ROOT / "examples/online/docker-compose.yml"
SERVICES = {"data", "ps0", "ps1", "trainer0", "trainer1"}
MONITORING = ("prometheus", "grafana")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not START and os.environ.get("CI") != "true",
        reason="CTR_DOCKER_START names no script that starts a Docker engine",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A Docker engine, reached through `environment`."""

    environment: Mapping[str, str]

    def output(self, *command: str) -> str:
        """Returns the stdout of a command, and fails with its output if it fails."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def has_image(self, image: str) -> bool:
        found = subprocess.run(
            ["docker", "image", "inspect", image],
            env=self.environment,
            capture_output=True,
            check=False,
        )
        return found.returncode == 0

    def is_up(self) -> bool:
        info = subprocess.run(
            ["docker", "info"], env=self.environment, capture_output=True, check=False
        )
        return info.returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """One Compose project with containers and volumes of its own."""

    engine: Engine
    compose: Sequence[str]

    def run(self, *arguments: str) -> str:
        return self.engine.output(*self.compose, *arguments)

    def container(self, service: str) -> str:
        (container,) = self.run("ps", "--all", "--quiet", service).split()
        return container

    def port(self, service: str, inner: int) -> str:
        """Returns where this machine reaches a port of a service: host:port."""
        return self.run("port", service, str(inner)).strip()

    def exit_codes(self) -> dict[str, int]:
        form = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.ExitCode}}'
        containers = self.run("ps", "--all", "--quiet").split()
        lines = self.engine.output("docker", "inspect", "--format", form, *containers).splitlines()
        return {service: int(code) for service, code in (line.split() for line in lines)}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if not START:
        yield Engine(environment=dict(os.environ))
        return
    script = ["bash", "-c", 'eval "$(bash "$0" env)" && env -0', START]
    variables = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    engine = Engine(environment=dict(line.split("=", 1) for line in variables.split("\0") if line))
    if engine.is_up():
        yield engine
        return
    engine.output("bash", START, "start")
    yield engine
    engine.output("bash", START, "stop")


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file that has the workers of docker-compose.yml train in step, and say soon that they do.

    On a busy machine a run was over before its first line was seen, five seconds after its start.
    """
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    commands = {
        name: {
            "command": [
                *services[name]["command"],
                *("--set", "strategy.mode=sync"),
                *("--set", "train.log_every_s=0.2"),
            ]
        }
        for name in ("trainer0", "trainer1")
    }
    file = tmp_path_factory.mktemp("compose") / "sync.yml"
    file.write_text(yaml.safe_dump({"services": commands}))
    return file


def project_of(engine: Engine, name: str, *files: str | Path) -> Project:
    path = engine.environment["PATH"]
    compose = (
        ["docker-compose"] if shutil.which("docker-compose", path=path) else ["docker", "compose"]
    )
    named = [argument for file in files for argument in ("--file", str(file))]
    options = ["--project-directory", ".", "--project-name", f"{name}-{os.getpid()}"]
    return Project(engine=engine, compose=[*compose, *named, *options])


@pytest.fixture(scope="module")
def project(engine: Engine, sync: Path) -> Iterator[Project]:
    project = project_of(engine, "ctr-ps", "docker-compose.yml", sync)
    yield project
    project.run("--profile", "monitoring", "--profile", "spare", "down", "--volumes")


@pytest.fixture(scope="module")
def online(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The example of online training, with shorter times and any free port."""
    services = yaml.safe_load(ONLINE.read_text())["services"]
    added = {
        "job": ["--set=data.pass_every=5 s", "--set=cluster.lease_s=10"],
        "serve": ["--reload-every=1"],
    }
    changed = {
        name: {"command": [*services[name]["command"], *options]} for name, options in added.items()
    }
    file = tmp_path_factory.mktemp("online") / "fast.yml"
    file.write_text(yaml.safe_dump({"services": changed}))
    example = file.with_name(
        "docker-compose.yml"
    )  # of two files Compose would open the ports of both
    example.write_text(ONLINE.read_text().replace("127.0.0.1:8000:8000", "127.0.0.1::8000"))
    project = project_of(engine, "ctr-ps-online", example, file)
    yield project
    project.run("down", "--volumes")


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> dict[str, Any]:
    """Returns the result of a run in which nothing was killed."""
    shown = project.run("up", "--build", "--no-color")
    assert project.exit_codes() == dict.fromkeys(SERVICES, 0), shown[-4000:]
    return result_of(project)


def result_of(project: Project) -> dict[str, Any]:
    log = project.engine.output("docker", "logs", project.container("trainer0"))
    result: dict[str, Any] = json.loads(log.splitlines()[-1])
    return result


def test_up_trains_a_model(project: Project, undisturbed: dict[str, Any]) -> None:
    result = undisturbed
    best = json.loads(in_worker(project, "cat", "data/demo/planted.json"))["best_auc"]
    assert best - 0.02 < result["auc"] < best + 0.01
    in_worker(project, "test", "-s", f"{result['checkpoint']}/MANIFEST.json")


def test_a_server_that_is_added_and_killed_containers_change_no_byte_of_the_model(
    project: Project, undisturbed: dict[str, Any]
) -> None:
    """Started again by hand: an engine restarts no container that it was told to kill."""
    project.run("down")
    project.run("--profile", "spare", "up", "--detach", "--build")
    killed = [project.container("ps1"), project.container("trainer1")]
    wait_for_steps(project)
    moved = project.run("exec", "-T", "ps0", "ps-cluster", "ps0:8500", "add", "ps2:8500")
    assert "done:" in moved

    # Both at once: on a busy machine the job could be over before the second one.
    project.engine.output("docker", "kill", *killed)
    project.engine.output("docker", "start", *killed)

    services = {*SERVICES, "ps2"}
    for service in services:
        project.engine.output("docker", "wait", project.container(service))
    logs = project.run("logs", "--no-color")
    assert project.exit_codes() == dict.fromkeys(services, 0), logs[-4000:]
    assert "replacing a lost process worker=1" in logs
    assert "recovered checkpoint=" in logs
    assert result_of(project)["model_digest"] == undisturbed["model_digest"]


def wait_for_steps(project: Project) -> None:
    end = time.monotonic() + STEPS_LIMIT_S
    while " step=" not in project.run("logs", "--no-color", "trainer1"):
        assert time.monotonic() < end, project.run("logs", "--no-color")[-4000:]
        time.sleep(0.5)


def test_kernels_of_the_image_are_compiled(project: Project) -> None:
    count = "find /var/cache/numba -name '*.nbc' | wc -l"
    before = int(in_worker(project, "sh", "-c", count))

    after = int(in_worker(project, "sh", "-c", f"python -m ctr_ps.ps_server.precompile; {count}"))

    assert before == after > 0


def test_monitoring_sees_the_servers_and_shows_the_dashboard(project: Project) -> None:
    """Where the engine has the images: no test looks for them elsewhere."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    images = [services[name]["image"] for name in MONITORING]
    if missing := [image for image in images if not project.engine.has_image(image)]:
        pytest.skip(f"the engine has no image {missing}")

    project.run("--profile", "monitoring", "up", "--detach", "ps0", "ps1", *MONITORING)

    targets = "http://prometheus:9090/api/v1/targets"
    wait_until(project, targets, lambda found: found.count('"health":"up"') == 2)
    wait_until(project, "http://grafana:3000/api/search", lambda found: '"uid":"ctr-ps"' in found)


def wait_until(project: Project, url: str, is_done: Callable[[str], bool]) -> None:
    """Asks from a container of the project, as no port of it is this machine's."""
    script = (
        f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=5).read().decode())"
    )
    end = time.monotonic() + STEPS_LIMIT_S
    while True:
        try:
            found = in_worker(project, "python", "-c", script)
        except AssertionError as error:  # it does not listen yet
            found = str(error)
        if is_done(found):
            return
        assert time.monotonic() < end, found
        time.sleep(0.5)


def in_worker(project: Project, *command: str) -> str:
    return project.run("run", "--rm", "-T", "--no-deps", "trainer1", *command)


def test_online_example_follows_clicks_and_goes_on_after_a_stop(online: Project) -> None:
    online.run("up", "--detach", "--build")
    before = served(online, lambda version, _: version)
    keys = "redis://redis:6379/clicks-0,clicks-1"
    fan = ["examples/online/producer.py", keys, "--fan", "ann", "--rate", "200", "--rows", "1000"]

    online.run("exec", "-T", "producer", "python", *fan)

    followed = served(online, lambda _, ann: ann > before[1] + 0.2)
    assert number_of(followed[0]) > number_of(before[0])

    read = online.run("exec", "-T", "redis", "redis-cli", "xlen", "clicks-0")
    online.run("stop")
    # Not 137, of SIGKILL: each ends by itself. ps-launch and Python end with 143, of SIGTERM.
    assert online.exit_codes() == {"redis": 0, "job": 143, "producer": 143, "serve": 0}
    online.run("up", "--detach")

    after = served(online, lambda version, _: number_of(version) > number_of(followed[0]))
    assert after[1] > before[1] + 0.2, "what was learnt is gone"
    assert int(online.run("exec", "-T", "redis", "redis-cli", "xlen", "clicks-0")) >= int(read)
    assert "resuming from the update logs" in online.run("logs", "--no-color", "job")


def number_of(version: str) -> int:
    """Returns the number of the pass that ended with `version`; 0: it is of a stop within a pass."""
    kind, number = version.split("-")
    return int(number) if kind == "epoch" else 0


def served(online: Project, is_done: Callable[[str, float], Any]) -> tuple[str, float]:
    """Returns the served version and its probability that "ann" clicks, once they are as wanted."""
    values = {"user": "ann", "item": "i1", "hour": "9"}
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [1], "data": [value]}
        for name, value in values.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    end = time.monotonic() + STEPS_LIMIT_S
    while True:
        try:
            url = f"http://{online.port('serve', 8000)}/v2/models/ctr/infer"
            with urllib.request.urlopen(url, body, timeout=5) as answer:
                found = json.load(answer)
            version, ann = found["model_version"], found["outputs"][0]["data"][0]
            if is_done(version, ann):
                return version, ann
            state = f"{version} {ann}"
        except (OSError, AssertionError) as error:  # it does not serve yet
            state = str(error)
        assert time.monotonic() < end, f"{state}\n{online.run('logs', '--no-color')[-4000:]}"
        time.sleep(0.5)
