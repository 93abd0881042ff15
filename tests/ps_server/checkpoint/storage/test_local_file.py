"""Files written with O_DIRECT, or through the page cache on file systems without it."""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctr_ps.ps_server.checkpoint.storage import local_file as module
from ctr_ps.ps_server.checkpoint.storage.local_file import BUFFER_BYTES, direct_file

PAGE = 4096


def contents(sizes: Sequence[int]) -> list[bytes]:
    random = np.random.default_rng(0)
    return [random.bytes(size) for size in sizes]


def written(path: Path, pieces: Sequence[bytes]) -> bytes:
    path.unlink(missing_ok=True)
    with direct_file(path) as sink:
        for piece in pieces:
            sink.write(pa.py_buffer(piece))
    return path.read_bytes()


def refuse_direct(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    """Makes every write with O_DIRECT fail."""
    write = os.write

    def refusing(descriptor: int, content: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(refusal, os.strerror(refusal))
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refusing)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(sizes=st.lists(st.integers(0, 5 * PAGE), max_size=12))
def test_file_holds_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(module, "BUFFER_BYTES", 2 * PAGE)
    pieces = contents(sizes)

    assert written(tmp_path / "file", pieces) == b"".join(pieces)


def read_without_waiting(path: Path, start: int) -> None:
    with path.open("rb") as file:
        os.preadv(file.fileno(), [bytearray(PAGE)], start, os.RWF_NOWAIT)


def test_what_is_written_is_not_in_the_page_cache(tmp_path: Path) -> None:
    cached, path = tmp_path / "cached", tmp_path / "file"
    cached.write_bytes(bytes(PAGE))
    try:
        read_without_waiting(cached, 0)
    except OSError:
        pytest.skip("this file system does not say what is in the page cache")
    with direct_file(path) as sink:
        sink.write(contents([2 * BUFFER_BYTES])[0])

    with pytest.raises(BlockingIOError):
        read_without_waiting(path, BUFFER_BYTES)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_system_without_direct_writing_takes_files_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """And syncs them regularly."""
    monkeypatch.setattr(module, "BUFFER_BYTES", 2 * PAGE)
    monkeypatch.setattr(module, "FORCE_BYTES", 4 * PAGE)
    refuse_direct(monkeypatch, refusal)
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    pieces = contents([PAGE, 8 * PAGE, 100])

    assert written(tmp_path / "file", pieces) == b"".join(pieces)
    assert len(forced) == 3


@pytest.mark.parametrize("most", [PAGE, 512, 1000])
def test_what_a_write_leaves_is_written_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Whether the write ended on a block boundary or not."""
    monkeypatch.setattr(module, "BUFFER_BYTES", 2 * PAGE)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, left: write(descriptor, left[:most]))
    pieces = contents([3 * PAGE + 7])

    assert written(tmp_path / "file", pieces) == pieces[0]


def test_failing_disk_is_not_taken_for_a_file_system_without_direct_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_direct(monkeypatch, errno.EIO)

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        written(tmp_path / "file", contents([2 * BUFFER_BYTES]))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_error_of_the_caller_is_told_and_no_descriptor_left(tmp_path: Path) -> None:
    before = open_descriptors()

    def write_half() -> None:
        with direct_file(tmp_path / "file") as sink:
            sink.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()

    assert open_descriptors() == before


def test_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("other")

    with pytest.raises(FileExistsError), direct_file(tmp_path / "file"):
        pass

    assert (tmp_path / "file").read_text() == "other"
