"""The role of a process, from the environment.

The names are those that Paddle's operators and scripts set. The order of the servers decides where shards
live, so it must be the same for every process of a job.

    TRAINING_ROLE                  PSERVER, TRAINER or HETER_TRAINER; without it: no cluster
    PADDLE_PSERVERS_IP_PORT_LIST   all servers, "host:port,host:port"; "ps-{2}:8500" is "ps-0:8500,ps-1:8500"
    PADDLE_TRAINERS_NUM            number of workers; "2:4": 2 at the start, places for 4
    PADDLE_TRAINER_ID              of a worker: its index, from 0
    POD_IP, PADDLE_PORT            of a server or heter trainer: its entry in the list

Heter trainers are listed in one of several variables, of two generations of Paddle.

    PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST, PADDLE_HETER_TRAINER_IP_PORT_LIST,
    PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST     the first that is not empty counts; all processes need it
    STAGE_NUM, STAGE_ID                        at most 2 stages: CPU trainers are 1, heter trainers 2
    HETER_DEVICE_TYPE, FLAGS_selected_gpus     of a heter trainer: cpu or gpu, and its number
"""

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ctr_ps.protos.errors import RoleError, counted

ROLE = "TRAINING_ROLE"
SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
NUM_WORKERS = "PADDLE_TRAINERS_NUM"
WORKER_INDEX = "PADDLE_TRAINER_ID"
HOST = "POD_IP"
PORT = "PADDLE_PORT"
HETER_TRAINERS = (
    "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
    "PADDLE_HETER_TRAINER_IP_PORT_LIST",
    "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST",
)
STAGES, STAGE = "STAGE_NUM", "STAGE_ID"
HETER_DEVICE = "HETER_DEVICE_TYPE"
HETER_GPUS = "FLAGS_selected_gpus"

_NUMBERED = re.compile(r"(?P<before>[^{}]*)\{(?P<count>[1-9][0-9]{0,3})\}(?P<after>[^{}]*)")


@dataclass(frozen=True, slots=True)
class Members:
    """The processes that join a job, numbered from 0: workers, then heter trainers."""

    num_workers: int  # places
    num_heter: int = 0
    # workers that the job waits for at its start; the other places may be taken later, and workers may leave
    # before the end. None: all
    num_at_start: int | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave while others train."""
        return self.num_at_start is not None

    @property
    def optional(self) -> range:
        """Workers without which the job starts."""
        at_start = self.num_workers if self.num_at_start is None else self.num_at_start
        return range(at_start, self.num_workers)

    @property
    def total(self) -> int:
        """Workers and heter trainers."""
        return self.num_workers + self.num_heter

    @property
    def terms(self) -> dict[str, str]:
        """Settings that differ between processes of different jobs."""
        at_start = "" if self.num_at_start is None else f"{self.num_at_start}:"
        return {
            NUM_WORKERS: f"{at_start}{self.num_workers}",
            "heter trainers": str(self.num_heter),
        }

    def __str__(self) -> str:
        """For example, "2 workers and 1 heter trainer", or "2 to 4 workers"."""
        heter = f" and {counted(self.num_heter, 'heter trainer')}" if self.num_heter else ""
        at_start = "" if self.num_at_start is None else f"{self.num_at_start} to "
        return f"{at_start}{counted(self.num_workers, 'worker')}{heter}"

    def name(self, member: int) -> str:
        """Returns "worker 1" or "heter trainer 0"; a number outside the job counts as a worker's."""
        if self.num_workers <= member < self.total:
            return f"heter trainer {member - self.num_workers}"
        return f"worker {member}"

    def names(self, members: Collection[int]) -> str:
        """Returns "workers [0, 1], heter trainer 0"; "workers []" of none."""
        heter = [each for each in members if self.num_workers <= each < self.total]
        workers = [each for each in members if each not in heter]
        named = [f"workers {workers}"] if workers or not heter else []
        return ", ".join([*named, *map(self.name, heter)])

    def variables(self, member: int) -> str:
        """Returns the environment variables of a member, for errors."""
        if self.num_workers <= member < self.total:
            return f"the {HOST} and {PORT} of {self.name(member)}"
        return f"{WORKER_INDEX}={member}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRole:
    endpoints: tuple[str, ...]
    num_workers: int
    num_at_start: int | None = None  # as of `Members`
    heter_endpoints: tuple[str, ...] = ()

    @property
    def members(self) -> Members:
        return Members(self.num_workers, len(self.heter_endpoints), self.num_at_start)

    @property
    def is_in_process(self) -> bool:
        """Whether the store is in this process: the cluster has no servers."""
        return not self.endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRole(_JobRole):
    """This process is server `server_index` of `endpoints`."""

    server_index: int
    is_spare: bool = False  # it waits to be added to a cluster, and `endpoints` has it alone

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
class WorkerRole(_JobRole):
    """This process is worker `worker_index` of `num_workers`."""

    worker_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeterRole(_JobRole):
    """This process is heter trainer `heter_index` of `heter_endpoints`, on "cpu", "cuda" or "cuda:1"."""

    heter_index: int
    device: str = "cpu"

    @property
    def worker_index(self) -> int:
        """Its number among the members of the job, behind the workers."""
        return self.num_workers + self.heter_index

    @property
    def endpoint(self) -> str:
        """Where workers reach this heter trainer."""
        return self.heter_endpoints[self.heter_index]

    @property
    def port(self) -> int:
        """The port of `endpoint`."""
        return int(self.endpoint.rpartition(":")[2])


Role = ServerRole | WorkerRole | HeterRole


def role_from_environment(environ: Mapping[str, str], *, may_be_spare: bool = False) -> Role | None:
    """Returns the role that the variables describe, or None without one: train in process.

    A server that `may_be_spare` need not be in the list of servers.

    Raises RoleError if variables are missing, contradict each other or cannot be read.
    """
    if ROLE not in environ:
        if leftover := sorted({SERVERS, NUM_WORKERS, WORKER_INDEX, PORT} & environ.keys()):
            raise RoleError(
                f"{', '.join(leftover)} set without {ROLE}: set {ROLE} to PSERVER, TRAINER or "
                f"HETER_TRAINER; to train on this machine alone, unset {', '.join(leftover)}"
            )
        return None
    role = environ[ROLE].strip().upper()
    if role == "PSERVER":
        endpoints = _endpoints(environ)
        is_spare = may_be_spare and _own_endpoint(environ, "server") not in endpoints
        if is_spare:
            endpoints = (_own_endpoint(environ, "server"),)
        num_at_start, num_workers = _places(environ)
        return ServerRole(
            endpoints=endpoints,
            server_index=_place(environ, endpoints, SERVERS, "server"),
            num_workers=num_workers,
            num_at_start=num_at_start,
            heter_endpoints=_heter_endpoints(environ),
            is_spare=is_spare,
        )
    if role == "TRAINER":
        num_at_start, num_workers = _places(environ)
        return WorkerRole(
            endpoints=_endpoints(environ),
            worker_index=_integer(environ, WORKER_INDEX, 0, num_workers - 1),
            num_workers=num_workers,
            num_at_start=num_at_start,
            heter_endpoints=_heter_endpoints(environ),
        )
    if role == "HETER_TRAINER":
        return _heter_role(environ)
    raise RoleError(f"{ROLE} is {environ[ROLE]!r}, expected PSERVER, TRAINER or HETER_TRAINER")


def _places(environ: Mapping[str, str]) -> tuple[int | None, int]:
    """Returns how many workers a job waits for at its start, None: all, and for how many it has places."""
    first, colon, last = environ.get(NUM_WORKERS, "").partition(":")
    if not colon:
        return None, _integer(environ, NUM_WORKERS, 1)
    num_at_start, num_workers = _decimal(first.strip()), _decimal(last.strip())
    if not 1 <= num_at_start <= num_workers or environ.get(_heter_variable(environ)):
        raise RoleError(
            f"{NUM_WORKERS} is {environ[NUM_WORKERS]!r}, expected a number of workers, or as 2:4 that at the "
            "start and the most, in a job without heter trainers"
        )
    return num_at_start, num_workers


def _own_endpoint(environ: Mapping[str, str], what: str) -> str:
    host = _required(environ, HOST, f"the address or host name of this {what} in the list")
    port = _integer(environ, PORT, 1, 65535)
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _place(environ: Mapping[str, str], endpoints: Sequence[str], source: str, what: str) -> int:
    own = _own_endpoint(environ, what)
    if own not in endpoints:
        raise RoleError(
            f"{HOST}:{PORT} is {own!r}, which is not in {source} ({', '.join(endpoints)}): write the "
            f"address of this {what} in the same way in both"
            + (", or give --spare if it is to be added, or was added" if what == "server" else "")
        )
    return endpoints.index(own)


def _heter_role(environ: Mapping[str, str]) -> HeterRole:
    heter_endpoints = _heter_endpoints(environ)
    if not heter_endpoints:
        raise RoleError(
            f"{ROLE} is {environ[ROLE]!r}, but none of {', '.join(HETER_TRAINERS)} is set: set one of "
            f"them to the endpoints of the heter trainers, as host:port,host:port"
        )
    if environ.get(STAGE, "2").strip() != "2":
        raise RoleError(
            f"{STAGE} is {environ[STAGE]!r}, expected 2: stage 1 is the CPU trainers, stage 2 the heter "
            "trainers"
        )
    return HeterRole(
        endpoints=_endpoints(environ),
        heter_endpoints=heter_endpoints,
        heter_index=_place(environ, heter_endpoints, _heter_variable(environ), "heter trainer"),
        num_workers=_integer(environ, NUM_WORKERS, 1),
        device=_device(environ),
    )


def _heter_variable(environ: Mapping[str, str]) -> str:
    return next(
        (name for name in HETER_TRAINERS if environ.get(name, "").strip()), HETER_TRAINERS[0]
    )


def _heter_endpoints(environ: Mapping[str, str]) -> tuple[str, ...]:
    name = _heter_variable(environ)
    text = environ.get(name, "").strip()
    if not text:
        return ()
    stages = environ.get(STAGES, "").strip()
    if ";" in text or (stages and _decimal(stages) > 2):
        found = f"{name} is {text!r}" if ";" in text else f"{STAGES} is {stages!r}"
        raise RoleError(f"{found}, expected CPU trainers and at most one stage of heter trainers")
    endpoints = require_endpoints(split_endpoints(text), name, "heter trainer")
    require_work(endpoints, _integer(environ, NUM_WORKERS, 1), name)
    return endpoints


def require_work(heter_endpoints: Sequence[str], num_workers: int, source: str) -> None:
    """Raises RoleError if there are more heter trainers than workers; `source` names them."""
    if len(heter_endpoints) > num_workers:
        raise RoleError(
            f"{source} has {len(heter_endpoints)} heter trainers, but the job has only "
            f"{counted(num_workers, 'worker')}: list at most one heter trainer for each worker"
        )


def _device(environ: Mapping[str, str]) -> str:
    kind = environ.get(HETER_DEVICE, "").strip().lower()
    if kind in ("", "cpu"):
        return "cpu"
    if kind != "gpu":
        raise RoleError(f"{HETER_DEVICE} is {environ[HETER_DEVICE]!r}, expected cpu or gpu")
    first = environ.get(HETER_GPUS, "").split(",")[0].strip()
    if first and _decimal(first) < 0:
        raise RoleError(f"{HETER_GPUS} is {environ[HETER_GPUS]!r}, expected the number of a GPU")
    return f"cuda:{first}" if first else "cuda"


def _required(environ: Mapping[str, str], name: str, expected: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        state = "is empty" if name in environ else "is not set"
        raise RoleError(
            f"{name} {state}, but {ROLE} is {environ[ROLE]!r}: set {name} to {expected}"
        )
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
    return require_endpoints(split_endpoints(text), SERVERS)


def split_endpoints(text: str) -> list[str]:
    """Splits "host:port,host:port"; a number in braces stands for that many hosts, from 0.

    So a manifest states the number of servers once, as Kubernetes numbers pods.
    """
    return [endpoint for part in text.split(",") for endpoint in _numbered(part.strip())]


def _numbered(part: str) -> list[str]:
    found = _NUMBERED.fullmatch(part)
    if found is None:
        return [part]
    return [f"{found['before']}{index}{found['after']}" for index in range(int(found["count"]))]


def require_endpoints(
    endpoints: Sequence[str], source: str, what: str = "server"
) -> tuple[str, ...]:
    """Returns the endpoints; raises RoleError, with `source`, unless each is a distinct host:port."""
    if not endpoints:
        raise RoleError(f"{source} has no {what}, expected host:port of each")
    for endpoint in endpoints:
        if not _is_endpoint(endpoint):
            raise RoleError(
                f"{source} has {endpoint!r}, expected host:port, with IPv6 addresses in brackets"
            )
    if repeated := sorted({end for end in endpoints if endpoints.count(end) > 1}):
        raise RoleError(f"{source} has {', '.join(repeated)} more than once")
    return tuple(endpoints)


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not host.strip("[]") or (":" in host and not is_bracketed) or {*" {}"} & {*host}:
        return False
    return 1 <= _decimal(port) <= 65535


def default_bind(endpoint: str) -> str:
    """Returns the address to bind for a process that others reach at `endpoint`, "host:port".

    Loopback addresses themselves; otherwise all interfaces, as the endpoint may be a proxy's.
    """
    host = endpoint.rpartition(":")[0].strip("[]")
    if is_loopback(host):
        return host
    return "::" if ":" in host else "0.0.0.0"


def is_loopback(host: str) -> bool:
    """Whether an address, in digits or "localhost", is reachable from this machine only."""
    name = host.strip("[]").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:  # a host name
        return name == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def address_to_bind(host: str, port: int) -> str:
    """Returns "host:port", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
