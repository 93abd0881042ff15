"""An update log on disk: its folder, and what an earlier process left there, with a torn tail or damage.

LOCK                      locked by the server that uses the folder, whose process id it holds
segment-00000007.log      a segment; their numbers are consecutive
segment-00000008.next     one that was not begun, and is ignored
DRAINED                   instead, once the server was drained: for who starts servers

A record that is incomplete or altered ends the log, unless a later one says that it was acknowledged:

    | 7 | 8 | 9 (half) |                             torn tail: the process died while it wrote 9
    | 7 | 8 (altered) | 9: "7 was acknowledged" |    torn tail: the machine died before 8 was on disk
    | 7 | 8 (altered) | 9: "8 was acknowledged" |    damage: somebody relies on 8

Only the last segment can have a torn tail, after its head: whatever is before was on disk before that segment
was published. Everything else that is missing or altered is a LogError.
"""

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from ctr_ps.protos.errors import LogError
from ctr_ps.ps_server.durability.segments import (
    USE_ANOTHER,
    Record,
    SegmentReader,
    disk_errors,
)

logger = logging.getLogger(__name__)

_LOCK = "LOCK"
_NAME = re.compile(r"segment-(\d{8,})\.log")


class LogFolder:
    """A folder of segments that this process has to itself until `close`."""

    def __init__(self, path: str | Path) -> None:
        """Locks the folder, which is made if need be; raises LogError if another process has it."""
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
        """Returns the numbers of the segments, ascending; raises LogError if one of them is missing."""
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

    @property
    def drained_path(self) -> Path:
        """Returns the file that says that the server was drained."""
        return self.path / "DRAINED"

    def publish(self, segment: int) -> None:
        """Gives a segment its name, durably; raises OSError."""
        self.unpublished_path(segment).rename(self.segment_path(segment))
        self.sync()

    def remove_before(self, segment: int) -> None:
        """Removes earlier segments, the oldest first, so that those left are always consecutive."""
        with disk_errors(f"cannot remove old segments of the update log {self.path}"):
            for number in self.segments():
                if number < segment:
                    self.segment_path(number).unlink()
            self.sync()

    def remove_unpublished(self) -> None:
        """Removes segments that were never published."""
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


def _make_folder(path: Path) -> None:
    """Makes the folder and those above it, as far as they do not exist; raises LogError."""
    found = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not found.is_dir():
        kind = "a file" if found.is_file() else "not a folder"
        raise LogError(
            f"cannot open the update log {path}: {found} is {kind}, expected a folder, or a path for a new "
            "one"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(
            f"cannot create the folder of the update log {path} in {found}: {error.strerror}; expected a "
            "folder that this user may write to"
        ) from error


def read_log(folder: str | Path) -> "SavedLog":
    """Opens the update log in a folder, which is made if it does not exist, and locks the folder.

    Raises LogError if another process has the folder, it cannot be read, or a segment is missing.
    """
    locked = LogFolder(folder)
    try:
        return SavedLog(locked, locked.segments())
    except BaseException:
        locked.close()
        raise


class SavedLog:
    """An update log as an earlier process left it. Not thread-safe.

    What reads it raises LogError if there is no such segment, or it is damaged.
    """

    def __init__(self, folder: LogFolder, segments: tuple[int, ...]) -> None:
        self.folder = folder  # the log's folder, locked; `UpdateLog` takes it over
        # numbers of its segments, consecutive and ascending; empty if there is no log
        self.segments = segments
        self._end: SegmentReader | None = None

    def head(self, segment: int) -> list[Record]:
        """Returns the records of a segment's head."""
        with closing(self._open(segment)) as reader:
            records = reader.records()
            return [next(records) for _ in range(reader.header.head_records)]

    def records_from(self, segment: int) -> Iterator[Record]:
        """Yields what was appended to a segment and the later ones, in order, without their heads.

        A torn tail is left out, with a warning.
        """
        self._require(segment)
        next_record = None
        for number in range(segment, self.segments[-1] + 1):
            with closing(self._open(number)) as reader:
                if next_record not in (None, reader.header.first_record):
                    raise LogError(
                        f"{self.folder.segment_path(number - 1)} ends before record {next_record}, but "
                        f"{reader.path} begins with {reader.header.first_record}: restore these files, or "
                        f"{USE_ANOTHER}"
                    )
                for index, record in enumerate(reader.records()):
                    if index >= reader.header.head_records:
                        yield record
                next_record = reader.next_record
                if reader.is_last:
                    self._ends_with(reader)

    def size_from(self, segment: int) -> int:
        """Returns the bytes of a segment and the later ones."""
        with disk_errors(f"cannot read {self.folder.path}"):
            paths = [self.folder.segment_path(each) for each in self.segments if each >= segment]
            return sum(path.stat().st_size for path in paths)

    def end(self) -> SegmentReader:
        """Returns the last segment, read to its end; reads it unless `records_from` has."""
        if self._end is not None:
            return self._end
        with closing(self._open(self.segments[-1])) as reader:
            for _ in reader.records():
                pass
            return self._ends_with(reader)

    def close(self) -> None:
        """Unlocks the folder."""
        self.folder.close()

    def _require(self, segment: int) -> None:
        if segment not in self.segments:
            raise LogError(
                f"the update log {self.folder.path} has no segment {segment}; it has {list(self.segments)}"
            )

    def _open(self, segment: int) -> SegmentReader:
        self._require(segment)
        path = self.folder.segment_path(segment)
        return SegmentReader(path, segment, is_last=segment == self.segments[-1])

    def _ends_with(self, reader: SegmentReader) -> SegmentReader:
        """Returns the last segment, which was read; warns of a torn tail once."""
        if self._end is None and reader.torn_bytes:
            logger.warning(
                "ignored an incomplete record at the end of the update log file=%s bytes=%d",
                reader.path,
                reader.torn_bytes,
            )
        self._end = reader
        return reader
