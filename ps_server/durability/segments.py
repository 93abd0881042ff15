"""One segment file of an update log: its bytes (docs/update_log.md), its writer and its reader.

    segment header | record | record | ...          record: header, kind, payload

Checksums are XXH3-64. Headers are hashed with a seed that is random for each segment, so bytes inside a
payload or of another segment never pass for a record.
"""

import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

import xxhash

from ctr_ps.protos.errors import LogError

MAGIC = b"CTRPSLOG"
FORMAT_VERSION = 1
"""A reader accepts only this version."""

MARKER = b"\xc5\xb1RC"  # first bytes of a record, to find the next one after damage

MAX_KIND_BYTES = 255
MAX_PAYLOAD_BYTES = 2**32 - 1

_SCAN_BYTES = 4 * 2**20

USE_ANOTHER = "start the server from a checkpoint with another, empty folder as its update log"

_SEGMENT = struct.Struct("<8sIIQQQ")  # magic, version, head_records, segment, first_record, seed
_CHECKSUM = struct.Struct("<Q")
_RECORD = struct.Struct("<IQQQB")  # length, number, acknowledged, payload_checksum, kind_length

SEGMENT_HEADER_BYTES = _SEGMENT.size + _CHECKSUM.size
_KIND_AT = len(MARKER) + _CHECKSUM.size + _RECORD.size
MAX_RECORD_HEADER_BYTES = _KIND_AT + MAX_KIND_BYTES
"""Bytes of the longest record header, with its kind."""


@dataclass(frozen=True, slots=True)
class Record:
    """One call that changed the server's state, or one record of a segment's head.

    `kind` says what the payload is, at most 255 bytes as UTF-8; for a call, its name.
    """

    kind: str
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """First bytes of a segment file: its number, that of its first record, and how many the head has.

    `seed` is that of the checksums of record headers.
    """

    segment: int
    first_record: int
    head_records: int
    seed: int

    def encode(self) -> bytes:
        """Returns the header's bytes."""
        fields = _SEGMENT.pack(
            MAGIC, FORMAT_VERSION, self.head_records, self.segment, self.first_record, self.seed
        )
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Returns the header of a segment file that begins with `content`.

        Raises LogError if it is none, is damaged, or has another version; says which, without the file.
        """
        if not content.startswith(MAGIC):
            raise LogError("it does not begin as a segment of an update log")
        fields, checksum = content[: _SEGMENT.size], content[_SEGMENT.size : SEGMENT_HEADER_BYTES]
        if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)):
            raise LogError("the segment's header is damaged")
        _, version, head_records, segment, first_record, seed = _SEGMENT.unpack(fields)
        if version != FORMAT_VERSION:
            raise LogError(f"the segment has format version {version}, expected {FORMAT_VERSION}")
        return cls(segment=segment, first_record=first_record, head_records=head_records, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What stands before a payload."""

    number: int  # number of the record; they are consecutive through all segments
    acknowledged: int  # all records with a lower number were acknowledged when this one was written
    kind: str
    payload_bytes: int
    payload_checksum: int

    def encode(self, seed: int) -> bytes:
        """Returns the header's bytes; raises LogError if the kind or the payload is too long."""
        kind = self.kind.encode()
        if len(kind) > MAX_KIND_BYTES or self.payload_bytes > MAX_PAYLOAD_BYTES:
            raise LogError(
                f"a record of kind {self.kind[:MAX_KIND_BYTES]!r} ({len(kind)} bytes) with a payload of "
                f"{self.payload_bytes} bytes is too long: a kind may have {MAX_KIND_BYTES} bytes, a payload "
                f"{MAX_PAYLOAD_BYTES}"
            )
        numbers = (self.payload_bytes, self.number, self.acknowledged, self.payload_checksum)
        fields = _RECORD.pack(*numbers, len(kind)) + kind
        return MARKER + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields, seed)) + fields

    @classmethod
    def decode(cls, content: bytes, seed: int) -> Self | None:
        """Returns the header that `content` begins with; None if that is no whole, unaltered header."""
        if len(content) < _KIND_AT or not content.startswith(MARKER):
            return None
        fields = content[len(MARKER) + _CHECKSUM.size : _KIND_AT + content[_KIND_AT - 1]]
        (checksum,) = _CHECKSUM.unpack_from(content, len(MARKER))
        if checksum != xxhash.xxh3_64_intdigest(fields, seed):
            return None
        payload_bytes, number, acknowledged, payload_checksum, _ = _RECORD.unpack_from(fields)
        return cls(
            number=number,
            acknowledged=acknowledged,
            kind=fields[_RECORD.size :].decode(),
            payload_bytes=payload_bytes,
            payload_checksum=payload_checksum,
        )

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return _KIND_AT + len(self.kind.encode())


def checksum_of(payload: bytes | memoryview) -> int:
    """Returns the checksum of a payload; the GIL is free meanwhile."""
    return xxhash.xxh3_64_intdigest(payload)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError of the block into a LogError that begins with `what`."""
    try:
        yield
    except OSError as error:
        raise LogError(f"{what}: {error}") from error


class SegmentWriter:
    """A segment file that records are appended to. Not thread-safe, except for `sync`.

    A write that failed leaves nothing behind.
    """

    def __init__(self, descriptor: int, header: SegmentHeader) -> None:
        self.segment = header.segment
        self.size_bytes = 0
        self.next_record = header.first_record
        self._descriptor = descriptor
        self._seed = header.seed

    @classmethod
    def create(cls, path: Path, segment: int, first_record: int, head: Sequence[Record]) -> Self:
        """Writes a segment with its head, durably.

        Raises:
            OSError: If it cannot be written; no file is left.
            LogError: If a record of the head is too long; no file is left.
        """
        header = SegmentHeader(
            segment=segment,
            first_record=first_record,
            head_records=len(head),
            seed=secrets.randbits(64),
        )
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC
        writer = cls(os.open(path, flags, 0o600), header)
        try:
            writer._write([header.encode()])
            for record in head:
                writer.append(record, checksum_of(record.payload), first_record)
            os.fsync(writer._descriptor)
        except BaseException:
            writer.close()
            path.unlink()
            raise
        return writer

    @classmethod
    def resume(cls, path: Path, header: SegmentHeader, end: int, next_record: int) -> Self:
        """Opens a segment to append after byte `end`; cuts off what follows. All of it is durable then.

        Raises OSError if the file cannot be opened or written.
        """
        writer = cls(os.open(path, os.O_WRONLY | os.O_APPEND), header)
        try:
            os.ftruncate(writer._descriptor, end)
            os.fsync(writer._descriptor)
        except BaseException:
            writer.close()
            raise
        writer.size_bytes = end
        writer.next_record = next_record
        return writer

    def append(self, record: Record, payload_checksum: int, acknowledged: int) -> None:
        """Appends a record with one system call, without copying its payload.

        Raises:
            OSError: If it cannot be written as a whole; then nothing of it is in the file, if that can still
                be made shorter. The segment takes no more records after that.
            LogError: If kind or payload are too long; nothing was written.
        """
        payload = memoryview(record.payload).cast("B")
        header = RecordHeader(
            number=self.next_record,
            acknowledged=acknowledged,
            kind=record.kind,
            payload_bytes=payload.nbytes,
            payload_checksum=payload_checksum,
        )
        self._write([header.encode(self._seed), payload])
        self.next_record += 1

    def sync(self) -> None:
        """Makes all records durable that were appended before the call; raises OSError."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Closes the file, without making it durable."""
        os.close(self._descriptor)

    def _write(self, buffers: list[bytes | memoryview]) -> None:
        size = sum(len(buffer) for buffer in buffers)
        written = 0
        try:
            written = os.writev(self._descriptor, buffers)
            while written < size:  # a full disk ends one write early, and the next says so
                left = memoryview(b"".join(buffers))[written:]
                written += os.write(self._descriptor, left)
        except OSError:
            with suppress(OSError):  # the reader cuts off what is not a whole record, too
                os.ftruncate(self._descriptor, self.size_bytes)
            raise
        self.size_bytes += size


class SegmentReader:
    """One segment file, read from its beginning."""

    def __init__(self, path: Path, segment: int, *, is_last: bool) -> None:
        """Opens the file; raises LogError if its header is damaged or of another segment."""
        self.path = path
        self.is_last = is_last
        # where the next record begins; in the end, where the last whole one ended
        self.offset = SEGMENT_HEADER_BYTES
        # size of the torn tail, which the last segment may have; known in the end
        self.torn_bytes = 0
        with disk_errors(f"cannot read {path}"):
            self._file: BinaryIO = path.open("rb")
            self._size = os.fstat(self._file.fileno()).st_size
        try:
            self.header = SegmentHeader.decode(self._read(0, SEGMENT_HEADER_BYTES))
            if self.header.segment != segment:
                raise LogError(f"its header says segment {self.header.segment}")
        except LogError as error:
            self._file.close()
            raise LogError(f"{path}: {error}; restore the file, or {USE_ANOTHER}") from error
        self.next_record = self.header.first_record

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def records(self) -> Iterator[Record]:
        """Yields all whole records, those of the head first.

        Raises LogError if the file is damaged or cannot be read.
        """
        while self.offset < self._size:
            header = self._header_at(self.offset)
            record = None if header is None else self._record_at(self.offset, header)
            if header is None or record is None:
                self._require_torn()
                self.torn_bytes = self._size - self.offset
                break
            if header.number != self.next_record:
                self._refuse(f"record {header.number} follows, expected {self.next_record}")
            self.offset += header.header_bytes + header.payload_bytes
            self.next_record += 1
            yield record
        if self.next_record < self.header.first_record + self.header.head_records:
            self._refuse("the head is incomplete, although it was on disk when the segment began")

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

    def _require_torn(self) -> None:
        """Raises LogError unless what begins at `offset` is a torn tail."""
        what = f"record {self.next_record} is incomplete or altered"
        if not self.is_last:
            self._refuse(f"{what}, although later segments follow")
        for later in self._headers_after(self.offset):
            if later.acknowledged > self.next_record:
                self._refuse(
                    f"{what}, although it was acknowledged before record {later.number}, which follows"
                )

    def _headers_after(self, offset: int) -> Iterator[RecordHeader]:
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
