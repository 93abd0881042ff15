"""One run at a time has a folder of checkpoints, and who takes over from a dead one is alone."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError, JobError
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints import claim as claims
from ctr_ps.ps_worker.checkpoints.claim import OWNER, Claim, Owner, claimed
from ctr_ps.ps_worker.job import Job
from tests.support.s3 import BUCKET
from tests.support.training import job
from tests.support.waiting import wait_until

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    monkeypatch.setattr(claims, "EXPIRY_S", 0.2)
    monkeypatch.setattr(claims, "_POLL_S", 0.02)
    monkeypatch.setattr(claims, "_SETTLE_S", 0.05)


def job_in(folder: Path | str) -> Job:
    return job("sync", f"checkpoint.dir={folder}")


def claim_of(folder: Path | str, *, is_of_this_run: bool = False, servers: str = "a:1"):
    return claimed(job_in(folder), is_of_this_run=is_of_this_run, servers=[servers])


def test_folder_is_of_one_run_at_a_time_and_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with claim_of(folder) as first:
        assert first is not None
        with pytest.raises(JobError) as refused, claim_of(folder):
            pass
        first.require()
    assert f"checkpoint.dir: {folder} is in use by another live run, process" in str(refused.value)
    assert f"process {os.getpid()} on " in str(refused.value)
    assert str(refused.value).endswith(f"remove {folder}/OWNER")

    assert list(folder.iterdir()) == []
    with claim_of(folder):
        pass
    with claimed(job("sync"), is_of_this_run=False) as none:
        assert none is None


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "another of its pid"])
def test_claim_of_a_process_that_is_gone_is_taken_over_at_once(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "EXPIRY_S", LIMIT_S)  # is not waited for
    if is_killed:
        code = (
            "import os, sys; from pathlib import Path; from ctr_ps.ps_worker.checkpoints.claim import Owner\n"
            "Path(sys.argv[1]).write_bytes(Owner.this().to_json())"
        )
        subprocess.run([sys.executable, "-c", code, tmp_path / OWNER], check=True)
    else:
        (tmp_path / OWNER).write_bytes(replace(Owner.this(), started="0").to_json())

    with claim_of(tmp_path) as claim:
        assert claim is not None
        claim.require()


@contextmanager
def elsewhere(folder: Path | str, *, pid_space: str = ""):
    """A claim of a process on another machine, of whose number another one may be here."""
    root = folder_at(folder)
    owner = replace(Owner.this(), pid_space=pid_space, host="other", started="0")
    root.create_new(OWNER, owner.to_json())
    claim = Claim(root, owner)
    try:
        yield claim
    finally:
        claim.release()


@pytest.mark.parametrize("pid_space", ["", "another boot"])
def test_process_elsewhere_is_alive_while_its_file_changes(pid_space: str, tmp_path: Path) -> None:
    with (
        elsewhere(tmp_path, pid_space=pid_space),
        pytest.raises(JobError, match=r"live run, process .* on other"),
        claim_of(tmp_path),
    ):
        pass


def test_process_that_the_system_hides_is_alive_while_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a mount of /proc with hidepid=2 does to those of other users."""
    with claim_of(tmp_path):
        monkeypatch.setattr(claims, "_state_and_start", lambda _: ("", ""))
        with pytest.raises(JobError, match="another live run"), claim_of(tmp_path):
            pass


@pytest.mark.parametrize("content", [None, b"", b"[1"], ids=["silent", "empty", "damaged"])
def test_process_elsewhere_that_is_silent_is_taken_over_from(
    content: bytes | None, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        if content is None:
            (tmp_path / OWNER).write_bytes(replace(Owner.this(), pid_space="").to_json())
        else:
            (tmp_path / OWNER).write_bytes(content)
        claim = stack.enter_context(claim_of(tmp_path))
        assert claim is not None
        claim.require()
    assert list(tmp_path.iterdir()) == []


def test_replacement_shares_the_claim_of_its_run(tmp_path: Path) -> None:
    """The lost process may come back, and neither is refused nor gives the folder back."""
    with claim_of(tmp_path) as lost, ExitStack() as stack:
        replacement = stack.enter_context(claim_of(tmp_path, is_of_this_run=True))
        assert lost is not None
        assert replacement is not None
        replacement.require()
        lost.require()
        lost.release()
        replacement.require()
        with pytest.raises(JobError), claim_of(tmp_path):
            pass


def test_run_whose_folder_was_taken_over_is_told(tmp_path: Path) -> None:
    with claim_of(tmp_path) as paused:
        assert paused is not None
        other = replace(Owner.this(), host="other")
        (tmp_path / OWNER).write_bytes(other.to_json())

        with pytest.raises(
            CheckpointError, match=r"now belongs to another run, process .* on other"
        ):
            paused.require()
    assert Owner.from_json((tmp_path / OWNER).read_bytes()) == other


@pytest.mark.parametrize("storage", ["local", "memory", "s3"])
@pytest.mark.parametrize("is_dead_there", [False, True])
def test_of_several_that_come_at_once_one_has_the_folder(
    is_dead_there: bool, storage: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = str(tmp_path)
    if storage == "s3":
        request.getfixturevalue("s3")
        folder = f"s3://{BUCKET}{tmp_path}"
    elif storage == "memory":
        folder = f"memory:/{tmp_path}"
    if is_dead_there:
        folder_at(folder).put(OWNER, replace(Owner.this(), started="0").to_json())
    together, ended = threading.Barrier(4), threading.Barrier(4)

    def run(_: int) -> bool:
        together.wait(LIMIT_S)
        has_it = False
        try:
            with claim_of(folder) as claim:
                ended.wait(LIMIT_S)
                assert claim is not None
                claim.require()
                has_it = True
                ended.wait(LIMIT_S)
        except JobError:
            ended.wait(LIMIT_S)
            ended.wait(LIMIT_S)
        except CheckpointError:
            ended.wait(LIMIT_S)
        return has_it

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(run, range(4))) == 1


def test_claim_whose_file_was_removed_is_made_again(tmp_path: Path) -> None:
    """As an error message says to do for a process that no longer exists, by one who errs."""
    with claim_of(tmp_path) as claim:
        assert claim is not None
        (tmp_path / OWNER).unlink()
        claim.require()

        wait_until((tmp_path / OWNER).exists, LIMIT_S)
        with (
            pytest.raises(JobError, match="in use by another live run"),
            claim_of(tmp_path),
        ):
            pass


def test_folder_whose_claim_cannot_be_read_any_more_is_not_saved_into(tmp_path: Path) -> None:
    with claim_of(tmp_path) as claim:
        assert claim is not None
        (tmp_path / OWNER).write_bytes(b"of another release")

        with pytest.raises(
            CheckpointError, match="now belongs to another run, of an unknown process"
        ):
            claim.require()


def test_process_that_is_stopped_may_go_on(tmp_path: Path) -> None:
    """It is waited for as one elsewhere."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
            owner = replace(Owner.this(), pid=process.pid, started=started)
            assert owner.is_gone_beside(Owner.this()) is False

            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

            assert owner.is_gone_beside(Owner.this()) is None
        finally:
            process.kill()
    assert owner.is_gone_beside(Owner.this()) is True


def test_process_in_a_lost_ones_place_takes_no_claim_of_another_run(tmp_path: Path) -> None:
    """Another job may have claimed the folder while the place was empty."""
    with claim_of(tmp_path, servers="b:1") as other:
        with (
            pytest.raises(JobError, match="is in use by another live run"),
            claim_of(tmp_path, is_of_this_run=True, servers="a:1"),
        ):
            pass
        assert other is not None
        other.require()
