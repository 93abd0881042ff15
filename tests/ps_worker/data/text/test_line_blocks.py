"""Blocks of lines: nothing lost, nothing cut, every line in one part."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.errors import DataError
from ps_worker.data.blocks.reader import FilePart
from ps_worker.data.text.line_blocks import LineNumbers, line_blocks, line_parts, lines_before

fast = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.lists(st.text("ab\t", max_size=14), max_size=12)


def blocks_of(part: FilePart, offset: int | None = None) -> list[tuple[int, bytes]]:
    return [(position, block.tobytes()) for block, position in line_blocks(part, offset, 16)]


def write(folder: Path, name: str, content: bytes) -> str:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


def ended(content: bytes) -> bytes:
    """Returns the content with an end to its last line."""
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

    blocks = blocks_of(FilePart(path))

    assert b"".join(block for _, block in blocks) == ended(content)
    assert all(block.endswith(b"\n") for _, block in blocks)
    for offset, block in blocks:
        assert ended(content[offset:]).startswith(block)
        assert blocks_of(FilePart(path), offset)[0] == (offset, block)


@fast
@given(lines=texts, ends_with_newline=st.booleans(), cuts=st.lists(st.integers(0, 80), max_size=4))
def test_every_line_is_in_the_part_in_which_it_begins(
    tmp_path: Path, lines: list[str], ends_with_newline: bool, cuts: list[int]
) -> None:
    content = "\n".join(lines).encode() + b"\n" * ends_with_newline
    path = write(tmp_path, "lines.tsv", content)
    cuts = sorted(cuts)
    parts = [
        FilePart(path, start, stop) for start, stop in zip([0, *cuts], [*cuts, None], strict=True)
    ]

    found = [blocks_of(part) for part in parts]

    assert b"".join(block for blocks in found for _, block in blocks) == ended(content)
    for part, blocks in zip(parts, found, strict=True):
        for offset, block in blocks:
            begins = [offset, *(offset + n + 1 for n in range(len(block) - 1) if block[n] == 10)]
            assert all(part.start <= begin for begin in begins)
            assert all(part.stop is None or begin < part.stop for begin in begins)
            rest = b"".join(block for position, block in blocks if position >= offset)
            assert b"".join(block for _, block in blocks_of(part, offset)) == rest


@fast
@given(size=st.integers(0, 50), num_parts=st.integers(1, 9))
def test_parts_are_as_equal_as_bytes_can_be(tmp_path: Path, size: int, num_parts: int) -> None:
    path = write(tmp_path, "rows.tsv", bytes(size))

    parts = line_parts(path, num_parts)

    assert len(parts) == max(1, min(size, num_parts))
    assert parts[0].start == 0
    assert parts[-1].stop is None
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
    sizes = [(size if part.stop is None else part.stop) - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ["rows.tsv.gz", "rows.zst"])
def test_compressed_file_is_not_cut(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, b"one\ntwo\n")

    assert line_parts(path, 2) == [FilePart(path)]


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
@pytest.mark.parametrize(("offset", "before"), [(0, 0), (4, 1), (8, 2), (11, 5)])
def test_line_numbers_count_what_is_before_the_pass(
    tmp_path: Path, name: str, offset: int, before: int
) -> None:
    path = write(tmp_path, name, b"one\ntwo\n\n\n\nsix\n")
    lines = LineNumbers(path, offset)

    first = lines.number(0)
    lines.passed += 2

    assert lines_before(path, offset) == before
    assert (first, lines.number(1)) == (before + 1, before + 4)


def test_empty_file_has_no_blocks(tmp_path: Path) -> None:
    assert blocks_of(FilePart(write(tmp_path, "empty.tsv", b""))) == []


def test_line_as_long_as_a_block_with_its_end_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "long.tsv", b"a" * 15 + b"\nb")

    assert blocks_of(FilePart(path)) == [(0, b"a" * 15 + b"\n"), (16, b"b\n")]


def test_longer_line_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "long.tsv", b"one\ntwo\n" + b"a" * 17)

    with pytest.raises(DataError, match=r"long\.tsv: the line at byte 8 is longer than 16 bytes"):
        blocks_of(FilePart(path))
