"""A server in the process of a script: the one module of a worker's package that knows the server's shell."""

from protos.errors import CtrPsError
from protos.role import ServerRole
from protos.runtime.logs import configure_logs, log_error
from ps_server.rpc.run import run_server
from ps_server.settings import ServerSettings


def serve(role: ServerRole, settings: ServerSettings) -> None:
    """Serves to the end; where `ps-server` would end with an exit code, this process does."""
    try:
        configure_logs()
        exit_code = run_server(role, settings)
    except CtrPsError as error:
        log_error(error)
        raise SystemExit(error.exit_code) from error
    if exit_code:
        raise SystemExit(exit_code)
