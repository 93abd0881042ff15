"""Reading an update log, and telling a torn tail from damage.

A record that is incomplete or altered ends the log, unless a later one says that it was acknowledged:

    | 7 | 8 | 9 (half) |                             torn tail: the process died while it wrote 9
    | 7 | 8 (altered) | 9: "7 was acknowledged" |    torn tail: the machine died before 8 was on disk
    | 7 | 8 (altered) | 9: "8 was acknowledged" |    damage: somebody relies on 8

Only the last segment can have a torn tail, after its head: whatever is before was on disk before that segment
was published. Everything else that is missing or altered is a LogError.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from ctr_ps.protos.errors import LogError
from ctr_ps.ps_server.durability.log_folder import USE_ANOTHER, LogFolder, disk_errors
from ctr_ps.ps_server.durability.segment_format import (
    MARKER,
    MAX_RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Record,
    RecordHeader,
    SegmentHeader,
    checksum_of,
)

logger = logging.getLogger(__name__)

_SCAN_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """Where the next record of a log goes: offset and number, in the last segment."""

    header: SegmentHeader
    offset: int
    next_record: int


def read_log(folder: str | Path) -> "SavedLog":
    """Opens the update log in a folder, which is made if it does not exist, and locks the folder.

    Raises:
        LogError: If another process has the folder, it cannot be read, or a segment is missing.
    """
    locked = LogFolder(folder)
    try:
        return SavedLog(locked, locked.segments())
    except BaseException:
        locked.close()
        raise


class SavedLog:
    """An update log as an earlier process left it. Not thread-safe.

    Attributes:
        folder: The log's folder, locked; `UpdateLog` takes it over.
        segments: Numbers of its segments, consecutive and ascending; empty if there is no log.
    """

    def __init__(self, folder: LogFolder, segments: tuple[int, ...]) -> None:
        self.folder = folder
        self.segments = segments
        self._end: LogEnd | None = None

    def head(self, segment: int) -> list[Record]:
        """Returns the records of a segment's head.

        Raises:
            LogError: If there is no such segment, or it is damaged.
        """
        with closing(self._open(segment)) as reader:
            records = reader.records()
            return [next(records) for _ in range(reader.header.head_records)]

    def records_from(self, segment: int) -> Iterator[Record]:
        """Yields what was appended to a segment and the later ones, in order, without their heads.

        A torn tail is left out, with a warning.

        Raises:
            LogError: If there is no such segment, or one of them is damaged.
        """
        self._require(segment)
        next_record = None
        for number in range(segment, self.segments[-1] + 1):
            with closing(self._open(number)) as reader:
                if next_record not in (None, reader.header.first_record):
                    raise LogError(
                        f"{self.folder.segment_path(number - 1)} ends before record {next_record}, but "
                        f"{reader.path} begins with {reader.header.first_record}: restore the files, or "
                        f"{USE_ANOTHER}"
                    )
                for index, record in enumerate(reader.records()):
                    if index >= reader.header.head_records:
                        yield record
                next_record = reader.next_record
                if reader.is_last:
                    self._ends_with(reader)

    def size_from(self, segment: int) -> int:
        """Returns the bytes of a segment and the later ones; raises LogError."""
        with disk_errors(f"cannot read {self.folder.path}"):
            paths = [self.folder.segment_path(each) for each in self.segments if each >= segment]
            return sum(path.stat().st_size for path in paths)

    def end(self) -> LogEnd:
        """Returns where a log with segments ends; reads the last one unless `records_from` has.

        Raises:
            LogError: If the last segment is damaged.
        """
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

    def _open(self, segment: int) -> "_SegmentReader":
        self._require(segment)
        path = self.folder.segment_path(segment)
        return _SegmentReader(path, segment, is_last=segment == self.segments[-1])

    def _ends_with(self, reader: "_SegmentReader") -> LogEnd:
        """Returns the end of the last segment, which was read; warns of a torn tail once."""
        if self._end is None and reader.torn_bytes:
            logger.warning(
                "the update log ends with an incomplete record, which is left out file=%s bytes=%d",
                reader.path,
                reader.torn_bytes,
            )
        self._end = LogEnd(
            header=reader.header, offset=reader.offset, next_record=reader.next_record
        )
        return self._end


class _SegmentReader:
    """One segment file, read from its beginning.

    Attributes:
        header: Its header.
        is_last: Whether it may have a torn tail.
        offset: Where the next record begins; in the end, where the last whole one ended.
        next_record: Number of the next record.
        torn_bytes: Size of the torn tail, known in the end.
    """

    def __init__(self, path: Path, segment: int, *, is_last: bool) -> None:
        """Opens the file.

        Raises:
            LogError: If it cannot be read, or its header is damaged or of another segment.
        """
        self.path = path
        self.is_last = is_last
        self.offset = SEGMENT_HEADER_BYTES
        self.torn_bytes = 0
        with disk_errors(f"cannot read {path}"):
            self._file: BinaryIO = path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
        self.header = self._read_header(segment)
        self.next_record = self.header.first_record

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def records(self) -> Iterator[Record]:
        """Yields all whole records, those of the head first.

        Raises:
            LogError: If the file is damaged or cannot be read.
        """
        while self.offset < self._size:
            header = self._header_at(self.offset)
            record = None if header is None else self._record_at(self.offset, header)
            if header is None or record is None:
                self._require_torn()
                self.torn_bytes = self._size - self.offset
                break
            if header.number != self.next_record:
                self._refuse(f"record {header.number} is where {self.next_record} has to be")
            self.offset += header.header_bytes + header.payload_bytes
            self.next_record += 1
            yield record
        if self._is_in_head():
            self._refuse("the head is incomplete, though it was on disk when the segment was begun")

    def _read_header(self, segment: int) -> SegmentHeader:
        try:
            header = SegmentHeader.decode(self._read(0, SEGMENT_HEADER_BYTES))
            if header.segment != segment:
                raise LogError(f"it is segment {header.segment} by its header")
        except LogError as error:
            self._file.close()
            raise LogError(f"{self.path}: {error}; restore the file, or {USE_ANOTHER}") from error
        return header

    def _header_at(self, offset: int) -> RecordHeader | None:
        return RecordHeader.decode(self._read(offset, MAX_RECORD_HEADER_BYTES), self.header.seed)

    def _record_at(self, offset: int, header: RecordHeader) -> Record | None:
        """Returns a record of which the header is known to be whole; None if its payload is not."""
        start = offset + header.header_bytes
        if start + header.payload_bytes > self._size:
            return None
        payload = self._read(start, header.payload_bytes)
        if checksum_of(payload) != header.payload_checksum:
            return None
        return Record(header.kind, payload)

    def _read(self, offset: int, size: int) -> bytes:
        with disk_errors(f"cannot read {self.path} at byte {offset}"):
            self._file.seek(offset)
            return self._file.read(size)

    def _is_in_head(self) -> bool:
        return self.next_record < self.header.first_record + self.header.head_records

    def _require_torn(self) -> None:
        """Raises LogError unless what begins at `offset` is a torn tail."""
        what = f"record {self.next_record} is incomplete or altered"
        if not self.is_last:
            self._refuse(f"{what}, and later segments follow")
        for later in self._headers_after(self.offset):
            if later.acknowledged > self.next_record:
                self._refuse(
                    f"{what}, and record {later.number} follows, before which it was acknowledged"
                )

    def _headers_after(self, offset: int) -> Iterator[RecordHeader]:
        """Yields the headers of records that begin anywhere after `offset`."""
        position = offset + 1
        while len(content := self._read(position, _SCAN_BYTES)) >= len(MARKER):
            found = content.find(MARKER)
            while found >= 0:
                if header := self._header_at(position + found):
                    yield header
                found = content.find(MARKER, found + 1)
            position += len(content) - len(MARKER) + 1

    def _refuse(self, what: str) -> NoReturn:
        raise LogError(
            f"{self.path} is damaged at byte {self.offset}: {what}; restore the file, or {USE_ANOTHER}"
        )
