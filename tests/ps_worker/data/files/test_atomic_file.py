"""Files that are whole or not there."""

import gzip
from pathlib import Path

import pytest

from ctr_ps.ps_worker.data.files.content import atomic_file


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
