"""Servers that `kubectl scale` brings add and drain themselves: by the image's entry point and their preStop.

Both run as they are, but at addresses of the loopback interface, in a test's folder, and with shorter pauses.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ctr_ps.ps_worker.cluster.connect import connect
from tests.deploy.k8s.overlays import OVERLAYS, Pods, documents_of, pods_of
from tests.e2e.test_recovery import Count, counters, numbers_in
from tests.support.certificates import CertificateAuthority
from tests.support.commands import COMMANDS, ROOT, clean_environment
from tests.support.needs import is_missing
from tests.support.processes import environment_at, free_port, started
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(is_missing("kubectl"), reason="kubectl is not installed")

LIMIT_S = 60.0
PATH = f"{COMMANDS}:{os.environ['PATH']}"


@dataclass
class Pod:
    """One pod; `replaced` says what stands here for what stands there, `variables` are those of here."""

    pods: Pods
    others: Pods
    index: int
    folder: Path
    replaced: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, *command: str) -> None:
        """Starts a command, by default the container's, by the image's entry point."""
        self.folder.mkdir(exist_ok=True)
        text = (ROOT / "deploy/docker/entrypoint.sh").read_text()
        arguments = command or self.pods.arguments(self.index, self.others)
        with (self.folder / "output").open("ab") as log:
            self.process = subprocess.Popen(
                [*map(self._here, ("sh", "-c", text, "entrypoint.sh", *arguments))],
                env=self._environment(),
                stdout=log,
                stderr=log,
            )

    def stop(self) -> int:
        """Runs its preStop and ends it, as the kubelet does; returns the exit code of preStop."""
        hook = subprocess.run(
            map(self._here, self.pods.main["lifecycle"]["preStop"]["exec"]["command"]),
            env=self._environment(),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        if self.process is not None:
            self.process.terminate()
            assert self.process.wait(LIMIT_S) == 0, f"{hook}\n{self.log}"
        return hook.returncode

    def kill(self) -> None:
        """All that runs in the container."""
        for adds in self.folder.glob("adds"):
            with suppress(ProcessLookupError):
                os.killpg(int(adds.read_text()), signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.wait(LIMIT_S)

    @property
    def log(self) -> str:
        return (self.folder / "output").read_text()

    def _environment(self) -> dict[str, str]:
        own = self.pods.environment(self.index, self.others)
        here = {name: self._here(value) for name, value in own.items()}
        return {**clean_environment(), "PATH": PATH, **here, **self.variables}

    def _here(self, text: str) -> str:
        for there, here in {"/tmp/": f"{self.folder}/", **self.replaced}.items():
            text = text.replace(there, here)
        return re.sub(r"\bsleep \d+", "sleep 0.2", text)


def with_stub(pod: Pod, script: str) -> Path:
    """Starts a pod in which `ps-cluster` is a script, and no server; returns the file that has its calls."""
    calls, stub = pod.folder / "calls", pod.folder / "ps-cluster"
    stub.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{script}\n')
    stub.chmod(0o700)
    calls.touch()
    pod.variables = {"PATH": f"{pod.folder}:{PATH}", "NUMBA_CACHE_DIR": str(pod.folder)}
    pod.start("true")
    assert pod.process is not None
    assert pod.process.wait(LIMIT_S) == 0
    return calls


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_servers_of_the_list_add_and_drain_nothing(overlay: str, tmp_path: Path) -> None:
    pod = Pod(*pods_of(documents_of(overlay)), 1, tmp_path)
    calls = with_stub(pod, "")

    assert pod.stop() == 0
    assert calls.read_text() == ""


@pytest.mark.parametrize("tries", [1, 3, 99])
def test_one_above_them_drains_itself_in_a_few_tries_and_adds_itself_no_more(
    tries: int, tmp_path: Path
) -> None:
    pod = Pod(*pods_of(documents_of("local")), 2, tmp_path)
    drained = f"test $(grep -c drain {tmp_path}/calls) -ge {tries}"
    calls = with_stub(pod, f'if test "$2" = add; then exec sleep {LIMIT_S}; fi; {drained}')
    wait_until(lambda: "add" in calls.read_text())

    assert pod.stop() == (1 if tries == 99 else 0)
    first, *others = calls.read_text().splitlines()
    own, listed = "ps-server-2.ps-server:8500", "ps-server-{2}.ps-server:8500"
    assert first == f"{listed},{own} add {own}"
    assert others == [f"{listed} drain {own}"] * min(tries, 6)
    adds = int((tmp_path / "adds").read_text())
    wait_until(lambda: not Path(f"/proc/{adds}/cmdline").exists())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_servers_come_and_go_with_their_pods_and_no_push_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token and TLS, before the job begins and while a worker counts."""
    servers, workers = pods_of(documents_of("production", (2, 2)))
    tls, token = (
        CertificateAuthority(tmp_path).credentials("server", mutual=False),
        tmp_path / "token",
    )
    token.touch(0o600)
    token.write_text("admin of-this-test-alone\nreader of-nobody-who-is-here\n")
    network = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}."
    caller = {
        "CTR_PS_TOKEN_FILE": str(token),
        "CTR_PS_TLS_CA": tls.ca,
        "CTR_PS_TLS_NAME": "localhost",
    }
    server = {
        **caller,
        "CTR_PS_TLS_CERT": tls.certificate,
        "CTR_PS_TLS_KEY": tls.key,
        "CTR_PS_METRICS": "",
        "NUMBA_CACHE_DIR": os.environ["NUMBA_CACHE_DIR"],
    }
    for name, value in caller.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        port = str(stack.enter_context(free_port()))

        def pod(index: int) -> Pod:
            folder = tmp_path / str(index)
            replaced = {"8500": port, "8501": "0", "/work/": f"{folder}/"}
            for host in ("{2}", str(index)):
                replaced[servers.host.format(host)] = f"{network}{host}"
            found = Pod(servers, workers, index, folder, replaced, server)
            stack.callback(found.kill)
            found.start()
            return found

        *_, third = (pod(index) for index in range(3))
        endpoints = [f"{network}{index}:{port}" for index in range(3)]

        def has_added(times: int) -> bool:
            assert third.process is not None
            assert third.process.poll() is None, third.log
            return third.log.count("\ndone: ") == times

        wait_until(lambda: has_added(1), LIMIT_S)
        role = {
            **environment_at(endpoints[:2], 0, 2),
            "TRAINING_ROLE": "TRAINER",
            "PADDLE_TRAINER_ID": "0",
        }
        command = [sys.executable, "-m", "tests.support.pusher", tmp_path, 1_000_000, 0.02]
        worker = stack.enter_context(started(command, {**clean_environment(), **role, **caller}))

        def wait_for_pushes() -> None:
            file = tmp_path / "0.acknowledged"
            before = len(numbers_in(file)) if file.exists() else 0
            wait_until(lambda: file.exists() and len(numbers_in(file)) > before + 20, LIMIT_S)

        wait_for_pushes()
        third.kill()  # the container is restarted
        third.start()
        wait_until(lambda: f"\n{endpoints[2]} is in the cluster already" in third.log, LIMIT_S)
        wait_for_pushes()
        assert third.stop() == 0  # the pod is deleted, and made again
        third.start()
        wait_until(lambda: has_added(2), LIMIT_S)
        wait_for_pushes()
        (tmp_path / "enough").touch()
        assert worker.wait(LIMIT_S) == 0, worker.stderr
        with closing(connect(endpoints[:2])) as client:
            found = counters(client)
        count = Count()
        count.read(tmp_path, 1)
        assert (count.acknowledged == found).all()
        assert found.any()
