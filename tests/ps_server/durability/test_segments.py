"""Bytes of headers."""

from dataclasses import replace

import pytest

from ctr_ps.protos.errors import LogError
from ctr_ps.ps_server.durability.segments import (
    MARKER,
    MAX_KIND_BYTES,
    MAX_PAYLOAD_BYTES,
    RecordHeader,
    SegmentHeader,
    checksum_of,
)

SEED = 2**64 - 3
HEADER = RecordHeader(
    number=2**40,
    acknowledged=7,
    kind="push",
    payload_bytes=5,
    payload_checksum=checksum_of(b"12345"),
)
SEGMENT = SegmentHeader(segment=3, first_record=2**40, head_records=2, seed=SEED)


@pytest.mark.parametrize("kind", ["", "push", "ü" * 127])
def test_record_header_is_read_back(kind: str) -> None:
    header = replace(HEADER, kind=kind)

    encoded = header.encode(SEED)

    assert RecordHeader.decode(encoded + b"payload", SEED) == header
    assert header.header_bytes == len(encoded)


def test_documented_bytes_of_a_record() -> None:
    """Fields are where docs/update_log.md says."""
    encoded = HEADER.encode(SEED)

    assert encoded[:4] == MARKER == bytes.fromhex("c5b15243")
    assert encoded[12:16] == (5).to_bytes(4, "little")
    assert encoded[16:24] == (2**40).to_bytes(8, "little")
    assert encoded[24:32] == (7).to_bytes(8, "little")
    assert encoded[32:40] == checksum_of(b"12345").to_bytes(8, "little")
    assert encoded[40:] == b"\x04push"


def test_record_header_of_another_segment_is_none() -> None:
    assert RecordHeader.decode(HEADER.encode(SEED), SEED + 1) is None


@pytest.mark.parametrize(
    "header",
    [
        replace(HEADER, kind="ü" * 128),
        replace(HEADER, payload_bytes=MAX_PAYLOAD_BYTES + 1),
    ],
    ids=["kind", "payload"],
)
def test_record_that_is_too_long_is_refused(header: RecordHeader) -> None:
    with pytest.raises(
        LogError, match=rf"too long: a kind may have {MAX_KIND_BYTES} bytes, a payload 4294967295"
    ):
        header.encode(SEED)


def test_documented_bytes_of_a_segment_header() -> None:
    encoded = SEGMENT.encode()

    assert encoded[:8] == b"CTRPSLOG"
    assert encoded[8:16] == b"\x01\0\0\0\x02\0\0\0"
    assert encoded[16:24] == (3).to_bytes(8, "little")
    assert encoded[24:32] == (2**40).to_bytes(8, "little")
    assert encoded[32:40] == SEED.to_bytes(8, "little")
    assert encoded[40:] == checksum_of(encoded[:40]).to_bytes(8, "little")
    assert SegmentHeader.decode(encoded + b"more") == SEGMENT


def test_segment_of_another_version_is_refused() -> None:
    fields = SEGMENT.encode()[:40].replace(b"LOG\x01", b"LOG\x02")

    with pytest.raises(LogError, match="format version 2, expected 1"):
        SegmentHeader.decode(fields + checksum_of(fields).to_bytes(8, "little"))
