"""Remote folders through fsspec: object stores and remote file systems.

Credentials and endpoints are configured for fsspec (docs/checkpoint.md). Listings are never cached, as other
processes write to the same storage.
"""

# ruff: noqa: D102 - what a method does is said once, by `LocalFolder`

import io
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.storage.local_file import Mapped

_OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory")
"""Storage where a file appears whole and a rename is a copy; other schemes are taken for file systems."""


def remote_folder(url: str) -> "RemoteFolder":
    """Returns the folder at a URL in the form of `place_of`; CheckpointError if it cannot be reached."""
    from fsspec.core import url_to_fs  # late: most checkpoints are local

    with _errors("reach", url):
        file_system, path = url_to_fs(url, use_listings_cache=False)
    kind = RemoteFolder if url.partition("://")[0] in _OBJECT_STORES else RenamingFolder
    return kind(file_system, path, url)


class RemoteFolder:
    """A `Folder` in an object store, at `path` of an `fsspec.AbstractFileSystem`."""

    def __init__(self, file_system: Any, path: str, url: str) -> None:
        self._file_system = file_system
        self._path = path
        self.url = url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def child(self, name: str) -> "RemoteFolder":
        return type(self)(self._file_system, f"{self._path}/{name}", f"{self.url}/{name}")

    def make(self) -> None:
        """No-op: object stores have no folders, and a bucket must not be created by mistake."""

    def files(self) -> Mapping[str, int]:
        return {name: entry["size"] for name, entry in self._entries("file").items()}

    def folders(self) -> Sequence[str]:
        return sorted(self._entries("directory"))

    def _entries(self, kind: str) -> dict[str, Any]:
        with _errors("list", self.url), suppress(FileNotFoundError):
            entries = self._file_system.ls(self._path, detail=True)
            names = [entry["name"].rstrip("/") for entry in entries]
            return {
                name.rpartition("/")[2]: entry
                for name, entry in zip(names, entries, strict=True)
                if entry["type"] == kind and name != self._path.rstrip("/")
            }
        return {}

    def has(self, file: str) -> bool:
        # Not `isfile`, which returns False when storage does not answer.
        with _errors("read", f"{self.url}/{file}"), suppress(FileNotFoundError):
            return bool(self._file_system.info(f"{self._path}/{file}")["type"] == "file")
        return False

    def read(self, file: str) -> bytes:
        with _errors("read", f"{self.url}/{file}"):
            return bytes(self._file_system.cat_file(f"{self._path}/{file}"))

    def put(self, file: str, content: bytes) -> None:
        with _errors("write", f"{self.url}/{file}"):
            self._file_system.pipe_file(f"{self._path}/{file}", content)

    def create_new(self, file: str, content: bytes) -> bool:
        if self.has(file):
            return False
        with _errors("write", f"{self.url}/{file}"):
            try:
                self._file_system.pipe_file(f"{self._path}/{file}", content, mode="create")
            except Exception:
                # One was there after all, or the package cannot create exclusively.
                if self._file_system.exists(f"{self._path}/{file}"):
                    return False
                self._file_system.pipe_file(f"{self._path}/{file}", content)
        return True

    def create(self, file: str) -> AbstractContextManager[pa.NativeFile]:
        return self._opened(file, "w")

    def open(self, file: str) -> AbstractContextManager[pa.NativeFile]:
        return self._opened(file, "r")

    @contextmanager
    def _opened(self, file: str, mode: str) -> Iterator[pa.NativeFile]:
        url = f"{self.url}/{file}"
        with (
            _OpenFile(self._file_system, f"{self._path}/{file}", f"{mode}b", url) as raw,
            arrow_errors("read" if mode == "r" else "write", url),
            pa.PythonFile(raw, mode) as opened,
        ):
            yield opened

    def map(self, file: str) -> Mapped:
        with self.open(file) as source:
            return Mapped(source.read_buffer())

    def remove_file(self, file: str) -> None:
        with _errors("remove", f"{self.url}/{file}"), suppress(FileNotFoundError):
            self._file_system.rm_file(f"{self._path}/{file}")

    def remove(self) -> None:
        with _errors("remove", self.url), suppress(FileNotFoundError):
            self._file_system.rm(self._path, recursive=True)

    def remove_if_empty(self) -> None:
        """No-op: object stores have no empty folders."""


class RenamingFolder(RemoteFolder):
    """A `Folder` in a remote file system, where a rename may remove its target before it is complete.

    By then the new content is complete as `<file>.next`, which is read if `<file>` is missing.
    """

    def make(self) -> None:
        with _errors("make", self.url):
            self._file_system.makedirs(self._path, exist_ok=True)

    def has(self, file: str) -> bool:
        return super().has(file) or super().has(f"{file}.next")

    def read(self, file: str) -> bytes:
        is_interrupted = not super().has(file) and super().has(f"{file}.next")
        return super().read(f"{file}.next" if is_interrupted else file)

    def put(self, file: str, content: bytes) -> None:
        path = f"{self._path}/{file}"
        if super().has(f"{file}.next"):
            self._finish_put(file)
        with _errors("write", f"{self.url}/{file}"):
            part = f"{path}.{secrets.token_hex(8)}.part"
            self._file_system.pipe_file(part, content)
            self._file_system.mv(part, f"{path}.next")
            self._file_system.mv(f"{path}.next", path)

    def _finish_put(self, file: str) -> None:
        if super().has(file):
            super().remove_file(f"{file}.next")
        else:
            with _errors("write", f"{self.url}/{file}"):
                self._file_system.mv(f"{self._path}/{file}.next", f"{self._path}/{file}")

    def remove_file(self, file: str) -> None:
        super().remove_file(f"{file}.next")
        super().remove_file(file)

    def remove_if_empty(self) -> None:
        if not self.files() and not self.folders():
            self.remove()


class _OpenFile(io.RawIOBase):
    """A file of fsspec whose errors name its URL."""

    def __init__(self, file_system: Any, path: str, mode: str, url: str) -> None:
        self._url = url
        self._operation = "read" if mode == "rb" else "write"
        with self._errors():
            self._file = file_system.open(path, mode)

    def readable(self) -> bool:
        return self._operation == "read"

    def writable(self) -> bool:
        return self._operation == "write"

    def seekable(self) -> bool:
        return self.readable()

    def read(self, size: int = -1) -> bytes:
        with self._errors():
            return bytes(self._file.read(size))

    def write(self, content: Any) -> int:
        with self._errors():
            self._file.write(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._errors():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self._errors():
                self._file.close()

    def _errors(self) -> Any:
        return _errors(self._operation, self._url)


@contextmanager
def _errors(operation: str, url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"cannot {operation} {url}: no such file, folder or bucket"
        ) from error
    # Each package behind fsspec has its own errors, without a common base class.
    except Exception as error:
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise CheckpointError(f"cannot {operation} {url}: {kind}{error}") from error


@contextmanager
def arrow_errors(operation: str, place: str | Path) -> Iterator[None]:
    """Raises errors of Arrow and of the operating system as a CheckpointError that names the place."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot {operation} {place}: {reason}") from error
