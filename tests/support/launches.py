"""Launches of stand-ins for servers and workers, in the test's process."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ctr_ps.deploy.cluster import Terminal, to_descriptor
from ctr_ps.deploy.launcher import Launch, run
from ctr_ps.deploy.plan import Commands
from ctr_ps.deploy.supervisor import Policy


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", program)


def terminal_at(descriptor: int) -> Terminal:
    """Returns a terminal whose output goes to one file."""
    return Terminal(to_descriptor(descriptor), to_descriptor(descriptor))


@contextmanager
def warnings_open(pipe: str) -> Iterator[None]:
    """Each warning of a launcher in this process opens a named pipe for a moment."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                Path(pipe).write_text("")

    handler = Said()
    logging.getLogger("ps-launch").addHandler(handler)
    yield
    logging.getLogger("ps-launch").removeHandler(handler)


def launched_here(
    server: str,
    worker: str,
    *,
    num_servers: int = 1,
    num_workers: int = 1,
    checkpoints: str = "",
    grace_seconds: float = 10.0,
    waits_for_lost: bool = True,
    **policy: Any,
) -> tuple[int, str]:
    """Runs a launch of programs' texts; returns its exit code and the output of trainer 0.

    `policy` are fields of `Policy`, the rest is as for `Launch`. Logs are in `log`.
    """
    with Path("shown").open("wb") as shown:
        launch = Launch(
            commands=Commands(server=python(server), worker=python(worker), are_of_job=True),
            num_servers=num_servers,
            num_workers=num_workers,
            log_dir=Path("log"),
            policy=Policy(**policy),
            waits_for_lost=waits_for_lost,
            checkpoints=checkpoints,
            grace_seconds=grace_seconds,
        )
        code = run(launch, terminal_at(shown.fileno()))
    return code, Path("shown").read_text()
