"""`ps-launch`: a cluster on this machine, each server and worker a process with a log file.

Examples:
    ps-launch --server-num 2 --worker-num 2 examples/demo.toml
    ps-launch --server-num 2 --worker-num 2 --json job.toml --set train.epochs=2 | tail -n 1
    ps-launch --server-num 1 --worker-num 2 examples/ctr_dnn.py --epochs 2
"""

import contextlib
import logging
import socket
import sys
import textwrap
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from deploy.cluster import (
    ClusterError,
    Events,
    LocalCluster,
    StillRunningError,
    Terminal,
    signals_as_events,
)
from deploy.plan import server_specs, worker_specs
from deploy.programs import Commands, commands_of_job, commands_of_script, is_script

HOST = "127.0.0.1"
SERVER_COMMAND = f"ps-server --bind {HOST}"
WORKER_COMMAND = "ps-worker train"
CANNOT_BIND = 3  # exit code of a server whose port is taken
ABORTED = 12  # exit code of a worker that another one has ended by its error
TAIL_LINES = 20
TAIL_BYTES = 1 << 16

log = logging.getLogger("ps-launch")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A cluster to run: commands, number of processes, and time limits."""

    commands: Commands
    num_servers: int
    num_workers: int
    log_dir: Path
    server_exit_seconds: float = 30.0
    grace_seconds: float = 10.0
    notice_seconds: float = 10.0
    cause_seconds: float = 5.0


def run(launch: Launch, terminal: Terminal) -> int:
    """Runs a cluster to its end and returns the exit code: 0, or that of the first failure.

    `terminal` shows the output of trainer 0. If another program takes a server's port between its release
    here and the server's bind, the cluster is started once more.
    """
    code = _run_once(launch, terminal)
    if code == CANNOT_BIND:
        log.warning("a port was taken by another program: starting again with other ports")
        code = _run_once(launch, terminal)
    return code


def _run_once(launch: Launch, terminal: Terminal) -> int:
    events = Events()
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    with (
        signals_as_events(events),
        LocalCluster(
            launch.log_dir,
            events,
            grace_seconds=launch.grace_seconds,
            notice_seconds=launch.notice_seconds,
        ) as cluster,
    ):
        try:
            servers, workers = _start(launch, cluster, terminal)
            cluster.wait_for(workers)
            cluster.wait_for(servers, launch.server_exit_seconds)
        except ClusterError as failure:
            reason = _cause_of(failure, cluster, launch.cause_seconds)
            log.error("%s: stopping all processes", reason)
            cluster.stop()
            if reason.log_path:
                log.error("the end of %s:\n%s", reason.log_path, tail(reason.log_path))
            return reason.exit_code
    return 0


def _cause_of(failure: ClusterError, cluster: LocalCluster, seconds: float) -> ClusterError:
    """Returns the failure that has ended the job: a worker that another one ended may exit before it."""
    cause = failure
    while cause.exit_code == ABORTED:
        try:
            cluster.wait_for(cluster.running, seconds)
        except StillRunningError:
            return failure
        except ClusterError as other:
            cause = other
        else:
            return failure
    return cause


def _start(
    launch: Launch, cluster: LocalCluster, terminal: Terminal
) -> tuple[list[str], list[str]]:
    """Starts all servers, then all workers, and returns the names of both."""
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(free_port()) for _ in range(launch.num_servers)]
        endpoints = [f"{HOST}:{port.getsockname()[1]}" for port in ports]
        servers = server_specs(launch.commands.server, endpoints, launch.num_workers)
        workers = worker_specs(launch.commands.worker, endpoints, launch.num_workers)
        log.info(
            "servers %s, %d workers, logs in %s", ",".join(endpoints), len(workers), launch.log_dir
        )
        for spec, port in zip(servers, ports, strict=True):
            port.close()
            cluster.start(spec)
    for spec in workers:
        cluster.start(spec, terminal if spec is workers[0] else None)
    return [spec.name for spec in servers], [spec.name for spec in workers]


def free_port() -> socket.socket:
    """Returns a socket bound to a free port, which is reserved until the socket is closed."""
    held = socket.socket()
    held.bind((HOST, 0))
    return held


def tail(path: Path) -> str:
    """Returns the last lines of a log file, indented."""
    with path.open("rb") as lines:
        lines.seek(max(0, path.stat().st_size - TAIL_BYTES))
        last = deque(lines, TAIL_LINES)
    text = b"".join(last).decode(errors="replace").rstrip() or "(it is empty)"
    return textwrap.indent(text, "    ")


class _LaunchCommand(TyperCommand):
    """Passes everything after a script to the script; after a job, options are the launcher's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Finds the program first, which decides whether options may follow it."""
        ctx.allow_interspersed_args = False
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not is_script(found["program"])
        return super().parse_args(ctx, args)


@app.command(cls=_LaunchCommand)
def command(
    program: Annotated[
        Path,
        typer.Argument(
            help="Job file (TOML), or a script for both roles (.py).",
            metavar="JOB.toml|SCRIPT.py",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script: everything after it.")
    ] = None,
    server_num: Annotated[int, typer.Option(min=1, help="Number of server processes.")] = 1,
    worker_num: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    log_dir: Annotated[Path, typer.Option(file_okay=False, help="Folder of the log files.")] = Path(
        "log"
    ),
    json: Annotated[
        bool, typer.Option("--json", help="Print the result of trainer 0 as JSON in the last line.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job; repeatable."),
    ] = None,
    server_command: Annotated[
        str | None, typer.Option(help=f"Command of a job's servers; default: {SERVER_COMMAND}.")
    ] = None,
    worker_command: Annotated[
        str | None,
        typer.Option(
            help="Command of a job's workers, before the job and its overrides; "
            f"default: {WORKER_COMMAND}."
        ),
    ] = None,
) -> None:
    """Train a job or run a script on this machine, with servers and workers as processes."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    if is_script(program):
        of_jobs = {
            "--set": settings,
            "--json": json,
            "--server-command": server_command,
            "--worker-command": worker_command,
        }
        commands = commands_of_script(program, arguments or (), of_jobs)
    else:
        commands = commands_of_job(
            program,
            arguments or (),
            server=server_command or SERVER_COMMAND,
            worker=worker_command or WORKER_COMMAND,
            overrides=settings or (),
            as_json=json,
        )
    launch = Launch(
        commands=commands,
        num_servers=server_num,
        num_workers=worker_num,
        log_dir=log_dir,
    )
    raise typer.Exit(run(launch, Terminal(sys.stdout.fileno(), sys.stderr.fileno())))


def main() -> None:
    """Entry point of `ps-launch`."""
    app()


if __name__ == "__main__":
    main()
