"""File listing: local paths, patterns, and URLs of any file system that fsspec supports; their signatures.

A path is a `str` everywhere. A path with "://" is a URL: `s3://clicks/day-1/part-*`, `memory://rows.tsv`.

A signature of a list tells whether two processes, or two runs, see the same files:

    2 files, 1320 bytes, digest 5f0c...
    part-0.tsv 660 bytes 81a3...          the name without its folder, and a digest of both ends of the file
    part-1.tsv 660 bytes 0c11...

A machine may have the files in another folder. Changes in the middle of a file are detected by its size only;
of a long list some files are not opened, and not all are listed.
"""

import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from io import RawIOBase
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any, TypeGuard, cast

import numpy as np

from ctr_ps.protos.errors import DataError, counted
from ctr_ps.protos.runtime.environment import with_home

MOST_OPENED = 1024
MOST_OPENED_BY_URL = 32
"""Files of a list whose ends are read; of a longer list this number, at equal distances."""
_END_BYTES = 4096
_MOST_LISTED = 2**15  # characters
_MOST_TOLD = 5

_FOLDER = "a folder: name the files in it"

_MODIFIED = (
    "ETag",
    "etag",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)
"""Entries of fsspec's file systems that change when a file is replaced, the most reliable first."""

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
    """Returns the files that match `patterns`, each once: in the order given, those of a pattern by name.

    Patterns are paths and URLs, with `*`, `?`, `[...]`, and `**` for any number of folders, unless a file has
    that name; none finds a marker such as `_SUCCESS`. A comma is part of a name; numbers in names are
    ordered as numbers; `~` is the home folder. A DataError names the first pattern without a match.
    """
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = _url_matches(pattern) if is_url(pattern) else _local_matches(pattern)
        files = [path for path, other in matches.items() if not other]
        if not PurePath(pattern).name.startswith("_"):
            files = [path for path in files if not PurePath(path).name.startswith("_")]
        if not files:
            hint = f", which is {next(iter(matches.values()))}" if matches else ""
            raise DataError(f"no file matches {pattern!r}{hint}")
        found |= dict.fromkeys(sorted(files, key=natural_order))
    return list(found)


def natural_order(path: str) -> tuple[list[str | int], str]:
    """Returns a sort key for paths by which day-9 is before day-10."""
    pieces = re.split(r"([0-9]+)", path)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], path


def size_of(path: str) -> int:
    """Returns the size of a file in bytes; 0 if unknown. Raises DataError if it does not exist."""
    with file_errors(path):
        if not is_url(path):
            return Path(path).stat().st_size
        file_system, name = _file_system_of(path)
        return file_system.size(name) or 0


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Distinguishes a file from an earlier or later one of the same name without reading it."""

    size: int  # in bytes
    modified: str  # when, or the ETag of an object; empty: unknown

    def __str__(self) -> str:
        return f"{self.size} bytes{self.modified and f' of {self.modified}'}"


def stamp_of(path: str, *, is_cached: bool = True) -> FileStamp | None:
    """Returns the stamp of a file; None if it is no regular file. Raises DataError if it does not exist.

    With `is_cached` a file system may answer from an earlier listing.
    """
    with file_errors(path):
        if not is_url(path):
            status = Path(path).stat()
            if not stat.S_ISREG(status.st_mode):
                return None
            seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
            at = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{nanoseconds:09}"
            return FileStamp(status.st_size, at)
        file_system, name = _file_system_of(path)
        if not is_cached:
            file_system.invalidate_cache(name)
        entry = file_system.info(name)
        modified = next((str(entry[key]) for key in _MODIFIED if entry.get(key)), "")
        return FileStamp(entry.get("size") or 0, modified)


def require_unchanged(path: str, listed: FileStamp) -> None:
    """Raises DataError if a listed file has changed since, or no longer exists."""
    if (now := stamp_of(path, is_cached=False)) != listed:
        raise DataError(
            f"{path} has changed since it was listed: it had {listed}, and now {now or 'is not a file'}. "
            "Start again, and write new rows to new files: files must not change during a run"
        )


def signature_of(files: Sequence[str], stamps: Mapping[str, FileStamp | None]) -> str:
    """Returns the signature of files in order, by name only without a stamp; raises DataError."""
    if not files:
        return "no files"
    limit = MOST_OPENED_BY_URL if any(map(is_url, files)) else MOST_OPENED
    num_opened = min(len(files), limit)
    opened = set(np.linspace(0, len(files) - 1, num_opened, dtype=np.int64).tolist())
    lines, size = [], 0
    for number, path in enumerate(files):
        line, stamp = PurePath(path).name, stamps.get(path)
        if stamp is not None:
            size += stamp.size
            line += f" {stamp.size} bytes"
            if number in opened:
                line += f" {_digest(ends_of(path, stamp.size, _END_BYTES))}"
        lines.append(line)
    digest = _digest("\n".join(lines).encode())
    shown = "\n".join(lines)[:_MOST_LISTED]
    return f"{counted(len(files), 'file')}, {size} bytes, digest {digest}\n{shown}"


def difference_of(was: str, now: str) -> str:
    """Returns the files that differ in two signatures; "" if they are equal."""
    if was == now:
        return ""
    (old, *old_files), (new, *new_files) = was.split("\n"), now.split("\n")
    pairs = list(zip_longest(old_files, new_files))
    differing = [(one, other) for one, other in pairs if one != other]
    told = [f"{other or 'nothing'}, was {one or 'nothing'}" for one, other in differing]
    more = len(told) - _MOST_TOLD
    named = "; ".join(told[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")
    return f"{new}, was {old}{named and f': {named}'}"


def open_file(path: str) -> RawIOBase:
    """Opens a file for reading raw bytes; seekable. Raises DataError if it cannot be read."""
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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def ends_of(path: str, size: int, num_bytes: int) -> bytes:
    """Returns the first and the last bytes of a file, all of a short one. Raises DataError."""
    both = [(0, min(num_bytes, size)), (max(size - num_bytes, num_bytes), size)]
    ranges = [(start, stop) for start, stop in both if start < size]
    with file_errors(path):
        if is_url(path):  # by requests of ranges: a file that is open may read far ahead
            file_system, name = _file_system_of(path)
            return b"".join(file_system.cat_file(name, start=at, end=stop) for at, stop in ranges)
        with Path(path).open("rb", buffering=0) as file:
            return b"".join(os.pread(file.fileno(), stop - at, at) for at, stop in ranges)


def _local_matches(pattern: str) -> dict[str, str]:
    """Returns the matching paths, with the kind of those that are no files, else ""."""
    path = Path(with_home(pattern))
    names = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207 (absolute)
    return {str(Path(name)): _instead_of_file(Path(name)) for name in names}


def _instead_of_file(path: Path) -> str:
    if path.is_file():
        return ""
    if path.is_dir():
        return _FOLDER
    kind = (
        "a FIFO" if path.is_fifo() else "a socket or a device" if path.exists() else "a broken link"
    )
    return f"{kind}, not a file: write its content to a file, which can be read more than once"


def _url_matches(pattern: str) -> dict[str, str]:
    with file_errors(pattern):
        file_system, name = _file_system_of(pattern)
        # A file whose name has brackets is likelier than one with a star.
        is_pattern = glob.has_magic(name) and not ("[" in name and file_system.exists(name))
        if not is_pattern:
            is_there = file_system.exists(name)
            names = {name: file_system.isfile(name)} if is_there else {}
        else:
            entries = file_system.glob(name, detail=True)
            names = {name: entry["type"] == "file" for name, entry in entries.items()}
    return {
        _url_like(pattern, file_system.unstrip_protocol(name)): "" if is_file else _FOLDER
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
    # Imported here because most jobs only read local files.
    from fsspec.core import url_to_fs

    try:
        return cast("tuple[Any, str]", url_to_fs(url))
    except (ValueError, ImportError) as error:  # no such protocol; its package is not installed
        raise DataError(f"cannot read {url!r}: {error}") from error
