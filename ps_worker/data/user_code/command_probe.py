"""A command of Python's that prints other text in another process: `hash()` of text, as salted_hash.py says.

first lines --> command with PYTHONHASHSEED=1, then with 2 --> two texts, which should be the same
"""

import logging
import re
import tempfile
import threading
import time

from protos.errors import DataError
from ps_worker.data.files.content import open_content
from ps_worker.data.user_code.pipe_process import PipeProcess
from ps_worker.data.user_code.salted_hash import ADVICE, MAX_LINES, is_salted

logger = logging.getLogger(__name__)

_LIMIT_S = 10.0
_MAX_INPUT = 1 << 18
_MAX_OUTPUT = 1 << 20
_PYTHON = re.compile(r"\bpython[\d.]*\b|\.py\b")

_lock = threading.Lock()
_probed: set[str] = set()


def require_stable_command(command: str, path: str) -> None:
    """Refuses a command of Python's that prints other text with another PYTHONHASHSEED; once a process.

    Args:
        command: For bash.
        path: File whose first lines are its input; one without lines leaves the check to the next.

    Raises:
        DataError: If it does, or the file cannot be read; names the file and the command.
    """
    if command in _probed or not is_salted() or not _PYTHON.search(command):
        return
    lines = _first_lines(path)
    with _lock:
        if not lines or command in _probed:
            return
        _probed.add(command)
    logger.info(
        "running a command twice on the first lines of a file, to see whether its keys are hash() of text: "
        "command=%r file=%s",
        command,
        path,
    )
    first = _output(command, lines, "1")
    other = None if first is None else _output(command, lines, "2")
    if other in (None, first):
        return  # what is wrong with it, if anything, shows when the file is read
    if _output(command, lines, "1") == first:
        with _lock:
            _probed.discard(command)
        raise DataError(f"{path}: the command {command!r} uses {ADVICE}")


def _first_lines(path: str) -> bytes:
    with open_content(path) as stream:
        buffer = bytearray(_MAX_INPUT)
        size = stream.readinto(memoryview(buffer)) or 0
    lines = bytes(buffer[:size]).splitlines(keepends=True)[:MAX_LINES]
    return b"".join(line for line in lines if line.endswith(b"\n")) or b"".join(lines)


def _output(command: str, lines: bytes, seed: str) -> bytes | None:
    """Returns what a command prints for some lines, up to a limit; None if it fails or takes too long."""
    deadline = time.monotonic() + _LIMIT_S
    output = bytearray()
    with tempfile.NamedTemporaryFile() as file:
        file.write(lines)
        file.flush()
        try:
            with PipeProcess(command, file.name, _LIMIT_S, {"PYTHONHASHSEED": seed}) as process:
                for chunk in process.chunks():
                    output += chunk
                    if len(output) >= _MAX_OUTPUT:
                        break
                    if time.monotonic() > deadline:
                        return None
        except DataError:
            return None
    return bytes(output[:_MAX_OUTPUT])
