"""File listing: local paths, patterns, and URLs of any file system that fsspec supports.

A path is a `str` everywhere. A path with "://" is a URL: `s3://clicks/day-1/part-*`, `memory://rows.tsv`.
"""

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any, TypeGuard, cast

from protos.errors import DataError

Files = str | Path | Sequence[str | Path]
"""Paths, patterns and URLs of files."""


def are_files(data: object) -> TypeGuard[Files]:
    """Whether data are the names of files."""
    if isinstance(data, str | Path):
        return True
    return isinstance(data, Sequence) and any(isinstance(each, str | Path) for each in data)


def files_of(files: Files) -> list[str]:
    """Returns the files that are named; see `matching_files`."""
    patterns = [files] if isinstance(files, str | Path) else files
    return matching_files([str(pattern) for pattern in patterns])


def matching_files(patterns: str | Sequence[str]) -> list[str]:
    """Returns the files that match any of `patterns`, each once, sorted by name.

    Args:
        patterns: Paths and URLs, with `*`, `?`, `[...]`, and `**` for any number of folders. A comma is
            part of a name.

    Raises:
        DataError: Names the first pattern that no file matches, or whose file system cannot be listed.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = _url_matches(pattern) if is_url(pattern) else _local_matches(pattern)
        files = [path for path, is_file in matches.items() if is_file]
        if not files:
            hint = ", which is a folder: name the files in it" if matches else ""
            raise DataError(f"no file matches {pattern!r}{hint}")
        found.update(files)
    return sorted(found)


def size_of(path: str) -> int:
    """Returns the size of a file in bytes; 0 if its file system does not report it.

    Raises:
        DataError: If the file does not exist.
    """
    with file_errors(path):
        if not is_url(path):
            return Path(path).stat().st_size
        file_system, name = _file_system_of(path)
        return file_system.size(name) or 0


def open_file(path: str) -> RawIOBase:
    """Opens a file for reading raw bytes; seekable.

    Raises:
        DataError: If the file does not exist or cannot be read.
    """
    with file_errors(path):
        if not is_url(path):
            return cast("RawIOBase", Path(path).open("rb", buffering=0))
        file_system, name = _file_system_of(path)
        return cast("RawIOBase", file_system.open(name, "rb"))


def is_url(path: str) -> bool:
    """Whether a path is read through fsspec instead of the operating system."""
    return "://" in path


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Translates `OSError` to a `DataError` that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path!r}: No such file or directory") from error
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise DataError(f"cannot read {path!r}: {reason}") from error


def _local_matches(pattern: str) -> dict[str, bool]:
    """Returns the matching paths, and whether each is a file."""
    paths = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207 (absolute patterns)
    return {str(path): path.is_file() for path in paths}


def _url_matches(pattern: str) -> dict[str, bool]:
    with file_errors(pattern):
        file_system, name = _file_system_of(pattern)
        if not glob.has_magic(name):
            is_there = file_system.exists(name)
            names = {name: file_system.isfile(name)} if is_there else {}
        else:
            entries = file_system.glob(name, detail=True)
            names = {name: entry["type"] == "file" for name, entry in entries.items()}
    return {
        _url_like(pattern, file_system.unstrip_protocol(name)): is_file
        for name, is_file in names.items()
    }


def _url_like(pattern: str, url: str) -> str:
    """Returns the URL of a match with the other links of the pattern's chain.

    The match replaces the first link with a path, as in `simplecache::s3://clicks/*` and
    `zip://*.tsv::s3://clicks.zip`.
    """
    links = pattern.split("::")
    links[next(index for index, link in enumerate(links) if "://" in link)] = url
    return "::".join(links)


def _file_system_of(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the file's name in it."""
    # Imported here because most jobs only read local files.
    from fsspec.core import url_to_fs

    try:
        return cast("tuple[Any, str]", url_to_fs(url))
    except (ValueError, ImportError) as error:  # no such protocol; its package is not installed
        raise DataError(f"cannot read {url!r}: {error}") from error
