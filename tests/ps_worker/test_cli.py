"""The shell of `ps-worker`: how an error or a signal ends it."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import TransportError, UsageError
from ctr_ps.protos.runtime.logs import errors_as_exit_codes
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.publish import write_latest
from ctr_ps.ps_worker import cli
from ctr_ps.ps_worker.data.files.content import atomic_file
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import override_job
from tests.support.disks import mounting_at
from tests.support.stores import in_process
from tests.support.training import job_of


class _Writes(io.StringIO):
    """A stderr that keeps each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:  # click tries the stream with nothing
        self.writes.append(text)
        return super().write(text)


def test_error_is_one_write_so_that_no_log_line_can_come_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = _Writes()
    monkeypatch.setattr(sys, "stderr", stderr)

    with pytest.raises(SystemExit) as end, errors_as_exit_codes():
        raise TransportError("server 1 is away")

    assert list(filter(None, stderr.writes)) == ["error: server 1 is away\n"]
    assert end.value.code == TransportError.exit_code


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("saved", ["nowhere", "not yet", "once"])
def test_interruption_says_what_is_saved_and_how_to_go_on(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if saved == "once":
        store = in_process()
        store.save(SaveRequest(url=str(tmp_path / "step-5")))
        write_latest(tmp_path, "step-5")
    settings = [] if saved == "nowhere" else [f"checkpoint.dir={tmp_path}"]
    cli._tell_of_interruptions(override_job({}, settings, source="test"))

    for _ in range(2):  # the second is as without
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    told = {
        "nowhere": "nothing is saved: checkpoint.dir is not set",
        "not yet": f"there is no checkpoint in {tmp_path} yet",
        "once": f"the newest checkpoint is {tmp_path}/step-5; resume with --set checkpoint.resume=true",
    }[saved]
    assert capsys.readouterr().err == f"interrupted: {told}\n"


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("saves", [True, False])
def test_run_that_saves_nothing_says_so(
    saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(tmp_path, rows=20, test_rows=1, files=1, test_files=1, seed=1)
    settings = [f"checkpoint.dir={tmp_path}/model"] if saves else []
    job = job_of(f"data.train={tmp_path}/train/*", "model.hidden=[4]", *settings)

    cli._train(job, None, is_dry=False)

    said = "is lost when this run ends: set checkpoint.dir" in caplog.text
    assert said is not saves


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_full_disk_is_an_error_that_names_the_file(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(1).bytes(2**20)
    (tmp_path / "disk").mkdir()
    path = tmp_path / f"disk/out{suffix}"
    with mounting_at(tmp_path / "disk") as mount:
        mount("size=64k")
        with pytest.raises(SystemExit) as end, errors_as_exit_codes(), atomic_file(path) as file:
            file.write(random)
        assert list(path.parent.iterdir()) == []

    assert end.value.code == 17
    assert f"{str(path)!r}: No space left on device" in capsys.readouterr().err


def test_report_without_its_extra_names_it(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; from ctr_ps.ps_worker.cli import app; app()"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, "report", tmp_path],
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == UsageError.exit_code
    assert "needs matplotlib, which is not installed: pip install 'ctr-ps[report]'" in done.stderr
