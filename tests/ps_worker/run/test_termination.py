"""SIGTERM of a worker: wherever it is, it ends, with 143."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.processes import started

LIMIT_S = 60.0
PROGRAM = """
import json, os, signal, sys, threading
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.run.termination import Termination

for line in sys.stdin:
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
task = json.loads(line)
os.dup2(os.open(task["log"], os.O_WRONLY | os.O_CREAT), 2)
signal.alarm(60)  # it ends, whatever becomes of the tests
print(os.getpid(), flush=True)
store = ParameterStore(num_workers=2)
with Termination(grace_s=task["grace_s"]) as termination:
    exec(task["body"])
"""

Ended = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what workers need; each is a child of it."""
    with started([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE) as process:
        yield process
        process.communicate(timeout=LIMIT_S)


@pytest.fixture
def ended_by_sigterm(forks: subprocess.Popen[str], tmp_path: Path) -> Ended:
    """Runs a worker, sends SIGTERM when it prints a line; returns its exit code and what it said."""
    assert forks.stdin is not None
    assert forks.stdout is not None
    told, said, log = forks.stdin, forks.stdout, tmp_path / "log"

    def ended(body: str, *, grace_s: float) -> tuple[int, str]:
        task = {"body": textwrap.dedent(body), "grace_s": grace_s, "log": str(log)}
        told.write(json.dumps(task) + "\n")
        told.flush()
        worker = int(said.readline())
        assert said.readline() == "ready\n", log.read_text()
        os.kill(worker, signal.SIGTERM)
        return int(said.readline()), log.read_text()

    return ended


def test_call_that_waits_fails_and_the_worker_unwinds(
    tmp_path: Path, ended_by_sigterm: Ended
) -> None:
    code, log = ended_by_sigterm(
        f"""
        termination.abort_at(lambda: (store, 1))
        waiting = store.barrier("end", 1, step=0)
        print("ready", flush=True)
        try:
            waiting.result()
        finally:
            open({str(tmp_path / "unwound")!r}, "w").close()
        """,
        grace_s=LIMIT_S,
    )

    assert code == 143
    assert "Traceback" not in log
    assert (tmp_path / "unwound").exists()


@pytest.mark.parametrize("has_begun", [True, False])
def test_worker_that_does_not_end_is_ended(has_begun: bool, ended_by_sigterm: Ended) -> None:
    code, _ = ended_by_sigterm(
        f"""
        if {has_begun}:
            termination.abort_at(lambda: (store, 1))
        print("ready", flush=True)
        threading.Event().wait()
        """,
        grace_s=0.1 if has_begun else LIMIT_S,
    )

    assert code == 143


def test_worker_whose_job_goes_on_ends_after_its_batch(ended_by_sigterm: Ended) -> None:
    code, _ = ended_by_sigterm(
        """
        termination.end_after_batch(lambda: None)
        assert not termination.is_told_to_end
        print("ready", flush=True)
        while not termination.is_told_to_end:
            pass
        raise SystemExit(7)
        """,
        grace_s=LIMIT_S,
    )

    assert code == 7


@pytest.mark.parametrize("ends_after_batch", [True, False])
def test_job_goes_on_while_worker_0_saves(ends_after_batch: bool, ended_by_sigterm: Ended) -> None:
    """Worker 0 ends by itself, and then the others, or at last they do."""
    code, log = ended_by_sigterm(
        f"""
        import time
        wait_s = 60.0 if {ends_after_batch} else 0.5
        termination.abort_at(
            lambda: (store, 1), wait_s=lambda: wait_s, ends_after_batch={ends_after_batch}
        )
        print("ready", flush=True)
        start = time.monotonic()
        while not termination.was_asked:
            pass
        assert termination.is_told_to_end == {ends_after_batch}
        store.wait_version(0).result()
        if {ends_after_batch}:
            raise SystemExit(7)
        try:
            store.barrier("end", 1, step=0).result()
        finally:
            assert time.monotonic() - start >= 0.5
        """,
        grace_s=LIMIT_S,
    )

    assert code == (7 if ends_after_batch else 143), log


@pytest.mark.parametrize("give_up", ["told.set", "threading.Event().wait"])
def test_worker_that_waits_gives_up_its_place_after_the_grace(
    give_up: str, ended_by_sigterm: Ended
) -> None:
    code, log = ended_by_sigterm(
        f"""
        told = threading.Event()
        termination.end_after_batch({give_up})
        print("ready", flush=True)
        told.wait()
        threading.Event().wait()
        """,
        grace_s=0.1,
    )

    assert code == 143
    assert "not ended within 0.1 s after SIGTERM" in log


@pytest.mark.parametrize(
    ("call", "grace_s", "within_s"),
    [
        ("abort_at(lambda: (store, 1), wait_s=lambda: 0.5)", 1.0, "1"),
        ("end_after_batch(lambda: None, wait_s=lambda: 0.5)", 20.0, "1.5"),
    ],
)
def test_wait_for_worker_0_is_part_of_the_grace(
    call: str, grace_s: float, within_s: str, ended_by_sigterm: Ended
) -> None:
    """A place is given up soon after it: others wait for that."""
    code, log = ended_by_sigterm(
        f"""
        termination.{call}
        print("ready", flush=True)
        threading.Event().wait()
        """,
        grace_s=grace_s,
    )

    assert code == 143
    assert f"not ended within {within_s} s after SIGTERM" in log


def test_second_signal_does_not_make_a_worker_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a shell and of `ps-launch`."""
    from ctr_ps.ps_worker.run import termination

    now = [100.0]
    monkeypatch.setattr(termination, "time", SimpleNamespace(monotonic=lambda: now[0]))
    worker = termination.Termination()
    worker.end_after_batch(lambda: None, wait_s=lambda: 2.0)
    told = []

    for now[0] in (100.0, 101.9, 102.0):
        if now[0] < 102.0:
            worker._ask()
        told.append(worker.is_told_to_end)

    assert told == [False, False, True]


def test_error_without_a_signal_stays_what_it_is() -> None:
    from ctr_ps.ps_worker.run.termination import Termination

    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(OSError, match="disk"), Termination():
        raise OSError("the disk is gone")

    assert signal.getsignal(signal.SIGTERM) is before
