"""What commands say of themselves: all of it, brackets included."""

import runpy
import sys

import pytest
from typer.testing import CliRunner

import ctr_ps
from ctr_ps.deploy import launch
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.runtime import options
from ctr_ps.ps_server import cli as server
from ctr_ps.ps_worker import cli as worker
from ctr_ps.ps_worker.extras.data_tools import cli as data
from ctr_ps.ps_worker.extras.inference_server import cli as serve
from ctr_ps.ps_worker.extras.watching import top
from ctr_ps.ps_worker.predict import checkpoint_cli as checkpoint


@pytest.mark.parametrize("module", [server, serve, worker, launch, checkpoint, data, top])
def test_brackets_in_help_are_no_markup(module) -> None:
    """Which an extra's name or an argument that may be left out would vanish in."""
    assert module.app.rich_markup_mode is None


@pytest.mark.parametrize("module", [server, serve])
def test_help_names_what_stands_in_brackets(module) -> None:
    shown = CliRunner().invoke(module.app, ["--help"]).output

    assert "[HOST:]PORT" in "".join(shown.split())


def test_examples_in_help_keep_their_lines() -> None:
    shown = CliRunner().invoke(worker.app, ["--help"], terminal_width=200).output

    lines = [line.strip() for line in shown.splitlines() if line.strip().startswith("ps-worker ")]
    assert len(lines) == 9
    assert any(line.startswith("ps-worker heter job.toml --device cuda  ") for line in lines)


@pytest.mark.parametrize("module", [server, serve, worker, launch, checkpoint, data, top])
def test_version_is_told_by_every_command(
    module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--version"])
    # Tests after this use threads, and what is done when objects are freed.
    monkeypatch.setattr(options.threading, "_shutdown", lambda: None)
    monkeypatch.setattr(options.atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(options.os, "_exit", sys.exit)

    with pytest.raises(SystemExit) as ended:
        module.main()

    assert ended.value.code in (None, 0)
    assert capsys.readouterr().out == f"ctr-ps {ctr_ps.__version__}, format {FORMAT}\n"


def test_package_is_run_for_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("ctr_ps", run_name="__main__")

    assert capsys.readouterr().out.startswith(f"ctr-ps {ctr_ps.__version__}: ps-data, ")
