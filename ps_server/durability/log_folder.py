"""The folder of an update log: one server at a time, and segments with consecutive numbers.

LOCK                      locked by the server that uses the folder, whose process id it holds
segment-00000007.log      a segment
segment-00000008.next     one that was not begun, and is ignored
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctr_ps.protos.errors import LogError

_LOCK = "LOCK"
_NAME = re.compile(r"segment-(\d{8,})\.log")


class LogFolder:
    """A folder of segments that this process has to itself until `close`."""

    def __init__(self, path: str | Path) -> None:
        """Locks the folder; makes it if it does not exist.

        Raises:
            LogError: If another process has it, or it cannot be made.
        """
        self.path = Path(path).absolute()
        _make_folder(self.path)
        with disk_errors(f"cannot open the update log {self.path}"):
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
                os.close(self._lock)
                raise LogError(
                    f"the update log {self.path} is in use by process {holder}: each server needs a "
                    f"folder of its own"
                ) from None
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Unlocks the folder; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def segments(self) -> tuple[int, ...]:
        """Returns the numbers of the segments, ascending.

        Raises:
            LogError: If one between two others is missing.
        """
        with disk_errors(f"cannot read the update log {self.path}"):
            names = [_NAME.fullmatch(path.name) for path in self.path.iterdir()]
        numbers = sorted(int(name[1]) for name in names if name)
        missing = sorted({*range(min(numbers, default=0), max(numbers, default=0))} - {*numbers})
        if missing:
            raise LogError(
                f"the update log {self.path} lacks segments {missing} of {numbers[0]} to {numbers[-1]}: "
                f"restore their files, or {USE_ANOTHER}"
            )
        return tuple(numbers)

    def segment_path(self, segment: int) -> Path:
        """Returns the file of a segment."""
        return self.path / f"segment-{segment:08}.log"

    def unpublished_path(self, segment: int) -> Path:
        """Returns the file of a segment before it is published."""
        return self.segment_path(segment).with_suffix(".next")

    def publish(self, segment: int) -> None:
        """Gives a segment its name, durably; raises OSError."""
        self.unpublished_path(segment).rename(self.segment_path(segment))
        self.sync()

    def remove_before(self, segment: int) -> None:
        """Removes earlier segments, the oldest first, so that those left are always consecutive.

        Raises:
            LogError: If one cannot be removed.
        """
        with disk_errors(f"cannot remove old segments of the update log {self.path}"):
            for number in self.segments():
                if number < segment:
                    self.segment_path(number).unlink()
            self.sync()

    def remove_unpublished(self) -> None:
        """Removes segments that were never published.

        Raises:
            LogError: If one cannot be removed.
        """
        with disk_errors(f"cannot remove an unfinished segment of the update log {self.path}"):
            for path in self.path.glob("segment-*.next"):
                path.unlink()

    def sync(self) -> None:
        """Makes names of files durable; raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


USE_ANOTHER = "start the server from a checkpoint with another, empty folder as its update log"


def _make_folder(path: Path) -> None:
    """Makes the folder and those above it, as far as they do not exist; raises LogError."""
    found = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not found.is_dir():
        kind = "a file" if found.is_file() else "not a folder"
        raise LogError(
            f"cannot open the update log {path}: {found} is {kind}, expected a folder, or a path at "
            f"which one can be made"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(
            f"cannot make the folder of the update log {path} in {found}: {error.strerror}; expected a "
            f"folder that this user may write to"
        ) from error


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError of the block into a LogError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise LogError(f"{what}: {error}") from error
