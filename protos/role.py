"""The role of a process, from the environment.

The names are those that Paddle's operators and scripts set. Both sides read the same list of servers, and
its order decides where shards live, so it must be the same for every process of a job.

    TRAINING_ROLE                  PSERVER or TRAINER; without it: no cluster
    PADDLE_PSERVERS_IP_PORT_LIST   all servers, "host:port,host:port"
    PADDLE_TRAINERS_NUM            number of workers
    PADDLE_TRAINER_ID              of a worker: its index, from 0
    POD_IP, PADDLE_PORT            of a server: which of the list it is
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.errors import RoleError

ROLE = "TRAINING_ROLE"
SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
NUM_WORKERS = "PADDLE_TRAINERS_NUM"
WORKER_INDEX = "PADDLE_TRAINER_ID"
HOST = "POD_IP"
PORT = "PADDLE_PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRole:
    """This process is server `server_index` of `endpoints`."""

    endpoints: tuple[str, ...]
    server_index: int
    num_workers: int

    @property
    def num_servers(self) -> int:
        """Servers of the cluster."""
        return len(self.endpoints)

    @property
    def endpoint(self) -> str:
        """Where workers reach this server."""
        return self.endpoints[self.server_index]

    @property
    def port(self) -> int:
        """The port of `endpoint`."""
        return int(self.endpoint.rpartition(":")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRole:
    """This process is worker `worker_index` of `num_workers`."""

    endpoints: tuple[str, ...]
    worker_index: int
    num_workers: int


def role_from_environment(environ: Mapping[str, str]) -> ServerRole | WorkerRole | None:
    """Returns the role that the variables describe, or None without one: train in process.

    Raises:
        RoleError: If variables are missing, contradict each other or cannot be read.
    """
    if ROLE not in environ:
        if leftover := sorted({SERVERS, NUM_WORKERS, WORKER_INDEX, PORT} & environ.keys()):
            raise RoleError(
                f"{', '.join(leftover)} set, but {ROLE} is not: set it to PSERVER or TRAINER, or unset "
                f"the others to train on this machine alone"
            )
        return None
    role = environ[ROLE].strip().upper()
    if role == "PSERVER":
        return _server_role(environ)
    if role == "TRAINER":
        return _worker_role(environ)
    raise RoleError(f"{ROLE} is {environ[ROLE]!r}, expected PSERVER or TRAINER")


def _server_role(environ: Mapping[str, str]) -> ServerRole:
    endpoints = _endpoints(environ)
    host = _required(environ, HOST, "the address or host name of this server in the list")
    port = _integer(environ, PORT, 1, 65535)
    own = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    if own not in endpoints:
        raise RoleError(
            f"{HOST}:{PORT} is {own!r}, which is not in {SERVERS} ({', '.join(endpoints)}): the list "
            f"must name each server as it names itself"
        )
    return ServerRole(
        endpoints=endpoints,
        server_index=endpoints.index(own),
        num_workers=_integer(environ, NUM_WORKERS, 1),
    )


def _worker_role(environ: Mapping[str, str]) -> WorkerRole:
    num_workers = _integer(environ, NUM_WORKERS, 1)
    return WorkerRole(
        endpoints=_endpoints(environ),
        worker_index=_integer(environ, WORKER_INDEX, 0, num_workers - 1),
        num_workers=num_workers,
    )


def _required(environ: Mapping[str, str], name: str, expected: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        state = "is empty" if name in environ else "is not set"
        raise RoleError(f"{name} {state}, but {ROLE} is {environ[ROLE]!r}: set it to {expected}")
    return value


def _integer(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    expected = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
    value = _required(environ, name, expected)
    number = _decimal(value)
    if number < low or (high is not None and number > high):
        raise RoleError(f"{name} is {value!r}, expected {expected}")
    return number


def _decimal(text: str) -> int:
    """Returns the number, or -1; int() would also take "1_000", "+1" and other scripts' digits."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _endpoints(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = _required(environ, SERVERS, "the servers as host:port,host:port")
    return require_endpoints([part.strip() for part in text.split(",")], SERVERS)


def require_endpoints(endpoints: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the endpoints of all servers of a job, in their order.

    Args:
        endpoints: Each "host:port".
        source: Where they were written, for errors.

    Raises:
        RoleError: If there is none, or one is no endpoint or named twice.
    """
    if not endpoints:
        raise RoleError(f"{source} names no server, expected host:port of each")
    for endpoint in endpoints:
        if not _is_endpoint(endpoint):
            raise RoleError(
                f"{source} has {endpoint!r}, expected host:port, an IPv6 address in brackets"
            )
    if repeated := sorted({end for end in endpoints if endpoints.count(end) > 1}):
        raise RoleError(f"{source} names {', '.join(repeated)} more than once")
    return tuple(endpoints)


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host.strip("[]") or (":" in host and not is_bracketed) or " " in host:
        return False
    return 1 <= _decimal(port) <= 65535
