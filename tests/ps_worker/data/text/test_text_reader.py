"""Blocks of lines: nothing lost, nothing cut, every line in one split."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.text_reader import (
    line_blocks,
    line_splits,
    lines_before,
)

fast = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.lists(st.text("ab\t", max_size=14), max_size=12)


def blocks_of(split: FileSplit, offset: int | None = None) -> list[tuple[int, bytes]]:
    return [(position, block.tobytes()) for block, position in line_blocks(split, offset, 16)]


def write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def ended(content: bytes) -> bytes:
    return content if content.endswith(b"\n") or not content else content + b"\n"


@fast
@given(
    lines=texts, ends_with_newline=st.booleans(), name=st.sampled_from(["lines.tsv", "lines.gz"])
)
def test_blocks_are_the_whole_lines_of_the_file(
    tmp_path: Path, lines: list[str], ends_with_newline: bool, name: str
) -> None:
    content = "\n".join(lines).encode() + b"\n" * ends_with_newline
    path = write(tmp_path, name, content)

    blocks = blocks_of(FileSplit(path))

    assert b"".join(block for _, block in blocks) == ended(content)
    assert all(block.endswith(b"\n") for _, block in blocks)
    for offset, block in blocks:
        assert ended(content[offset:]).startswith(block)
        assert blocks_of(FileSplit(path), offset)[0] == (offset, block)


@fast
@given(lines=texts, ends_with_newline=st.booleans(), cuts=st.lists(st.integers(0, 80), max_size=4))
def test_every_line_is_in_the_split_in_which_it_begins(
    tmp_path: Path, lines: list[str], ends_with_newline: bool, cuts: list[int]
) -> None:
    content = "\n".join(lines).encode() + b"\n" * ends_with_newline
    path = write(tmp_path, "lines.tsv", content)
    cuts = sorted(cuts)
    splits = [
        FileSplit(path, start, stop) for start, stop in zip([0, *cuts], [*cuts, None], strict=True)
    ]

    found = [blocks_of(split) for split in splits]

    assert b"".join(block for blocks in found for _, block in blocks) == ended(content)
    for split, blocks in zip(splits, found, strict=True):
        for offset, block in blocks:
            begins = [offset, *(offset + n + 1 for n in range(len(block) - 1) if block[n] == 10)]
            assert all(split.start <= begin for begin in begins)
            assert all(split.stop is None or begin < split.stop for begin in begins)
            rest = b"".join(block for position, block in blocks if position >= offset)
            assert b"".join(block for _, block in blocks_of(split, offset)) == rest


@fast
@given(size=st.integers(0, 50), num_splits=st.integers(1, 9))
def test_splits_are_as_equal_as_bytes_can_be(tmp_path: Path, size: int, num_splits: int) -> None:
    path = write(tmp_path, "rows.tsv", bytes(size))

    splits = line_splits(path, num_splits)

    assert len(splits) == max(1, min(size, num_splits))
    assert splits[0].start == 0
    assert splits[-1].stop is None
    assert [split.stop for split in splits[:-1]] == [split.start for split in splits[1:]]
    sizes = [(size if split.stop is None else split.stop) - split.start for split in splits]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["rows.tsv.gz", "rows.zst"])
def test_compressed_file_is_not_cut(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, b"one\ntwo\n")

    assert line_splits(path, 2) == [FileSplit(path)]


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
@pytest.mark.parametrize(("offset", "before"), [(0, 0), (4, 1), (8, 2), (11, 5)])
def test_lines_before_an_offset_are_counted(
    tmp_path: Path, name: str, offset: int, before: int
) -> None:
    path = write(tmp_path, name, b"one\ntwo\n\n\n\nsix\n")

    assert lines_before(path, offset) == before


def test_line_as_long_as_a_block_with_its_end_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "long.tsv", b"a" * 15 + b"\nb")

    assert blocks_of(FileSplit(path)) == [(0, b"a" * 15 + b"\n"), (16, b"b\n")]


def test_longer_line_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "long.tsv", b"one\ntwo\n" + b"a" * 17)

    with pytest.raises(DataError, match=r"long\.tsv: the line at byte 8 is longer than 16 bytes"):
        blocks_of(FileSplit(path))
