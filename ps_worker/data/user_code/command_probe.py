"""A command of Python's that prints other text in another process: `hash()` of text, as salted_hash.py says.

first lines --> command with PYTHONHASHSEED=1, and with 2 --> two texts, which should be the same
"""

import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from protos.errors import DataError
from ps_worker.data.files.content import open_content
from ps_worker.data.user_code.salted_hash import ADVICE, MAX_LINES, is_salted

_LIMIT_S = 60.0
_MAX_BYTES = 1 << 18
_PYTHON = re.compile(r"\bpython[\d.]*\b|\.py\b")

_lock = threading.Lock()
_probed: set[str] = set()


def require_stable_command(command: str, path: str) -> None:
    """Refuses a command of Python's that prints other text with another PYTHONHASHSEED; once a process.

    Args:
        command: For bash.
        path: File whose first lines are its input.

    Raises:
        DataError: If it does; names the file and the command.
    """
    with _lock:
        is_new = command not in _probed
        _probed.add(command)
    if not is_new or not is_salted() or not _PYTHON.search(command):
        return
    lines = _first_lines(path)
    with ThreadPoolExecutor(2) as threads:
        first, other = threads.map(lambda seed: _output(command, lines, seed), ("1", "2"))
    if None in (first, other) or first == other:
        return  # what is wrong with it, if anything, shows when the file is read
    if _output(command, lines, "1") == first:
        with _lock:
            _probed.discard(command)
        raise DataError(f"{path}: the command {command!r} uses {ADVICE}")


def _first_lines(path: str) -> bytes:

    with open_content(path) as stream:
        buffer = bytearray(_MAX_BYTES)
        size = stream.readinto(memoryview(buffer)) or 0
    lines = bytes(buffer[:size]).splitlines(keepends=True)[:MAX_LINES]
    return b"".join(line for line in lines if line.endswith(b"\n")) or b"".join(lines)


def _output(command: str, lines: bytes, seed: str) -> bytes | None:
    """Returns what a command prints for some lines; None if it fails, or takes too long."""
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": seed},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(lines, timeout=_LIMIT_S)
        return output if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
