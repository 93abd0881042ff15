"""Where checkpoints are: in folders of this machine, or in any that fsspec reaches by a URL.

    path, file://              mapped into memory to be read, past the page cache to disk when written
    s3://, gs://, memory://    object stores: a file is there once it is whole, by one request
    hdfs://, sftp://           remote file systems: a file is renamed into its place

The code above sees a `Folder` and no difference. Whatever goes wrong is a CheckpointError that names the
URL and what was tried.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from protos.errors import CheckpointError
from ps_server.checkpoint.storage.direct_file import direct_file

_LOCAL_SCHEMES = ("file", "local")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_SHORT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_NO_PLACE = re.compile(r"[*?\[\]]|::|%2[eE]")


class Folder(Protocol):
    """A folder that may be there or not, and the files in it. Thread-safe."""

    @property
    def url(self) -> str:
        """Where it is: an absolute path without symbolic links, or a URL; others open it by that."""
        ...

    @property
    def name(self) -> str:
        """The last part of `url`."""
        ...

    def child(self, name: str) -> "Folder":
        """Returns the folder `name` in this one."""
        ...

    def make(self) -> None:
        """Makes the folder and those above it, where storage knows folders."""
        ...

    def files(self) -> Mapping[str, int]:
        """Returns the sizes in bytes of the files in it, by name; none if there is no such folder."""
        ...

    def folders(self) -> Sequence[str]:
        """Returns the names of the folders in it, links left out."""
        ...

    def has(self, file: str) -> bool:
        """Whether there is a file of this name."""
        ...

    def read(self, file: str) -> bytes:
        """Returns what a file holds."""
        ...

    def put(self, file: str, content: bytes) -> None:
        """Replaces a file in one step: whoever reads finds all of the old one or all of the new one."""
        ...

    def create(self, file: str) -> AbstractContextManager[pa.NativeFile]:
        """Opens a new file to write; it is whole, and lasts, when the block has ended without an error."""
        ...

    def open(self, file: str) -> AbstractContextManager[pa.NativeFile]:
        """Opens a file to read."""
        ...

    def remove_file(self, file: str) -> None:
        """Removes a file; that it is not there is no error."""
        ...

    def remove(self) -> None:
        """Removes the folder with all that is in it; that it is not there is no error."""
        ...

    def remove_if_empty(self) -> None:
        """Removes the folder unless something is in it."""
        ...


def folder_at(url: str | Path) -> Folder:
    """Returns the folder at a path or a URL.

    Raises:
        CheckpointError: If it cannot be one, or its storage cannot be reached.
    """
    place = place_of(url)
    if "://" not in place:
        return LocalFolder(Path(place))
    # Late: most checkpoints are local.
    from ps_server.checkpoint.storage.remote import remote_folder

    return remote_folder(place)


def place_of(url: str | Path) -> str:
    """Returns the one name of a place: an absolute path without symbolic links, or a URL; nothing is reached.

    Raises:
        CheckpointError: If it cannot be the place of a checkpoint.
    """
    text = str(url)
    match = _URL.match(text)
    if _SHORT_URL.match(text) or ("://" in text and match is None):
        raise CheckpointError(
            f"{text!r} is neither a path nor a URL of one file system: a URL is scheme://..., and loses a "
            f"slash as a pathlib.Path"
        )
    scheme, rest = (match[1].lower(), text[match.end() :]) if match else ("file", text)
    if scheme in _LOCAL_SCHEMES:
        try:
            return str(Path(rest).resolve())
        except (OSError, RuntimeError, ValueError) as error:  # links in a circle; a zero byte
            raise CheckpointError(
                f"{text!r} cannot be the path of a checkpoint: {error}"
            ) from error
    if _NO_PLACE.search(rest) or {".", ".."} & set(rest.split("/")):
        raise CheckpointError(
            f"{text!r} cannot be the URL of a checkpoint: it has to be without '..', patterns and chained "
            f"file systems"
        )
    return f"{scheme}://{rest.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A `Folder` in a file system of this machine, mounted ones included."""

    path: Path

    @property
    def url(self) -> str:
        """See `Folder`."""
        return str(self.path)

    @property
    def name(self) -> str:
        """See `Folder`."""
        return self.path.name

    def child(self, name: str) -> "LocalFolder":
        """See `Folder`."""
        return LocalFolder(self.path / name)

    def make(self) -> None:
        """See `Folder`."""
        with _errors("make", self.path):
            missing = [folder for folder in self.path.parents if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            # Each is listed in the one above, whose list is forced to disk apart from it.
            for folder in (self.path, *missing):
                _sync(folder.parent)

    def files(self) -> Mapping[str, int]:
        """See `Folder`."""
        sizes = {}
        for entry in self._entries():
            with suppress(FileNotFoundError):  # a link to nothing
                if entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def folders(self) -> Sequence[str]:
        """See `Folder`."""
        return sorted(
            entry.name for entry in self._entries() if entry.is_dir(follow_symlinks=False)
        )

    def _entries(self) -> list[os.DirEntry[str]]:
        with (
            _errors("list", self.path),
            suppress(FileNotFoundError),
            os.scandir(self.path) as found,
        ):
            return list(found)
        return []

    def has(self, file: str) -> bool:
        """See `Folder`."""
        with _errors("read", self.path / file):
            return (self.path / file).is_file()

    def read(self, file: str) -> bytes:
        """See `Folder`."""
        with _errors("read", self.path / file):
            return (self.path / file).read_bytes()

    def put(self, file: str, content: bytes) -> None:
        """See `Folder`."""
        path, beside = self.path / file, self.path / f"{file}.next"
        with _errors("write", path):
            try:
                beside.write_bytes(content)
                _sync(beside)
                beside.replace(path)
            except OSError:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise
            _sync(self.path)

    @contextmanager
    def create(self, file: str) -> Iterator[pa.NativeFile]:
        """See `Folder`."""
        path = self.path / file
        with _errors("write", path):
            path.unlink(missing_ok=True)  # it might be a link to elsewhere
            # Forced to disk by whoever writes it: another machine cannot force this one's pages.
            with direct_file(path) as sink:
                yield sink
            _sync(self.path)

    @contextmanager
    def open(self, file: str) -> Iterator[pa.NativeFile]:
        """See `Folder`; what is read from it is mapped, not copied."""
        path = self.path / file
        with _errors("read", path), pa.memory_map(str(path)) as source:
            yield source

    def remove_file(self, file: str) -> None:
        """See `Folder`."""
        with _errors("remove", self.path / file):
            (self.path / file).unlink(missing_ok=True)

    def remove(self) -> None:
        """See `Folder`."""
        with _errors("remove", self.path), suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def remove_if_empty(self) -> None:
        """See `Folder`."""
        with suppress(OSError):
            self.path.rmdir()


@contextmanager
def _errors(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot {operation} {path}: {reason}") from error


def _sync(path: Path) -> None:
    """Forces a file's content, or a folder's list of files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
