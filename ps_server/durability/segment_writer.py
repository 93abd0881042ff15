"""Appending to one segment file, with nothing left behind by a write that failed."""

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from ctr_ps.ps_server.durability.log_folder import LogFolder
from ctr_ps.ps_server.durability.segment_format import (
    Record,
    RecordHeader,
    SegmentHeader,
    checksum_of,
    new_seed,
)


class SegmentWriter:
    """A segment file that records are appended to. Not thread-safe, except for `sync`.

    Attributes:
        segment: Its number.
        size_bytes: Size of the file.
        next_record: Number of the next record.
    """

    def __init__(self, descriptor: int, header: SegmentHeader) -> None:
        """Appends to a file of no bytes, through a descriptor that it closes in the end."""
        self.segment = header.segment
        self.size_bytes = 0
        self.next_record = header.first_record
        self._descriptor = descriptor
        self._seed = header.seed

    @classmethod
    def create(
        cls, folder: LogFolder, segment: int, first_record: int, head: Sequence[Record]
    ) -> Self:
        """Writes a segment with its head, durably, but does not publish it.

        Raises:
            OSError: If it cannot be written; no file is left.
            LogError: If a record of the head is too long; no file is left.
        """
        header = SegmentHeader(
            segment=segment, first_record=first_record, head_records=len(head), seed=new_seed()
        )
        path = folder.unpublished_path(segment)
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
    def resume(cls, folder: LogFolder, header: SegmentHeader, end: int, next_record: int) -> Self:
        """Opens a segment to append after byte `end`; cuts off what follows. All of it is durable then.

        Raises:
            OSError: If the file cannot be opened or written.
        """
        path = folder.segment_path(header.segment)
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
