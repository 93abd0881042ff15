"""The settings of a server: `ps-server`'s options, and the arguments of `fleet.run_server`."""

import enum
import math
from dataclasses import dataclass

from protos.errors import UsageError

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
    """How a server runs.

    Attributes:
        load: Checkpoint to start with; None: fresh parameters.
        bind: Address to bind; None: loopback if workers reach the server there, else all interfaces.
        stay: Serve the next job when all workers have left, instead of ending.
        idle_limit_s: Seconds without a call after which the server ends with an error, 0: never; None: 600,
            or never with `stay`.
        wait_limit_s: Seconds that a worker may wait for others.
        checkpoint_roots: Folders or URLs to which saving and loading is limited; none: anywhere.
        grace_s: Seconds that calls in flight may take when the server ends, the answer to the last worker
            that leaves among them.
        linger_s: Seconds that the server answers after its job has ended by an error, so that every worker
            hears of it.

    Raises:
        UsageError: If a limit is not a number of seconds.
    """

    load: str | None = None
    bind: str | None = None
    stay: bool = False
    idle_limit_s: float | None = None
    wait_limit_s: float = DEFAULT_WAIT_LIMIT_S
    checkpoint_roots: tuple[str, ...] = ()
    grace_s: float = 5.0
    linger_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("idle_limit_s", "wait_limit_s", "grace_s", "linger_s"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < math.inf:
                raise UsageError(f"{name} is {seconds!r}, expected seconds from 0 on")

    @property
    def ends_idle_after_s(self) -> float | None:
        """Seconds without a call after which the server ends; None: never."""
        if self.idle_limit_s is None:
            return None if self.stay else DEFAULT_IDLE_LIMIT_S
        return self.idle_limit_s or None
