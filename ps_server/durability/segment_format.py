"""Bytes of a segment file (docs/update_log.md).

    segment header | record | record | ...          record: header, kind, payload

Checksums are XXH3-64. Headers are hashed with a seed that is random for each segment, so bytes inside a
payload or of another segment never pass for a record.
"""

import secrets
import struct
from dataclasses import dataclass
from typing import Self

import xxhash

from ctr_ps.protos.errors import LogError

MAGIC = b"CTRPSLOG"
FORMAT_VERSION = 1
"""A reader accepts only this version."""

MARKER = b"\xc5\xb1RC"
"""First bytes of a record, to find the next one after damage."""

MAX_KIND_BYTES = 255
MAX_PAYLOAD_BYTES = 2**32 - 1

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

    Attributes:
        kind: What the payload is, at most 255 bytes as UTF-8; for a call, its name.
        payload: Opaque bytes, up to 4 GiB.
    """

    kind: str
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """First bytes of a segment file.

    Attributes:
        segment: Its number.
        first_record: Number of its first record.
        head_records: How many records the head has; they are the first.
        seed: Seed of the checksums of record headers.
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

        Raises:
            LogError: If it is none, is damaged, or has another version; says which, without the file.
        """
        if not content.startswith(MAGIC):
            raise LogError("no segment of an update log begins so")
        fields, checksum = content[: _SEGMENT.size], content[_SEGMENT.size : SEGMENT_HEADER_BYTES]
        if checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)):
            raise LogError("the segment's header is damaged")
        _, version, head_records, segment, first_record, seed = _SEGMENT.unpack(fields)
        if version != FORMAT_VERSION:
            raise LogError(f"the segment has format version {version}, expected {FORMAT_VERSION}")
        return cls(segment=segment, first_record=first_record, head_records=head_records, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What stands before a payload.

    Attributes:
        number: Number of the record; they are consecutive through all segments.
        acknowledged: All records with a lower number were acknowledged when this one was written.
        kind: See `Record`.
        payload_bytes: Size of the payload.
        payload_checksum: `checksum_of` the payload.
    """

    number: int
    acknowledged: int
    kind: str
    payload_bytes: int
    payload_checksum: int

    def encode(self, seed: int) -> bytes:
        """Returns the header's bytes, the kind included.

        Raises:
            LogError: If the kind or the payload is too long.
        """
        kind = self.kind.encode()
        if len(kind) > MAX_KIND_BYTES or self.payload_bytes > MAX_PAYLOAD_BYTES:
            raise LogError(
                f"a record of kind {self.kind[:MAX_KIND_BYTES]!r} ({len(kind)} bytes) with a payload of "
                f"{self.payload_bytes} bytes is too long: at most {MAX_KIND_BYTES} and {MAX_PAYLOAD_BYTES}"
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


def new_seed() -> int:
    """Returns a random seed for the record headers of a segment."""
    return secrets.randbits(64)
