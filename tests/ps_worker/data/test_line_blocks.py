"""Blocks of lines: nothing lost, nothing cut, damage named."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.errors import DataError
from ps_worker.data.line_blocks import line_blocks


def blocks_of(path: Path, block_bytes: int = 16) -> list[bytes]:
    return [block.tobytes() for block in line_blocks(path, block_bytes)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text("ab\t", max_size=15), max_size=12),
    ends_with_newline=st.booleans(),
    suffix=st.sampled_from([".tsv", ".tsv.gz"]),
)
def test_blocks_are_the_whole_lines_of_the_file(
    tmp_path: Path, lines: list[str], ends_with_newline: bool, suffix: str
) -> None:
    content = "\n".join(lines).encode() + b"\n" * ends_with_newline
    path = tmp_path / f"lines{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)

    blocks = blocks_of(path)

    expected = content if content.endswith(b"\n") or not content else content + b"\n"
    assert b"".join(blocks) == expected
    assert all(block.endswith(b"\n") for block in blocks)


def test_empty_file_has_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "empty.tsv"
    path.touch()

    assert blocks_of(path) == []


def test_line_as_long_as_a_block_with_its_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.tsv"
    path.write_bytes(b"a" * 15 + b"\nb")

    assert blocks_of(path) == [b"a" * 15 + b"\n", b"b\n"]


def test_longer_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "long.tsv"
    path.write_bytes(b"a" * 17)

    with pytest.raises(DataError, match=r"long\.tsv: a line is longer than 16 bytes"):
        blocks_of(path)


def test_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n")[:-9])

    with pytest.raises(DataError, match=r"cut\.tsv\.gz: the file is cut off"):
        blocks_of(path)


@pytest.mark.parametrize("position", [0, 12, -6], ids=["magic number", "data", "checksum"])
def test_damaged_gzip_file_is_named(tmp_path: Path, position: int) -> None:
    data = bytearray(gzip.compress(b"".join(b"line %d\n" % n for n in range(100)), mtime=0))
    data[position] ^= 0xFF
    path = tmp_path / "damaged.tsv.gz"
    path.write_bytes(data)

    with pytest.raises(DataError, match=r"damaged\.tsv\.gz: not a sound gzip file"):
        blocks_of(path, 1024)


@pytest.mark.parametrize("name", ["absent.tsv", "absent.tsv.gz"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"{name}.*No such file"):
        blocks_of(tmp_path / name)
