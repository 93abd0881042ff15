"""A server in the process of a script: the one module of a worker's package that knows the server's shell."""

import sys

from protos.errors import CtrPsError
from protos.role import ServerRole
from ps_server.rpc.run import log_to_stderr, run_server
from ps_server.settings import ServerSettings


def serve(role: ServerRole, settings: ServerSettings) -> None:
    """Serves to the end; where `ps-server` would end with an exit code, this process does."""
    log_to_stderr()
    try:
        exit_code = run_server(role, settings)
    except CtrPsError as error:
        sys.stderr.write(f"error: {error}\n")  # one write, as in ps-worker
        raise SystemExit(error.exit_code) from error
    if exit_code:
        raise SystemExit(exit_code)
