"""Content is the same however it is stored; damage is named; new files are whole or not there."""

import gzip
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.content import atomic_file, is_compressed, open_content

CONTENT = b"".join(b"line %d\n" % number for number in range(100_000))
SUFFIXES = [".tsv", ".gz", ".zst"]


def packed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content, mtime=0)
    return pa.compress(content, "zstd", asbytes=True) if suffix == ".zst" else content


def read(path: str, offset: int = 0) -> bytes:
    buffer, content = memoryview(bytearray(1 << 16)), b""
    with open_content(path, offset) as stream:
        while count := stream.readinto(buffer):
            content += buffer[:count]
    return content


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("offset", [0, 1, 700_001, len(CONTENT), len(CONTENT) + 1])
def test_content_is_read_from_any_offset(suffix: str, offset: int, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(packed(CONTENT, suffix))

    assert read(str(path), offset) == CONTENT[offset:]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_url_is_read_as_a_path_is(suffix: str) -> None:
    url = f"memory://content{suffix}"
    fsspec.filesystem("memory").pipe(f"/content{suffix}", packed(CONTENT, suffix))

    try:
        assert read(url, 5) == CONTENT[5:]
    finally:
        fsspec.filesystem("memory").rm(f"/content{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_empty_file_has_no_content(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"empty{suffix}"
    path.touch()

    assert read(str(path)) == b""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_put_behind_each_other_are_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"two{suffix}"
    path.write_bytes(packed(b"one\n", suffix) + packed(b"two\n", suffix))

    assert read(str(path)) == b"one\ntwo\n"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("missing_bytes", [1, 9, 1000])
def test_truncated_file_is_named(suffix: str, missing_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(packed(CONTENT, suffix)[:-missing_bytes])

    with pytest.raises(DataError, match=rf"cut{suffix}: the file is truncated"):
        read(str(path))


@pytest.mark.parametrize(
    ("suffix", "position"),
    [(".gz", 0), (".gz", 12), (".gz", -6), (".gz", -2), (".zst", 0), (".zst", 20)],
    ids=["magic number", "data", "checksum", "length", "zstd magic number", "zstd data"],
)
def test_damaged_file_is_named(suffix: str, position: int, tmp_path: Path) -> None:
    data = bytearray(packed(CONTENT, suffix))
    data[position] ^= 0xFF
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(data)

    with pytest.raises(DataError, match=rf"damaged{suffix}: not a valid (gzip|zstd) file"):
        read(str(path))


def test_end_of_the_name_tells_whether_content_is_compressed() -> None:
    assert is_compressed("s3://bucket/a.tsv.gz")
    assert is_compressed("a.zst")
    assert not is_compressed("gz/a.tsv")


@pytest.mark.parametrize("suffix", [".bz2", ".zip"])
def test_other_compression_is_refused_and_not_read_as_text(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.tsv{suffix}"
    path.write_bytes(CONTENT)

    with pytest.raises(
        DataError, match=rf"a\.tsv{suffix}: {suffix} files are not supported: decompress"
    ):
        read(str(path))


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.tsv.zst"])
def test_file_appears_at_the_end(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with atomic_file(path) as file:
        file.write(b"content")
        assert not path.exists()

    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_gzip_file_tells_neither_its_time_nor_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    with atomic_file(path) as file:
        file.write(b"content")

    header = path.read_bytes()[:10]
    assert gzip.decompress(path.read_bytes()) == b"content"
    assert header[3] == 0  # no name
    assert header[4:8] == bytes(4)  # no time
