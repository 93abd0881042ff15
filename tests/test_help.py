"""What commands say of themselves: all of it, brackets included."""

import pytest
from typer.testing import CliRunner

from ctr_ps.deploy import launch
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


@pytest.mark.parametrize(
    ("module", "text"),
    [(server, "[grpc-debug]"), (serve, "[grpc-debug]"), (launch, "[pushes|pulls|calls]")],
)
def test_help_names_what_stands_in_brackets(module, text: str) -> None:
    shown = CliRunner().invoke(module.app, ["--help"]).output

    assert text in "".join(shown.split())


def test_examples_in_help_keep_their_lines() -> None:
    shown = CliRunner().invoke(worker.app, ["--help"], terminal_width=200).output

    lines = [line.strip() for line in shown.splitlines() if line.strip().startswith("ps-worker ")]
    assert len(lines) == 9
    assert any(line.startswith("ps-worker heter job.toml --device cuda  ") for line in lines)
