"""How a command ends."""

import subprocess
import sys

import pytest

COMMAND = """
import atexit, logging, os, sys, threading, time, typer
from ctr_ps.protos.runtime.options import command_app, run_command
class Tidied:
    def __del__(self) -> None:
        os.write(1, b"the interpreter ends")
tidied = Tidied()
atexit.register(print, "at exit")
def write() -> None:
    time.sleep(0.2)
    print("thread")
app = command_app()
@app.command()
def run(code: int) -> None:
    logging.basicConfig(stream=sys.stderr)
    logging.warning("logged")
    print("printed")
    threading.Thread(target=write).start()
    if code == 1:
        raise SystemExit("a text")
    raise typer.Exit(code)
run_command(app)
"""


@pytest.mark.parametrize(("given", "code"), [("0", 0), ("12", 12), ("x", 2), ("1", 1)])
def test_a_command_ends_before_the_interpreter_does(given: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code
    ran = "printed\nthread\n" if given != "x" else ""
    assert ended.stdout == f"{ran}at exit\n"
    assert ("logged" if given != "x" else "a valid integer") in ended.stderr
    assert ("a text" in ended.stderr) == (given == "1")
