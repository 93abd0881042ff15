"""What the commands have in common: the settings of typer, options of several, and the end of a process."""

import atexit
import os
import sys
import threading
from typing import Annotated, NoReturn

import typer

from ctr_ps.protos.runtime.environment import arguments
from ctr_ps.protos.runtime.logs import LogFormat, LogLevel

LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format",
        help="One text line or JSON object per event; default: CTR_PS_LOG_FORMAT, else text.",
    ),
]
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="Lowest level to log; default: CTR_PS_LOG_LEVEL, else info."),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Address of Prometheus metrics and status page; host defaults to loopback; default: "
        "CTR_PS_METRICS, else none.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Serve a non-loopback address without credentials."),
]


def command_app(help: str | None = None) -> typer.Typer:
    """Returns an app for commands; with `help` it has several, and shows it where none is named."""
    return typer.Typer(
        help=help,
        no_args_is_help=help is not None,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def run_command(app: typer.Typer) -> NoReturn:
    """Runs the command line, and ends the process without the half second in which an interpreter tidies up.

    A server whose job is over has no log any more, and a worker has left: if one is killed then, and started
    again, it waits for the others.
    """
    try:
        app(arguments())
        code: object = 0
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # What an interpreter does for others first, in its order.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
