"""Small disks: file systems in memory, for tests of full ones."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.needs import lacking

Mount = Callable[[str], None]


@contextmanager
def mounting_at(disk: Path) -> Iterator[Mount]:
    """Yields a function that mounts a file system at `disk`, or changes its options."""
    mounted = False

    def call(options: str) -> None:
        nonlocal mounted
        options = f"remount,{options}" if mounted else options
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lacking(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted = True

    try:
        yield call
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
