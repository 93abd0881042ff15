"""Disks of simulated machines: real files, and a memory of what of them is on disk.

    write -------> in the file                              survives the end of the process
    fsync -------> the bytes are on disk                    survive the end of the machine
    fsync of the folder: so are its names, in the order in which they changed

A machine that loses its power keeps what was on disk, and of the rest what chance had written: names up to
some change, and of each file some bytes more, of which the last may be torn.
"""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.world import Process, World, _now

SYNC_S = (2e-4, 1e-2)

_fsync, _fdatasync, _close, _flock = os.fsync, os.fdatasync, os.close, fcntl.flock
_unlink, _rename, _open = os.unlink, os.rename, os.open


class Disk:
    """The folder of one machine, without folders in it."""

    def __init__(self, folder: Path, *, loses_power: bool) -> None:
        """Keeps what `lose_power` needs only if it is to come."""
        self.folder, self._path, self._loses_power = folder, str(folder), loses_power
        folder.mkdir(parents=True)
        self._synced: dict[int, bytes] = {}  # by inode, what is on disk
        self._gone: dict[int, bytes] = {}  # by inode, what a file had that has no name any more
        self._names: list[dict[str, int]] = [{}]  # after each change since the folder was synced
        self.has_failed = False
        self.fails_at: set[int] = set()  # numbers of the syncs that fail
        self.dies_at: dict[int, Callable[[], None]] = {}  # of those in which the power fails
        # by number of a sync of the folder: how many syncs later the power fails, and what then happens
        self.dies_after: dict[int, tuple[int, Callable[[], None]]] = {}
        self._num_syncs = self._num_folder_syncs = 0

    def look(self) -> None:
        """A name has changed."""
        if not self._loses_power:
            return
        names = {each.name: each.inode() for each in os.scandir(self.folder)}
        if names != self._names[-1]:
            self._names.append(names)

    def about_to_lose(self, name: str) -> None:
        path = self.folder / name
        if self._loses_power and path.exists():
            self._gone[path.stat().st_ino] = path.read_bytes()

    def sync(self, path: str) -> None:
        if path == self._path:
            self.look()
            self._names = self._names[-1:]
        elif self._loses_power:
            with suppress(FileNotFoundError), open(path, "rb") as file:  # noqa: PTH123 - as above
                self._synced[os.fstat(file.fileno()).st_ino] = file.read()

    def is_to_fail(self, home: World, path: str) -> bool:
        """Counts a sync; does not return from one in which the power fails."""
        self._num_syncs += 1
        if path == self._path:
            self._num_folder_syncs += 1
            if (after := self.dies_after.get(self._num_folder_syncs)) is not None:
                self.dies_at[self._num_syncs + after[0]] = after[1]
        if (die := self.dies_at.get(self._num_syncs)) is not None:
            home.at(0.0, die)
            home.block(None, "power")
        self.has_failed |= self._num_syncs in self.fails_at
        return self._num_syncs in self.fails_at

    def wipe(self) -> None:
        for path in list(self.folder.iterdir()):
            _unlink(path)
        self._synced, self._gone, self._names = {}, {}, [{}]

    def lose_power(self, random: Random) -> str:
        """Leaves what is on disk then; says what was lost."""
        self.look()
        now = {path.stat().st_ino: path.read_bytes() for path in self.folder.iterdir()}
        names = self._names[-1]
        after = self._names[random.randrange(len(self._names))]
        told = []
        for path in list(self.folder.iterdir()):
            _unlink(path)
        self._synced, kept = {}, self._synced
        self._names = [{}]
        for name, inode in sorted(after.items()):
            written = now.get(inode, self._gone.get(inode, b""))
            content = _survives(kept.get(inode, b""), written, random)
            if len(content) < len(written):
                told.append(f"{len(written) - len(content)} bytes of {name}")
            path = self.folder / name
            path.write_bytes(content)
            self._synced[path.stat().st_ino] = content
        self._gone = {}
        self.look()
        self._names = self._names[-1:]
        told += sorted({*names} ^ {*after})
        return f"lost {', '.join(told) or 'nothing'}"


def _survives(synced: bytes, written: bytes, random: Random) -> bytes:
    """Returns what is on disk of a file whose writes since its sync may or may not have come there."""
    if not written.startswith(synced):  # it was cut, and this is not on disk
        return synced if random.random() < 0.5 else written
    more = written[len(synced) :]
    kept = bytearray(more[: random.randint(0, len(more))])
    if kept and random.random() < 0.5:  # blocks come in any order
        start = random.randrange(len(kept))
        kept[start : start + 512] = bytes(len(kept[start : start + 512]))
    return synced + bytes(kept)


class Disks:
    """Those of all machines, by folder."""

    def __init__(self, home: World, *, lose_power: bool) -> None:
        self._world, self._lose_power = home, lose_power
        self._disks: dict[str, Disk] = {}

    def add(self, folder: Path) -> Disk:
        disk = self._disks[str(folder)] = Disk(folder, loses_power=self._lose_power)
        return disk

    def of(self, path: str) -> Disk | None:
        return self._disks.get(path) or self._disks.get(path.rpartition("/")[0])


def _current() -> tuple[World, Process, Disks] | None:
    home = _now[0]
    if home is None or home.current is None:
        return None
    return home, home.current.process, home.disks


def _syncing(real: Callable[[Any], None]) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        if (current := _current()) is None:
            real(descriptor)
            return
        home, _, disks = current
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - a path takes longer
        home.block(home.random.uniform(*SYNC_S), "a sync of the disk")
        if (disk := disks.of(path)) is not None:
            if disk.is_to_fail(home, path):
                home.tell("disk", f"a sync of {path.rpartition('/')[2]} fails")
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            disk.sync(path)

    return sync


def _changing(real: Callable[..., Any], *, loses: int | None = None) -> Callable[..., Any]:
    """`loses`: which of the arguments is a name that is given up."""

    def change(*args: Any, **kwargs: Any) -> Any:
        if (current := _current()) is None or kwargs.get("dir_fd") is not None:
            return real(*args, **kwargs)
        home, _, disks = current
        home.may_lose_turn()
        disk = disks.of(os.fspath(args[0]))
        if disk is not None and loses is not None:
            disk.about_to_lose(os.fspath(args[loses]).rpartition("/")[2])
        result = real(*args, **kwargs)
        if disk is not None:
            disk.look()
        return result

    return change


def _lock(descriptor: int, operation: int) -> None:
    _flock(descriptor, operation)
    if (current := _current()) is not None:
        current[1].descriptors.append(descriptor)


def _closing(descriptor: int) -> None:
    current = _current()
    if current is not None and descriptor in current[1].descriptors:
        current[1].descriptors.remove(descriptor)
    _close(descriptor)


def install() -> None:
    """Puts these over the system's calls, for all of this process."""
    os.fsync, os.fdatasync = _syncing(_fsync), _syncing(_fdatasync)
    os.unlink = _changing(_unlink, loses=0)
    os.rename = _changing(_rename, loses=1)
    os.open = _changing(_open)
    os.close = _closing
    fcntl.flock = _lock
