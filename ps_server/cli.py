"""`ps-server`: one server of a cluster.

    TRAINING_ROLE=PSERVER PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:7164 PADDLE_TRAINERS_NUM=1 \
        POD_IP=127.0.0.1 PADDLE_PORT=7164 ps-server
    ps-server --load checkpoint    # start with saved parameters
    ps-server --check              # is it serving? (same environment)

Exit codes are those of protos/errors.py; SIGTERM ends a server cleanly, with 0, and SIGINT with 130.
"""

import os
from typing import Annotated

import typer

from ctr_ps.protos.errors import RoleError
from ctr_ps.protos.role import ROLE, ServerRole, role_from_environment
from ctr_ps.protos.runtime.environment import arguments
from ctr_ps.protos.runtime.logs import LogFormat, LogLevel, configure_logs, errors_as_exit_codes
from ctr_ps.ps_server.rpc.run import run_server
from ctr_ps.ps_server.settings import LogSync, ServerSettings, bytes_of_size

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

CHECK_LIMIT_S = 3.0
DEFAULTS = ServerSettings()


@app.command()
def run(
    load: Annotated[
        str | None, typer.Option(help="Checkpoint to start with; default: fresh parameters.")
    ] = DEFAULTS.load,
    stay: Annotated[
        bool, typer.Option("--stay", help="Serve the next job when all workers have left.")
    ] = DEFAULTS.stay,
    idle_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds without any call after which to end with exit code 9, 0 for never; "
            "default: 600, with --stay never.",
        ),
    ] = DEFAULTS.idle_limit_s,
    wait_limit: Annotated[
        float, typer.Option(min=0, help="Seconds that a worker may wait for the others.")
    ] = DEFAULTS.wait_limit_s,
    checkpoint_root: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder or URL in which alone to save and load; repeatable; default: anywhere."
        ),
    ] = None,
    update_log: Annotated[
        str | None,
        typer.Option(
            help="Folder of the update log, with which this server, once restarted, goes on where it was; "
            "default: none."
        ),
    ] = DEFAULTS.update_log,
    log_sync: Annotated[
        LogSync,
        typer.Option(
            help="What an acknowledged call survives: os: the end of the process, fsync: of the machine."
        ),
    ] = LogSync.OS,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of all tables, as 8G, from which on a push that would create rows is refused; "
            "default: no limit.",
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help="Address to bind; default: loopback if POD_IP is that, else all interfaces of its kind."
        ),
    ] = DEFAULTS.bind,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve whoever reaches an address that is not loopback, without tokens and certificates.",
        ),
    ] = DEFAULTS.insecure,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /metrics for Prometheus at this address, loopback without a host; default: what "
            "CTR_PS_METRICS says, else nowhere.",
        ),
    ] = DEFAULTS.metrics,
    metrics_per_worker: Annotated[
        bool,
        typer.Option("--metrics-per-worker", help="Also metrics with a label for each worker."),
    ] = DEFAULTS.metrics_per_worker,
    grpc_debug: Annotated[
        bool,
        typer.Option(
            "--grpc-debug",
            help="Answer gRPC's reflection and channelz, for grpcurl and grpcdebug: the extra [grpc-debug].",
        ),
    ] = DEFAULTS.grpc_debug,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Lines for people or objects for machines; default: CTR_PS_LOG_FORMAT, text."
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="The least important events; default: CTR_PS_LOG_LEVEL, info."),
    ] = None,
    sigterm_exit_code: Annotated[
        int,
        typer.Option(
            help="Exit code after SIGTERM; 143 where something has to start the server again, as a Job of "
            "Kubernetes, for which 0 is the end of the server's work."
        ),
    ] = DEFAULTS.sigterm_exit_code,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only ask the running server: exit 0 if it serves, else 1."),
    ] = False,
) -> None:
    """Holds parameters and applies gradients: the server that the environment says this is."""
    with errors_as_exit_codes():
        configure_logs(log_format, log_level)
        role = _server_role()
        if check:
            exit_code = _check(role)
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
                metrics=metrics,
                metrics_per_worker=metrics_per_worker,
                grpc_debug=grpc_debug,
                sigterm_exit_code=sigterm_exit_code,
            )
            exit_code = run_server(role, settings)
    raise typer.Exit(exit_code)


def _server_role() -> ServerRole:
    role = role_from_environment(os.environ)
    if not isinstance(role, ServerRole):
        raise RoleError(f"{ROLE} is {os.environ.get(ROLE)!r}, a server needs PSERVER")
    return role


def _check(role: ServerRole) -> int:
    """Asks the server of this environment, and says why it does not serve; returns the exit code."""
    # Imported here, and not the server with numba and all: a health check runs every few seconds.
    from ctr_ps.ps_server.rpc.health import why_not_serving

    if fault := why_not_serving(role.endpoint, CHECK_LIMIT_S):
        typer.echo(f"no server serves at {role.endpoint}: {fault}", err=True)
        return 1
    return 0


def main() -> None:
    """Runs the command."""
    app(arguments())


if __name__ == "__main__":
    main()
