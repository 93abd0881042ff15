"""The commands, as a person would run them: installed, as processes, or by entry point in this process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
COMMANDS = Path(sys.executable).parent
LIMIT_S = 300.0


def clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name != "TRAINING_ROLE" and not name.startswith(("PADDLE_", "POD_", "CTR_PS_"))
    }


def run(
    command: str, *arguments: object, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMANDS / command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
        env={**clean_environment(), **(environment or {})},
        check=False,
    )


def printed_by(
    program: str, *arguments: object, environment: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> str:
    """Runs the text of a Python program, which has to end well, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=cwd,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result_of(command: str, *arguments: object, cwd: Path = ROOT) -> dict[str, Any]:
    """Runs a command with `--json`; returns the object on the last line of its output."""
    done = run(command, *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def generated(folder: Path, **sizes: int) -> Path:
    """Writes planted clicks into a folder by `ps-data generate`, and returns it: rows=4000 and so on."""
    options = [f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()]
    done = run("ps-data", "generate", folder, *options)
    assert done.returncode == 0, done.stderr
    return folder


def invoked(
    app: typer.Typer, *arguments: object, environment: Mapping[str, str] | None = None
) -> Result:
    """Runs a command in this process, for what another process would show no better."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return CliRunner().invoke(app, [*map(str, arguments)], env=environment)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def result_here(app: typer.Typer, *arguments: object) -> dict[str, Any]:
    """As `result_of`, in this process."""
    done = invoked(app, *arguments, "--json")
    assert done.exit_code == 0, f"{done.stderr} {done.exception!r}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def in_this_process(
    command: str,
    main: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Done]:
    """Returns a function that calls the entry point of a command."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return call
