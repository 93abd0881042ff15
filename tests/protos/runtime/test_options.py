"""How a command ends."""

import subprocess
import sys

import pytest

COMMAND = """
import atexit, logging, sys, typer
from ctr_ps.protos.runtime.options import command_app, run_command
atexit.register(print, "the interpreter ends")
app = command_app()
@app.command()
def run(code: int) -> None:
    logging.basicConfig(stream=sys.stderr)
    logging.warning("logged")
    print("printed")
    raise typer.Exit(code)
run_command(app)
"""


@pytest.mark.parametrize(("given", "code"), [("0", 0), ("12", 12), ("x", 2)])
def test_a_command_ends_before_the_interpreter_does(given: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code
    assert ended.stdout == ("printed\n" if given != "x" else "")
    assert ("logged" if given != "x" else "a valid integer") in ended.stderr
