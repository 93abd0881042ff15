"""`ps-server`: one server of a cluster.

    TRAINING_ROLE=PSERVER PADDLE_PSERVERS_IP_PORT_LIST=127.0.0.1:7164 PADDLE_TRAINERS_NUM=1 \
        POD_IP=127.0.0.1 PADDLE_PORT=7164 ps-server
    ps-server --load checkpoint    # begin with saved parameters
    ps-server --check              # is it serving? (same environment)

Exit codes are those of protos/errors.py; SIGTERM ends a server cleanly, with 0, and SIGINT with 130.
"""

import asyncio
import logging
import os
import signal
import sys
from typing import Annotated

import typer

from protos.errors import CtrPsError, RoleError
from protos.memory import keep_freed_memory
from protos.role import ROLE, ServerRole, role_from_environment

logger = logging.getLogger(__name__)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DEFAULT_IDLE_LIMIT_S = 600.0
DEFAULT_WAIT_LIMIT_S = 600.0
CHECK_LIMIT_S = 3.0


@app.command()
def run(
    load: Annotated[
        str | None, typer.Option(help="Checkpoint to begin with; default: fresh parameters.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Go on for the next job when all workers are done.")
    ] = False,
    idle_limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds without any call after which to end with exit code 9, 0 for never; "
            "default: 600, with --stay never.",
        ),
    ] = None,
    wait_limit: Annotated[
        float, typer.Option(min=0, help="Seconds that a worker may wait for the others.")
    ] = DEFAULT_WAIT_LIMIT_S,
    bind: Annotated[
        str, typer.Option(help="Address to bind; default: all IPv4 interfaces, :: for IPv6 too.")
    ] = "0.0.0.0",
    check: Annotated[
        bool,
        typer.Option("--check", help="Only ask the running server: exit 0 if it serves, else 1."),
    ] = False,
) -> None:
    """Holds parameters and applies gradients: the server that the environment says this is."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        role = _server_role()
        if check:
            exit_code = _check(role)
        else:
            idle_limit_s = _idle_limit_s(idle_limit, stay)
            exit_code = _serve(role, bind, stay, idle_limit_s, wait_limit, load)
    except CtrPsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    raise typer.Exit(exit_code)


def _server_role() -> ServerRole:
    role = role_from_environment(os.environ)
    if not isinstance(role, ServerRole):
        raise RoleError(f"{ROLE} is {os.environ.get(ROLE)!r}, a server needs PSERVER")
    return role


def _idle_limit_s(option: float | None, stay: bool) -> float | None:
    if option is None:
        return None if stay else DEFAULT_IDLE_LIMIT_S
    return option or None


def _check(role: ServerRole) -> int:
    """Asks the server of this environment; returns the exit code."""
    # Imported here, and not the server with numba and all: a health check runs every few seconds.
    from ps_server.health import is_serving

    return 0 if is_serving(role.endpoint, CHECK_LIMIT_S) else 1


def _serve(
    role: ServerRole,
    bind: str,
    stay: bool,
    idle_limit_s: float | None,
    wait_limit_s: float,
    load: str | None,
) -> int:
    """Serves to the end; returns the exit code."""
    # Until the loop takes over: a container's first process ignores SIGTERM otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keep_freed_memory()
    from ps_server.server import Server, ServerSettings, serve
    from ps_server.store import ParameterStore
    from ps_server.warm import warm_kernels

    logger.info("kernels ready seconds=%.1f", warm_kernels())
    store = ParameterStore(
        num_workers=role.num_workers,
        server_index=role.server_index,
        num_servers=role.num_servers,
        wait_limit_s=wait_limit_s,
    )
    if load is not None:
        store.load(load)
        logger.info("loaded folder=%s", load)

    def on_start(server: Server, port: int) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.end, number.name)
        logger.info(
            "serving server=%d servers=%s workers=%d bind=%s port=%d",
            role.server_index,
            ",".join(role.endpoints),
            role.num_workers,
            bind,
            port,
        )

    address = f"[{bind}]:{role.port}" if ":" in bind else f"{bind}:{role.port}"
    settings = ServerSettings(address=address, stay=stay, idle_limit_s=idle_limit_s)
    reason = asyncio.run(serve(store, settings, on_start))
    logger.info("ended reason=%r", reason)
    return 128 + signal.SIGINT if reason == signal.SIGINT.name else 0


def main() -> None:
    """Runs the command."""
    app()


if __name__ == "__main__":
    main()
