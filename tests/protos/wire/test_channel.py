"""Options of channels: the library ignores those that it does not have, without a word."""

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from protos.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS

NAMES = {name for name, _ in [*CHANNEL_OPTIONS, *SERVER_OPTIONS]}


@pytest.fixture(scope="module")
def library() -> bytes:
    """The bytes of gRPC's compiled library, which has the names of all options that it reads."""
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_library_reads_every_option(library: bytes, name: str) -> None:
    assert name.encode() + b"\0" in library
