"""Folders of checkpoints: local, or any that fsspec reaches by a URL.

    path, file://              read into memory or mapped, written to disk past the page cache
    s3://, gs://, memory://    object stores: a file appears whole, by one request
    hdfs://, sftp://           remote file systems: a file is renamed into place

The rest of the package sees only `Folder`. Every failure is a CheckpointError that names the URL and the
operation.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.runtime.environment import with_home
from ctr_ps.ps_server.checkpoint.storage.local_file import Mapped, direct_file
from ctr_ps.ps_server.checkpoint.storage.remote import RemoteFolder, arrow_errors, remote_folder

_LOCAL_SCHEMES = ("file", "local")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_SHORT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_NO_PLACE = re.compile(r"[*?\[\]]|::|%2[eE]")


def folder_at(url: str | Path) -> "Folder":
    """Returns the folder at a path or URL; raises CheckpointError if it is invalid or cannot be reached."""
    place = place_of(url)
    if "://" not in place:
        return LocalFolder(Path(place))
    return remote_folder(place)


def place_of(url: str | Path) -> str:
    """Returns the canonical name: an absolute path without symbolic links, or a URL.

    Does not reach the storage. Raises CheckpointError if the path or URL is invalid.
    """
    text = str(with_home(str(url)))
    match = _URL.match(text)
    if _SHORT_URL.match(text) or ("://" in text and match is None):
        raise CheckpointError(
            f"{text!r} is neither a path nor a URL: a URL begins with scheme:// and is given as text, as "
            "pathlib.Path drops a slash"
        )
    scheme, rest = (match[1].lower(), text[match.end() :]) if match else ("file", text)
    if scheme in _LOCAL_SCHEMES:
        try:
            return str(Path(rest).resolve())
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL byte
            raise CheckpointError(
                f"{text!r} cannot be the path of a checkpoint: {error}"
            ) from error
    if _NO_PLACE.search(rest) or {".", ".."} & set(rest.split("/")):
        raise CheckpointError(
            f"{text!r} cannot be the URL of a checkpoint: '..', patterns and chained file systems are not "
            "allowed"
        )
    return f"{scheme}://{rest.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A folder in a local or mounted file system, which need not exist, and its files. Thread-safe."""

    path: Path

    @property
    def url(self) -> str:
        """An absolute path without symbolic links, or a URL; `folder_at` opens it in any process."""
        return str(self.path)

    @property
    def name(self) -> str:
        """Last component of `url`."""
        return self.path.name

    def child(self, name: str) -> "LocalFolder":
        """Returns the folder `name` in this one."""
        return LocalFolder(self.path / name)

    def make(self) -> None:
        """Creates the folder and its parents, where storage has folders."""
        with arrow_errors("make", self.path):
            missing = [folder for folder in self.path.parents if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            # A folder's entry is in its parent, which is synced separately.
            for folder in (self.path, *missing):
                _sync(folder.parent)

    def files(self) -> Mapping[str, int]:
        """Returns the sizes of its files in bytes, by name; empty if it does not exist."""
        sizes = {}
        for entry in self._entries():
            with suppress(FileNotFoundError):  # a link to nothing
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def folders(self) -> Sequence[str]:
        """Returns the names of its subfolders, without links."""
        return sorted(
            entry.name for entry in self._entries() if entry.is_dir(follow_symlinks=False)
        )

    def _entries(self) -> list[os.DirEntry[str]]:
        with (
            arrow_errors("list", self.path),
            suppress(FileNotFoundError),
            os.scandir(self.path) as found,
        ):
            return list(found)
        return []

    def has(self, file: str) -> bool:
        """Whether it has a file of this name."""
        with arrow_errors("read", self.path / file):
            return (self.path / file).is_file()

    def read(self, file: str) -> bytes:
        """Returns the content of a file."""
        with arrow_errors("read", self.path / file):
            return (self.path / file).read_bytes()

    def put(self, file: str, content: bytes) -> None:
        """Writes or replaces a file atomically: readers see all of the old content or all of the new."""
        # A name of its own: one process may be paused here while another one writes the same file.
        path, beside = self.path / file, self.path / f"{file}.{secrets.token_hex(8)}.next"
        with arrow_errors("write", path):
            try:
                beside.write_bytes(content)
                _sync(beside)
                beside.replace(path)
            except OSError:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise
            _sync(self.path)

    def create_new(self, file: str, content: bytes) -> bool:
        """Writes a file, and returns True; False: it exists, and stays unchanged.

        Only one of concurrent processes succeeds, in a local or mounted folder and where the store's fsspec
        package creates files exclusively, as that for S3; elsewhere more may.
        """
        with arrow_errors("write", self.path / file):
            try:
                with (self.path / file).open("xb") as sink:
                    sink.write(content)
            except FileExistsError:
                return False
            return True

    @contextmanager
    def create(self, file: str) -> Iterator[pa.NativeFile]:
        """Opens a new file for writing; it is complete and durable when the block ends without an error."""
        path = self.path / file
        with arrow_errors("write", path):
            path.unlink(missing_ok=True)  # it might be a link
            # Synced by the writer: another machine cannot sync this one's pages.
            with direct_file(path) as sink:
                yield sink
            _sync(self.path)

    @contextmanager
    def open(self, file: str) -> Iterator[pa.NativeFile]:
        """Opens a file for reading; the content is a copy, unaffected by later changes."""
        path = self.path / file
        with arrow_errors("read", path), pa.OSFile(str(path)) as source:
            yield source

    def map(self, file: str) -> Mapped:
        """Maps a file, if the storage has files; else reads it."""
        path = self.path / file
        with arrow_errors("read", path):
            try:
                return Mapped.of_file(path)
            except ValueError as error:
                raise CheckpointError(f"{path} was altered: it is empty") from error

    def remove_file(self, file: str) -> None:
        """Removes a file if it exists."""
        with arrow_errors("remove", self.path / file):
            (self.path / file).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder with its content if it exists."""
        with arrow_errors("remove", self.path), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def remove_if_empty(self) -> None:
        """Removes the folder if it is empty."""
        with suppress(OSError):
            self.path.rmdir()


Folder = LocalFolder | RemoteFolder
"""Any folder; `LocalFolder` documents the methods."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
