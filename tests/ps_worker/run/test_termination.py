"""SIGTERM of a worker: wherever it is, it ends, with 143."""

import signal
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.processes import started

LIMIT_S = 60.0
PROGRAM = """
import threading
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.run.termination import Termination

store = ParameterStore(num_workers=2)
with Termination(grace_s={grace_s}) as termination:
    {body}
"""


def ended_by_sigterm(body: str, *, grace_s: float) -> tuple[int, str]:
    """Runs a worker, sends SIGTERM when it prints a line; returns its exit code and what it said."""
    program = PROGRAM.format(
        grace_s=grace_s, body=textwrap.indent(textwrap.dedent(body), "    ").strip()
    )
    with started([sys.executable, "-c", program]) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        worker.send_signal(signal.SIGTERM)
        _, log = worker.communicate(timeout=LIMIT_S)
    return worker.returncode, log


def test_call_that_waits_fails_and_the_worker_unwinds(tmp_path: Path) -> None:
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
def test_worker_that_does_not_end_is_ended(has_begun: bool) -> None:
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


def test_worker_whose_job_goes_on_ends_after_its_batch() -> None:
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
def test_job_goes_on_while_worker_0_saves(ends_after_batch: bool) -> None:
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
def test_worker_that_waits_gives_up_its_place_after_the_grace(give_up: str) -> None:
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
def test_wait_for_worker_0_is_part_of_the_grace(call: str, grace_s: float, within_s: str) -> None:
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
