"""The check of a command takes little time and memory, and leaves nothing behind."""

import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.errors import DataError
from ps_worker.data.user_code import command_probe
from ps_worker.data.user_code.command_probe import require_stable_command
from ps_worker.data.user_code.pipe_process import PipeProcess

SALTED = f"{sys.executable} -c 'import sys; [print(hash(line)) for line in sys.stdin]'"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(command_probe, "_probed", set())
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "part-0"
    path.write_text("user ad\n" * 10)
    return str(path)


def ends(pid: int) -> bool:
    """A killed process may take a moment to go."""
    path = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if path.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
    return False


def test_output_without_end_is_read_up_to_a_limit(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    output = command_probe._output

    def measured(command: str, lines: bytes, seed: str) -> bytes | None:
        found = output(command, lines, seed)
        sizes.append(len(found or b""))
        return found

    monkeypatch.setattr(command_probe, "_output", measured)

    require_stable_command("yes python", file)

    assert sizes == [command_probe._MAX_OUTPUT] * 2


def test_salted_output_without_end_is_refused(file: str) -> None:
    with pytest.raises(DataError, match="hash\\(\\) of text"):
        require_stable_command(f"{SALTED}; yes python", file)


def test_command_that_hangs_is_given_up_with_all_that_it_started(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_probe, "_LIMIT_S", 0.2)
    pids = tmp_path / "pids"

    require_stable_command(
        f"sleep 600 & echo $$ $! > {shlex.quote(str(pids))}; cat; wait; python", file
    )

    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_command_ends_when_its_reader_does(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C."""

    class Interrupted(PipeProcess):
        def chunks(self) -> Iterator[bytes]:
            next(super().chunks())
            raise KeyboardInterrupt

    monkeypatch.setattr(command_probe, "PipeProcess", Interrupted)
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $$ $! > {shlex.quote(str(pids))}; echo 1; wait; python"

    with pytest.raises(KeyboardInterrupt):
        require_stable_command(command, file)

    assert all(ends(int(pid)) for pid in pids.read_text().split())


def test_file_without_lines_leaves_the_check_to_the_next(file: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    require_stable_command(SALTED, f"{tmp_path}/empty")

    with pytest.raises(DataError, match="hash\\(\\) of text"):
        require_stable_command(SALTED, file)


def test_command_is_run_twice_once_and_the_log_says_so(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = f"echo run >> {shlex.quote(str(tmp_path / 'runs'))}; cat; true python"

    with caplog.at_level("INFO"):
        for _ in range(3):
            require_stable_command(command, file)

    assert (tmp_path / "runs").read_text() == "run\n" * 2
    assert caplog.text.count("running a command twice on the first lines of a file") == 1
    assert f"file={file}" in caplog.text
