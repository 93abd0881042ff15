"""The log of a process: one event a line, as text for people or as JSON for machines.

    2026-11-25 06:03:13,772 INFO server-0 serving port=7164
    {"time": "2026-11-25T06:03:13.772+00:00", "level": "INFO", "role": "server", "index": 0, "logger": ...,
     "message": "serving port=7164"}

Role and index are those of the environment; a process that is none of a cluster has neither. Lines within a
message are joined, and those of a traceback follow indented, in JSON within `exception`.
"""

import enum
import errno
import faulthandler
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TypeVar

from ctr_ps.protos.errors import CtrPsError, FileError, UsageError
from ctr_ps.protos.role import HeterRole, Role, ServerRole, role_from_environment
from ctr_ps.protos.runtime.environment import memory_error_of

_FILE_FAULTS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
}

FORMAT, LEVEL = "CTR_PS_LOG_FORMAT", "CTR_PS_LOG_LEVEL"
"""Variables for what no option says."""

logger = logging.getLogger(__name__)

# What moves a cursor, ends a line, turns the direction of text, or is no character.
_CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

E = TypeVar("E", bound=enum.Enum)


class LogFormat(enum.Enum):
    """How an event is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.Enum):
    """The least important events that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure_logs(
    log_format: LogFormat | None = None,
    level: LogLevel | None = None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Has this process log to stderr, unless it has configured logging; a crash of a library, too.

    What is None is that of its variable, else text and info. The environment has the role, too. Raises
    UsageError if a variable has none of the values.
    """
    log_format = log_format or _named(LogFormat, FORMAT, environment, LogFormat.TEXT)
    level = level or _named(LogLevel, LEVEL, environment, LogLevel.INFO)
    role, index = _role_in(environment)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(role, index) if log_format is LogFormat.JSON else TextFormatter(role, index)
    )
    logging.basicConfig(level=level.name, handlers=[handler])
    logging.captureWarnings(capture=True)
    with suppress(OSError):  # a stderr without a descriptor, as where a program captures it
        faulthandler.enable()


def printable(text: str) -> str:
    """Returns a text of others, as a value of data, with what would move a terminal's cursor escaped."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Returns several lines `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def log_error(error: CtrPsError) -> None:
    """Writes the error that ends this process: as an event in JSON, else as a line, its others indented."""
    if any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers):
        logger.error("%s", error)
    else:
        text = printable_lines(str(error)).replace("\n", "\n    ")
        sys.stderr.write(f"error: {text}\n")  # one write: other threads log, too


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Ends the process with the exit code of an error of ours, or of one that the system gave."""
    try:
        yield
    except Exception as raised:
        error = raised if isinstance(raised, CtrPsError) else memory_error_of(raised)
        error = error or file_error_of(raised)
        if error is None:
            raise
        log_error(error)
        raise SystemExit(error.exit_code) from raised


def file_error_of(error: BaseException) -> FileError | None:
    """Returns the error of one that says that a file cannot be written, or none be opened; None: another."""
    if not isinstance(error, OSError) or error.errno not in _FILE_FAULTS:
        return None
    name = "" if error.filename is None else f" {str(error.filename)!r}"
    reason = os.strerror(error.errno or 0)
    return FileError(
        f"cannot write or read{name or ' a file'}: {reason}; files completed earlier are kept"
    )


class TextFormatter(logging.Formatter):
    """A line for people."""

    def __init__(self, role: str = "", index: int | None = None) -> None:
        """Names the process in each line, if it has a role."""
        name = f"{role}-{index} " if role else ""
        super().__init__(f"%(asctime)s %(levelname)s {name}%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # as the library calls it
        """Returns the line without a traceback."""
        # Texts of callers could otherwise begin lines of their own, or move a terminal's cursor.
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, and those of a traceback indented."""
        first, *more = super().format(record).split("\n")
        return "\n    ".join([first, *more])


class JsonFormatter(logging.Formatter):
    """An object for machines, on one line."""

    def __init__(self, role: str = "", index: int | None = None) -> None:
        """Names the process in each line, if it has a role."""
        super().__init__()
        self._process: dict[str, object] = {"role": role, "index": index} if role else {}

    def format(self, record: logging.LogRecord) -> str:
        """Returns the object."""
        moment = datetime.fromtimestamp(record.created, UTC)
        event: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _named(kind: type[E], variable: str, environment: Mapping[str, str], default: E) -> E:
    text = environment.get(variable, "").strip().lower()
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        expected = ", ".join(str(each.value) for each in kind)
        raise UsageError(f"{variable} is {text!r}, expected one of {expected}") from None


def _role_in(environment: Mapping[str, str]) -> tuple[str, int | None]:
    """Returns the name and index of the role of this process; "" and None: it has none."""
    try:
        role: Role | None = role_from_environment(environment)
    except CtrPsError:  # which ends the process, with a line of its own
        role = None
    match role:
        case None:
            return "", None
        case ServerRole():
            return "server", role.server_index
        case HeterRole():
            return "heter", role.heter_index
    return "worker", role.worker_index
