"""Every error that crosses a process border, as one tree.

    CtrPsError
    ├── UsageError                 the job, the command line or the environment is wrong
    │   ├── JobError
    │   └── RoleError
    ├── BindError                  the port is in use
    ├── TransportError             a server cannot be reached, or went away
    │   └── RecoveringError        it reads its checkpoint and update log first
    ├── CheckpointError            not a whole, unaltered checkpoint
    │   └── UnknownChangesError
    ├── DataError                  input files
    │   └── BadRowError
    ├── GradientError              a gradient that must not be applied
    ├── WaitTimeoutError           a barrier or a step that others did not reach in time
    ├── IdleError                  no sign of life
    ├── AbortedError               the job was ended by an error elsewhere
    ├── LogError                   the update log cannot be written, or is damaged
    ├── AccessError                a caller may not make this call
    │   └── UnknownCallerError
    ├── OverloadedError            a server that has no room for more
    ├── NoMemoryError              a process that has no memory left
    ├── FileError                  a disk that is full, or files that cannot be written
    ├── ProtocolError              a request that breaks the contract
    │   ├── NotJoinedError
    │   ├── PlaceLostError
    │   ├── SnapshotLostError
    │   ├── LostPushesError
    │   ├── WrongServerError
    │   │   └── MovingError
    │   └── UnknownTableError
    └── SpecError                  a table or dense block that cannot be
        └── SpecConflictError      one name, two specs

Each class has the exit code with which a command ends when the error ends it (docs/operations.md).
Raising one leaves all parameters as they were.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "AbortedError",
    "AccessError",
    "BadRowError",
    "BindError",
    "CheckpointError",
    "CtrPsError",
    "DataError",
    "FileError",
    "GradientError",
    "IdleError",
    "JobError",
    "LogError",
    "LostPushesError",
    "MovingError",
    "NoMemoryError",
    "NotJoinedError",
    "OverloadedError",
    "PlaceLostError",
    "ProtocolError",
    "RecoveringError",
    "RoleError",
    "SnapshotLostError",
    "SpecConflictError",
    "SpecError",
    "TransportError",
    "UnknownCallerError",
    "UnknownChangesError",
    "UnknownTableError",
    "UsageError",
    "WaitTimeoutError",
    "WrongServerError",
]
"""The errors, which users may import from `ctr_ps.errors`."""


def did_you_mean(name: str, known: Iterable[str], *, likeness: float = 0.5) -> str:
    """Returns ", did you mean 'adam'?" after an unknown name, for a message; empty if nothing is like it.

    `likeness` is the least ratio, by difflib, of a known name to the unknown one.
    """
    nearest = difflib.get_close_matches(name, list(known), 1, cutoff=likeness)
    return f", did you mean {nearest[0]!r}?" if nearest else ""


def counted(number: int, noun: str, spec: str = "") -> str:
    """Returns a number, formatted with `spec`, and its noun: "1 file", "0 files", "2 batches"."""
    plural = "es" if noun.endswith(("tch", "sh")) else "s"
    return f"{number:{spec}} {noun}{'' if number == 1 else plural}"


class CtrPsError(Exception):
    """Base of all our errors; the message says what is wrong, the value, and what to do.

    `comes_again`: a job that resumes meets the same error, so update logs do not help.
    """

    exit_code = 1
    comes_again = False


def comes_again(error: BaseException) -> bool:
    """Whether a job that resumes meets the same error; see `CtrPsError`."""
    return isinstance(error, CtrPsError) and error.comes_again


class UsageError(CtrPsError):
    """The command line, the job or the environment asks for something impossible."""

    exit_code = 2
    comes_again = True


class JobError(UsageError):
    """A job file, or a `--set`, is wrong."""


class RoleError(UsageError):
    """The environment's role variables are missing or contradict each other."""


class BindError(CtrPsError):
    """The address cannot be bound, most often because another process has the port."""

    exit_code = 3


class TransportError(CtrPsError):
    """Servers did not answer in time, or went away; the message lists their endpoints."""

    exit_code = 4


class RecoveringError(TransportError):
    """A restarted server is reading its checkpoint and update log; `progress` counts shards and calls."""

    def __init__(self, message: str, *, progress: int = 0) -> None:
        super().__init__(message)
        self.progress = progress


class CheckpointError(CtrPsError):
    """A folder is not a complete, unaltered, matching checkpoint; the message names the file."""

    exit_code = 5


class UnknownChangesError(CheckpointError):
    """A server cannot tell the changes since the base of a delta; a full checkpoint can be saved."""


class DataError(CtrPsError):
    """Input data cannot be read."""

    exit_code = 6
    comes_again = True


class BadRowError(DataError):
    """More malformed rows than the job allows."""


class GradientError(CtrPsError):
    """A gradient is not finite, or its length does not fit its parameters."""

    exit_code = 7
    comes_again = True


class WaitTimeoutError(CtrPsError):
    """Others did not arrive in time; the message lists who is missing."""

    exit_code = 8


class IdleError(CtrPsError):
    """A server has heard from no worker for longer than its idle limit."""

    exit_code = 9


class ProtocolError(CtrPsError):
    """A request breaks the contract: lengths, order, push ids."""

    exit_code = 10
    comes_again = True


class NotJoinedError(ProtocolError):
    """The calling process is unknown to the server: it has not joined, or the server was restarted since."""


class PlaceLostError(ProtocolError):
    """Another process has the worker's place, or the job continues without this worker."""


class SnapshotLostError(ProtocolError):
    """The snapshot to be saved was lost with its server: save again."""

    comes_again = False


class LostPushesError(ProtocolError):
    """A server lacks pushes that it had acknowledged: the job cannot continue."""


class WrongServerError(ProtocolError):
    """A key belongs to a shard of another server, or the caller's shard map is not that of the server."""


class MovingError(WrongServerError):
    """Shards are being moved, and the server does not know yet by which map it goes on."""


class UnknownTableError(ProtocolError):
    """No table or dense block has this name."""


class SpecError(CtrPsError):
    """A spec describes a table or dense block that cannot exist."""

    exit_code = 11
    comes_again = True


class SpecConflictError(SpecError):
    """A table or dense block of this name exists with another spec."""


class AbortedError(CtrPsError):
    """The job has ended: another worker failed, or a step could not be applied; the message says why."""

    exit_code = 12


class LogError(CtrPsError):
    """An update log cannot be written or read, or is in use; the message names the file or folder."""

    exit_code = 13


class NoMemoryError(CtrPsError):
    """The process is out of memory and ends: its current work may be half done."""

    exit_code = 16


class FileError(CtrPsError):
    """A file cannot be written, read or opened: the disk is full, or too many files are open."""

    exit_code = 17


class AccessError(CtrPsError):
    """A caller's token or certificate lacks the access that a call needs; nothing was done."""

    exit_code = 15


class UnknownCallerError(AccessError):
    """A caller shows no token or certificate, or an unknown one."""


class OverloadedError(CtrPsError):
    """A server has no room for more calls or rows, and did nothing.

    `retry_after_s`: when the same call may succeed, in seconds; None: a retry does not help.
    """

    exit_code = 14

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
