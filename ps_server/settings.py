"""The settings of a server: `ps-server`'s options, and the arguments of `fleet.run_server`."""

import enum
import math
import re
from dataclasses import dataclass

from ctr_ps.protos.errors import UsageError

DEFAULT_IDLE_LIMIT_S = 600.0
DEFAULT_WAIT_LIMIT_S = 600.0


class LogSync(enum.Enum):
    """What an acknowledged call survives."""

    OS = "os"
    """The end of the process: it was handed to the operating system."""

    FSYNC = "fsync"
    """The end of the machine: it is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server runs. Raises UsageError if a limit is not a number of seconds."""

    load: str | None = None  # checkpoint to start with; None: fresh parameters
    # address to bind; None: loopback if workers reach the server there, else all interfaces
    bind: str | None = None
    stay: bool = False  # serve the next job when all workers have left, instead of ending
    # seconds without a call after which the server ends with an error, 0: never; None: 600, or
    # never with `stay`
    idle_limit_s: float | None = None
    wait_limit_s: float = DEFAULT_WAIT_LIMIT_S  # seconds that a worker may wait for others
    # bytes of tables from which on pushes may not create rows; None: no limit
    memory_limit: int | None = None
    # folders or URLs to which saving and loading is limited; none: anywhere
    checkpoint_roots: tuple[str, ...] = ()
    # seconds that calls in flight may take when the server ends, the answer to the last worker that
    # leaves among them
    grace_s: float = 5.0
    # seconds that the server answers after its job has ended by an error, so that every worker
    # hears of it
    linger_s: float = 20.0
    # port of the stream for calls that move data, 0: a free one; None: it has none
    stream_port: int | None = 0
    # folder of the update log, with which a restarted server goes on where it was; None: what is
    # not in a checkpoint is lost with the process
    update_log: str | None = None
    log_sync: LogSync = LogSync.OS  # what a call that is in the update log survives
    # serve whoever reaches an address that is not loopback, without tokens and certificates
    insecure: bool = False
    metrics: str | None = None  # address of the port for metrics, [HOST:]PORT; None: it has none
    # exit code after SIGTERM, by which it can be told from the end of the job
    sigterm_exit_code: int = 0

    def __post_init__(self) -> None:
        for name in ("idle_limit_s", "wait_limit_s", "grace_s", "linger_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise UsageError(f"{name} is {seconds!r}, expected at least 0 seconds")
        if not 0 <= self.sigterm_exit_code <= 255:
            raise UsageError(f"sigterm_exit_code is {self.sigterm_exit_code!r}, expected 0 to 255")

    @property
    def ends_idle_after_s(self) -> float | None:
        """Seconds without a call after which the server ends; None: never."""
        if self.idle_limit_s is None:
            return None if self.stay else DEFAULT_IDLE_LIMIT_S
        return self.idle_limit_s or None


_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", re.IGNORECASE)


def bytes_of_size(size: str) -> int:
    """Returns the bytes of a size such as "8G", "512M" or "1.5GiB"; units are powers of 1024.

    Raises UsageError if it is no size.
    """
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise UsageError(
            f"{size!r} is not a size: expected bytes, or a number with K, M, G or T, such as 8G"
        )
    number, unit = match.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit.upper() or " "))
