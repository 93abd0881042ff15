"""A server in the process of a script: the one module of a worker's package that knows the server's shell."""

from ctr_ps.protos.role import ServerRole
from ctr_ps.protos.runtime.logs import configure_logs, errors_as_exit_codes
from ctr_ps.ps_server.rpc.run import run_server
from ctr_ps.ps_server.settings import ServerSettings


def serve(role: ServerRole, settings: ServerSettings) -> None:
    """Serves to the end; where `ps-server` would end with an exit code, this process does."""
    with errors_as_exit_codes():
        configure_logs()
        exit_code = run_server(role, settings)
    if exit_code:
        raise SystemExit(exit_code)
