"""A server in the process of a script: the one module of a worker's package that knows the server's shell."""

import sys
from collections.abc import Sequence

from protos.errors import CtrPsError
from protos.role import ServerRole
from ps_server.rpc.run import RunSettings, idle_limit, log_to_stderr, run_server

__all__ = ["idle_limit", "serve"]


def serve(
    role: ServerRole,
    *,
    load: str | None,
    bind: str | None,
    stay: bool,
    idle_limit_s: float | None,
    wait_limit_s: float,
    checkpoint_roots: Sequence[str],
) -> None:
    """Serves to the end; where `ps-server` would end with an exit code, this process does."""
    log_to_stderr()
    settings = RunSettings(
        load=load,
        bind=bind,
        stay=stay,
        idle_limit_s=idle_limit_s,
        wait_limit_s=wait_limit_s,
        checkpoint_roots=tuple(checkpoint_roots),
    )
    try:
        exit_code = run_server(role, settings)
    except CtrPsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error
    if exit_code:
        raise SystemExit(exit_code)
