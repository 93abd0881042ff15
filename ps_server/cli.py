"""`ps-server`: one server of a cluster.

    TRAINING_ROLE=PSERVER PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:7164 PADDLE_TRAINERS_NUM=1 \
        POD_IP=127.0.0.1 PADDLE_PORT=7164 ps-server
    ps-server --load checkpoint    # load saved parameters
    ps-server --check              # health check, with the same environment

Exit codes are those of protos/errors.py; SIGTERM ends a server cleanly, with 0, and SIGINT with 130.
"""

import logging
import os
from typing import Annotated

import typer

from ctr_ps.protos.errors import RoleError
from ctr_ps.protos.role import ROLE, SERVERS, ServerRole, role_from_environment
from ctr_ps.protos.runtime.logs import configure_logs, errors_as_exit_codes
from ctr_ps.protos.runtime.options import (
    Insecure,
    LogFormatOption,
    LogLevelOption,
    Metrics,
    command_app,
    run_command,
)
from ctr_ps.ps_server.rpc.run import run_server
from ctr_ps.ps_server.settings import LogSync, ServerSettings, bytes_of_size

logger = logging.getLogger(__name__)

app = command_app()

CHECK_LIMIT_S = 3.0
DEFAULTS = ServerSettings()


@app.command()
def run(
    load: Annotated[
        str | None, typer.Option(help="Checkpoint to load at start; default: fresh parameters.")
    ] = DEFAULTS.load,
    spare: Annotated[
        bool,
        typer.Option(
            "--spare",
            help="Wait for `ps-cluster add` if this server is not in PADDLE_PSERVERS_IP_PORT_LIST.",
        ),
    ] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Serve the next job after all workers have left.")
    ] = DEFAULTS.stay,
    idle_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=(
                "Seconds without a call after which the server exits with code 9; 0: never; default: 600, "
                "with --stay never."
            ),
        ),
    ] = DEFAULTS.idle_limit_s,
    wait_limit: Annotated[
        float, typer.Option(min=0, help="Seconds that a worker may wait for other workers.")
    ] = DEFAULTS.wait_limit_s,
    checkpoint_root: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or URL outside of which nothing is saved or loaded; repeatable; default: no limit."
        ),
    ] = None,
    update_log: Annotated[
        str | None,
        typer.Option(
            help="Folder of the update log, from which a restarted server recovers; default: none."
        ),
    ] = DEFAULTS.update_log,
    log_sync: Annotated[
        LogSync,
        typer.Option(
            help="Answered calls survive a crash of the process (os) or of the machine (fsync)."
        ),
    ] = LogSync.OS,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=(
                "Memory limit of all tables, such as 8G; above it, pushes with new rows are refused; "
                "default: none."
            ),
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help=(
                "Address to listen on; default: loopback if POD_IP is a loopback address, else all "
                "addresses of its IP version."
            )
        ),
    ] = DEFAULTS.bind,
    insecure: Insecure = DEFAULTS.insecure,
    stream_port: Annotated[
        int,
        typer.Option(
            min=-1,
            max=65535,
            help="Port of the stream for calls that move data; 0: a free one; -1: gRPC alone.",
        ),
    ] = 0,
    metrics: Metrics = DEFAULTS.metrics,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
    sigterm_exit_code: Annotated[
        int,
        typer.Option(
            help=(
                "Exit code after SIGTERM; set 143 if only failed processes are restarted, as in a "
                "Kubernetes Job."
            )
        ),
    ] = DEFAULTS.sigterm_exit_code,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Health check of the running server: exit code 0 if it serves, else 1."
        ),
    ] = False,
) -> None:
    """Run one parameter server of a cluster; the environment sets its address and the cluster."""
    with errors_as_exit_codes():
        configure_logs(log_format, log_level)
        role = role_from_environment(os.environ, may_be_spare=spare)
        if not isinstance(role, ServerRole):
            raise RoleError(f"{ROLE} is {os.environ.get(ROLE)!r}, a server needs PSERVER")
        if check:
            # Imported here, and not the server with numba and all: a health check runs every few seconds.
            from ctr_ps.ps_server.rpc.health import why_not_serving

            if fault := why_not_serving(role.endpoint, CHECK_LIMIT_S):
                typer.echo(f"no server serves at {role.endpoint}: {fault}", err=True)
            exit_code = 1 if fault else 0
        else:
            settings = ServerSettings(
                load=load,
                bind=bind,
                stay=stay,
                idle_limit_s=idle_limit,
                wait_limit_s=wait_limit,
                memory_limit=None if memory_limit is None else bytes_of_size(memory_limit),
                checkpoint_roots=tuple(checkpoint_root or ()),
                update_log=update_log,
                log_sync=log_sync,
                insecure=insecure,
                stream_port=None if stream_port < 0 else stream_port,
                metrics=metrics,
                sigterm_exit_code=sigterm_exit_code,
            )
            if spare and not role.is_spare:
                logger.info("this server is no spare: its address is in %s", SERVERS)
            exit_code = run_server(role, settings)
    raise typer.Exit(exit_code)


def main() -> None:
    """Runs the command."""
    run_command(app)


if __name__ == "__main__":
    main()
