"""Commands of the roles: for a job, one each; for a script, the script itself."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Commands of all roles: of our own programs for a job, or of a script."""

    server: tuple[str, ...]
    worker: tuple[str, ...]
    heter: tuple[str, ...] = ()
    are_of_job: bool = False

    def with_setting(self, override: str) -> "Commands":
        """Returns these with one more `--set` for workers and heter trainers."""
        setting = ("--set", override)
        return replace(self, worker=(*self.worker, *setting), heter=(*self.heter, *setting))


def is_script(program: object) -> bool:
    """Whether a path names a script for both roles, not a job."""
    return str(program).endswith(".py")


def commands_of_script(
    script: Path, arguments: Sequence[str], of_jobs: Mapping[str, object]
) -> Commands:
    """Returns the commands of a script: the same for all roles, run by this Python.

    Args:
        script: A .py file.
        arguments: Arguments of the script.
        of_jobs: Values of the options that only jobs accept; false if not given.

    Raises:
        typer.BadParameter: If one of `of_jobs` was given.
    """
    if given := [option for option, value in of_jobs.items() if value]:
        raise typer.BadParameter(
            f"{', '.join(given)} is for jobs, but {str(script)!r} is a script: put the script's own "
            f"arguments after its name"
        )
    command = (sys.executable, str(script), *arguments)
    return Commands(server=command, worker=command, heter=command)


def commands_of_job(
    job: Path,
    arguments: Sequence[str],
    *,
    server: str,
    worker: str,
    heter: str,
    overrides: Sequence[str],
    as_json: bool,
) -> Commands:
    """Returns the commands of a job: workers and heter trainers get the job and its overrides.

    Args:
        job: A TOML file.
        arguments: Must be empty.
        server: Command line of a server.
        worker: Command line of a worker, before the job.
        heter: Command line of a heter trainer, before the job.
        overrides: Values of `--set`.
        as_json: Whether workers print their result as JSON.

    Raises:
        typer.BadParameter: If there are arguments, or a program is not installed.
    """
    if arguments:
        raise typer.BadParameter(
            f"{shlex.join(arguments)} follows a job: only a script (.py) has arguments of its own"
        )
    options = [word for override in overrides for word in ("--set", override)]
    options += ["--json"] if as_json else []
    return Commands(
        server=split_command(server),
        worker=(*split_command(worker), str(job), *options),
        heter=(*split_command(heter), str(job), *options),
        are_of_job=True,
    )


def split_command(line: str) -> tuple[str, ...]:
    """Splits a command line; the program is looked up next to this Python, then on PATH.

    Raises:
        typer.BadParameter: If there is no such program.
    """
    program, *arguments = shlex.split(line) or [""]
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise typer.BadParameter(
            f"no program {program!r} next to {sys.executable} or on PATH: is the package installed?"
        )
    return (found, *arguments)
