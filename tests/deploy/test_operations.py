"""docs/operations.md is complete: options, role variables, exit codes."""

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from ctr_ps.deploy import launch
from ctr_ps.deploy.plan import ROLE_VARIABLES
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.ps_server import cli as server_cli
from ctr_ps.ps_worker import cli as worker_cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()


def options_of(app: typer.Typer) -> set[str]:
    command = get_command(app)
    commands = [command, *getattr(command, "commands", {}).values()]
    parameters = [parameter for command in commands for parameter in command.params]
    return {name for parameter in parameters for name in parameter.opts if name.startswith("--")}


@pytest.mark.parametrize(
    ("title", "app"),
    [("ps-launch", launch.app), ("ps-server", server_cli.app), ("ps-worker", worker_cli.app)],
)
def test_every_option_has_its_row_and_every_row_its_option(title: str, app: typer.Typer) -> None:
    (section,) = re.findall(rf"^### {title}\n(.*?)^##", PAGE, re.MULTILINE | re.DOTALL)

    rows = set(re.findall(r"(?<=[|,] `)--[a-z_-]+(?=`)", section))

    assert rows == options_of(app) - {"--help"}


def test_every_role_variable_is_there() -> None:
    for name in ROLE_VARIABLES:
        assert f"`{name}`" in PAGE


def test_every_exit_code_of_an_error_is_there() -> None:
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}

    assert {error.exit_code for error in CtrPsError.__subclasses__()} <= rows
