"""Writing so that it survives a power cut: what is written counts only once it was forced to disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Forces a file's content, or a folder's list of files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file, through to the disk."""
    path.write_bytes(content)
    sync(path)
