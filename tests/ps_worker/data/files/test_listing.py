"""Which files match, locally and by URL, and in which files two lists of them differ."""

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files import listing
from ctr_ps.ps_worker.data.files.listing import (
    difference_of,
    ends_of,
    matching_files,
    open_file,
    require_unchanged,
    signature_of,
    size_of,
    stamp_of,
)


def touch(folder: Path, *names: str) -> list[str]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return [str(path) for path in paths]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """A file system of its own, under memory://bucket."""
    file_system = fsspec.filesystem("memory")
    file_system.pipe({"/bucket/odd/[1].csv": b"", "/bucket/odd/1.csv": b""})
    file_system.pipe({"/bucket/b.tsv": b"bb", "/bucket/a.tsv": b"a", "/bucket/day/c.tsv": b""})
    yield file_system
    file_system.rm("/bucket", recursive=True)


def test_matches_of_a_pattern_are_sorted_by_name_with_numbers_as_numbers(tmp_path: Path) -> None:
    b, a, _ = touch(tmp_path, "b.tsv", "a.tsv", "c.txt")
    days = [f"day-{day}/{part}.csv" for day in (1, 2, 9, 10, 11, 100) for part in (1, 2, 10)]
    expected = touch(tmp_path, *days, "day-x/1.csv")

    assert matching_files(str(tmp_path / "*.tsv")) == [a, b]
    assert matching_files(str(tmp_path / "*/*.csv")) == expected


def test_files_are_in_the_order_given(tmp_path: Path) -> None:
    b, a, c = touch(tmp_path, "b.tsv", "a.tsv", "c.csv")

    assert matching_files([b, a]) == [b, a]
    assert matching_files([c, str(tmp_path / "*")]) == [c, a, b]
    assert matching_files([str(tmp_path / "*.csv"), str(tmp_path / "*.tsv")]) == [c, a, b]


def test_file_that_two_patterns_match_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = touch(tmp_path, "a.tsv", "b.tsv")
    monkeypatch.chdir(tmp_path)

    assert matching_files([b, str(tmp_path / "*")]) == [b, a]
    assert matching_files(["./a.tsv", "a.tsv"]) == ["a.tsv"]


def test_two_stars_match_any_number_of_folders(tmp_path: Path) -> None:
    paths = touch(tmp_path, "a.tsv", "day/b.tsv", "day/hour/c.tsv")

    assert matching_files(str(tmp_path / "**" / "*.tsv")) == paths


def test_patterns_find_no_markers(tmp_path: Path) -> None:
    part, marker, _ = touch(tmp_path, "part-0", "_SUCCESS", "_metadata")

    assert matching_files(str(tmp_path / "*")) == [part]
    assert matching_files(marker) == matching_files(str(tmp_path / "_S*")) == [marker]


def test_comma_is_part_of_a_name(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a,b.tsv")

    assert matching_files(path) == [path]


@pytest.mark.parametrize("name", ["part[1].csv", "what?.csv", "a*b.csv"])
def test_file_of_a_patterns_name_is_meant_before_what_it_matches(tmp_path: Path, name: str) -> None:
    (path, *_) = touch(tmp_path, name, "part1.csv", "what1.csv", "a-b.csv")

    assert matching_files(path) == [path]


def test_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = touch(tmp_path, "a.tsv", "~.tsv")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert matching_files("~/a.tsv") == matching_files("~/a*") == [a]
    assert matching_files("~.tsv") == ["~.tsv"]
    with pytest.raises(DataError, match="no file matches '~/absent'"):
        matching_files("~/absent")
    assert matching_files(f"{tmp_path}/~*") == [b]


def test_fifo_and_link_to_nothing_are_called_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("absent")

    for name, what in (("fifo", "a FIFO"), ("lin*", "a broken link")):
        with pytest.raises(DataError, match=rf"{re.escape(name)}', which is {what}, not a file"):
            matching_files(str(tmp_path / name))


def test_pattern_without_match_is_named(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a.tsv")

    with pytest.raises(DataError, match=r"no file matches 'absent\*'"):
        matching_files([path, "absent*"])


def test_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder: name the files in it"):
        matching_files(str(tmp_path))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("memory://bucket/*.tsv", ["memory:///bucket/a.tsv", "memory:///bucket/b.tsv"]),
        ("memory://bucket/*", ["memory:///bucket/a.tsv", "memory:///bucket/b.tsv"]),
        ("memory://bucket/**/c.tsv", ["memory:///bucket/day/c.tsv"]),
        ("memory://bucket/a.tsv", ["memory:///bucket/a.tsv"]),
        ("memory://bucket/odd/[1].csv", ["memory:///bucket/odd/[1].csv"]),
        ("memory://bucket/odd/[12].csv", ["memory:///bucket/odd/1.csv"]),
        ("simplecache::memory://bucket/a*", ["simplecache::memory:///bucket/a.tsv"]),
        ("simplecache::memory://bucket/a.tsv", ["simplecache::memory:///bucket/a.tsv"]),
    ],
)
def test_urls_match_as_paths_do(pattern: str, files: list[str]) -> None:
    assert matching_files(pattern) == files


@pytest.mark.usefixtures("memory")
def test_url_that_two_patterns_match_is_read_once() -> None:
    patterns = ["memory://bucket/a.tsv", "memory:///bucket/a.tsv", "memory://bucket/a*"]

    assert matching_files(patterns) == ["memory:///bucket/a.tsv"]


def test_files_of_an_archive_match(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "clicks.zip", "w") as archive:
        archive.writestr("a.tsv", "aa")
        archive.writestr("b.txt", "")

    (path,) = matching_files(f"zip://*.tsv::file://{tmp_path}/clicks.zip")

    assert path == f"zip://a.tsv::file://{tmp_path}/clicks.zip"
    assert size_of(path) == 2


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("memory://bucket/absent*", r"no file matches 'memory://bucket/absent\*'$"),
        ("memory://bucket/absent", "no file matches 'memory://bucket/absent'$"),
        ("memory://bucket/day", "is a folder: name the files in it"),
        ("nowhere://bucket/*", r"cannot read 'nowhere://bucket/\*': Protocol not known: nowhere"),
    ],
)
def test_url_without_a_file_is_named(pattern: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        matching_files(pattern)


@pytest.mark.usefixtures("memory")
def test_size_is_that_of_the_file(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a")
    Path(path).write_bytes(b"abc")

    assert size_of(path) == 3
    assert size_of("memory://bucket/b.tsv") == 2


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("kind", ["path", "URL"])
def test_opened_file_can_be_read_from_anywhere(kind: str, tmp_path: Path) -> None:
    (tmp_path / "b.tsv").write_bytes(b"bb")
    path = str(tmp_path / "b.tsv") if kind == "path" else "memory://bucket/b.tsv"

    with open_file(path) as file:
        file.seek(1)
        assert file.read() == b"b"


@pytest.mark.parametrize("path", ["absent.tsv", "memory://absent.tsv"])
def test_missing_file_is_named(path: str) -> None:
    for read in (size_of, open_file):
        with pytest.raises(DataError, match=f"cannot read '{path}': No such file"):
            read(path)


def test_folder_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"cannot read '{tmp_path}': Is a directory"):
        open_file(str(tmp_path))


def test_object_that_is_replaced_has_another_stamp() -> None:
    """Also behind a listing that was made before."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/stamps/part", b"one")
    (url,) = matching_files("memory://stamps/*")
    listed = stamp_of(url)
    assert listed is not None
    require_unchanged(url, listed)

    memory.pipe_file("/stamps/part", b"two")

    with pytest.raises(DataError, match=r"memory://.*stamps/part has changed since it was listed"):
        require_unchanged(url, listed)


def test_both_ends_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"0123456789")

    assert ends_of(str(path), 10, 3) == b"012789"
    assert ends_of(str(path), 10, 7) == b"0123456789"
    assert ends_of(str(path), 10, 20) == b"0123456789"


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
