"""Signatures of lists of files, and in which files two of them differ."""

import os
from pathlib import Path

import fsspec
import pytest

from ctr_ps.ps_worker.data.files import listing
from ctr_ps.ps_worker.data.files.listing import difference_of, signature_of, stamp_of


def signed(*paths: Path | str) -> str:
    files = [str(path) for path in paths]
    return signature_of(files, {path: stamp_of(path) for path in files})


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "part-0", tmp_path / "part-1"]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 20_000)
    return paths


def test_same_files_in_another_folder_at_another_time_are_the_same(
    parts: list[Path], tmp_path: Path
) -> None:
    copies = [tmp_path / "mount" / path.name for path in parts]
    copies[0].parent.mkdir()
    for path, copy in zip(parts, copies, strict=True):
        copy.write_bytes(path.read_bytes())
        os.utime(copy, (0, 0))

    assert signed(*copies) == signed(*parts)
    assert signed(*parts).startswith("2 files, 40000 bytes, digest ")
    assert signed() == "no files"


@pytest.mark.parametrize("at", [0, -1])
def test_another_first_or_last_byte_is_told_by_name(at: int, parts: list[Path]) -> None:
    before = signed(*parts)
    content = bytearray(parts[1].read_bytes())
    content[at] ^= 1
    parts[1].write_bytes(content)

    difference = difference_of(before, signed(*parts))

    assert "part-1 20000 bytes" in difference
    assert "part-0" not in difference
    assert difference_of(before, before) == ""


def test_fewer_files_other_sizes_and_another_order_differ(parts: list[Path]) -> None:
    before = signed(*parts)

    assert "; nothing, was part-1 20000 bytes" in difference_of(before, signed(parts[1]))
    assert signed(*reversed(parts)) != before
    parts[0].write_bytes(parts[0].read_bytes() + b"x")
    assert "part-0 20001 bytes" in difference_of(before, signed(*parts))


def test_of_many_files_some_are_opened_and_of_all_the_size_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(listing, "MOST_OPENED", 3)
    monkeypatch.setattr(listing, "ends_of", lambda path, *_: opened.append(path) or b"")
    paths = [tmp_path / f"part-{number}" for number in range(9)]
    for path in paths:
        path.write_bytes(b"x")

    before = signed(*paths)

    assert opened == [str(paths[0]), str(paths[4]), str(paths[8])]
    paths[3].write_bytes(b"xx")
    assert "part-3 2 bytes, was part-3 1 bytes" in difference_of(before, signed(*paths))


def test_files_by_url_have_the_signature_of_local_ones(parts: list[Path]) -> None:
    memory = fsspec.filesystem("memory")
    for path in parts:
        memory.pipe_file(f"/signatures/{path.name}", path.read_bytes())

    assert signed(*(f"memory://signatures/{path.name}" for path in parts)) == signed(*parts)


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert signed(tmp_path / "pipe").endswith("\npipe")
