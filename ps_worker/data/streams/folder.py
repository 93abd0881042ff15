"""A folder in which finished files appear, each a message: written elsewhere, then renamed into it.

Files go to partitions by a hash of their names, and are read in the order of their names: a name comes after
those of all files that are there already, as one with the time does.
"""

import logging
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.files.listing import natural_order
from ctr_ps.ps_worker.data.streams.source import (
    START,
    Message,
    StreamUrl,
    has_reached,
    offset_and_rows,
)

logger = logging.getLogger(__name__)

PARTITIONS = 16
_UNFINISHED = (".tmp", ".part", ".crdownload")


class FolderSource:
    """A `StreamSource` of the files of a folder and those below it; the value of a message is a path."""

    def __init__(self, url: StreamUrl) -> None:
        """Raises DataError if there is no such folder, UsageError for an unknown option."""
        options = dict(url.options)
        self._pattern = options.pop("pattern", "**/*")
        try:
            self._num_partitions = int(options.pop("partitions", PARTITIONS))
        except ValueError as error:
            raise UsageError(f"{url}: partitions is not a number") from error
        if options:
            raise UsageError(f"{url} has the unknown option {next(iter(options))!r}")
        self._url = url
        self._folder = Path(url.name)
        if not self._folder.is_dir():
            raise DataError(f"{url}: there is no folder {url.name!r}")
        self.at_end: set[str] = set()
        self._last: dict[str, str] = {}
        self._known: set[str] = set()  # files that were seen

    def partitions(self) -> list[str]:
        return [str(number) for number in range(self._num_partitions)]

    def start_of(self, partition: str) -> str:
        if self._url.start == "earliest":
            return START
        start_ms = self._url.start_ms
        if start_ms is None:
            return self.last_of(partition)
        before = [name for name in self._names(partition) if self._time_ms(name) < start_ms]
        return before[-1] if before else START

    def last_of(self, partition: str) -> str:
        names = self._names(partition)
        return names[-1] if names else START

    def order_of(self, offset: str) -> Any:
        return natural_order(offset)

    def seek(self, positions: Mapping[str, str]) -> None:
        listed = self._listed()
        for partition, position in positions.items():
            offset, rows = offset_and_rows(position)
            if rows and not (self._folder / offset).exists():
                raise DataError(f"{self._url}: {offset!r}, in which the run goes on, is gone")
            names = listed[partition]
            self._known.update(names)
            # One that was read in part is read again.
            before = [name for name in names if natural_order(name) < natural_order(offset)]
            self._last[partition] = (before[-1] if before else START) if rows else offset

    def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
        stop = time.monotonic() + timeout_s
        while True:
            listed = self._listed()
            found = [message for each in wanted for message in self._new(each, listed[each])]
            self.at_end |= set(wanted)
            if found or time.monotonic() >= stop:
                return found
            time.sleep(min(0.1, timeout_s))  # a folder has no event that every file system sends

    def lag(self) -> Mapping[str, int]:
        listed = self._listed()
        return {
            each: sum(not has_reached(self, last, name) for name in listed[each])
            for each, last in self._last.items()
        }

    def close(self) -> None:
        pass

    def _new(self, partition: str, names: Sequence[str]) -> list[Message]:
        found = []
        last = self._last[partition]
        for name in names:
            if not has_reached(self, last, name):
                self._last[partition] = name
                value = str(self._folder / name).encode()
                found.append(Message(partition, name, self._time_ms(name), value))
            elif name not in self._known:
                logger.warning("a file came after later ones, and is not read: %s", name)
        self._known.update(names)
        return found

    def _listed(self) -> dict[str, list[str]]:
        """Returns the finished files of each partition, in order."""
        found: dict[str, list[str]] = {each: [] for each in self.partitions()}
        for path in self._folder.glob(self._pattern):
            name = str(path.relative_to(self._folder))
            if path.name.startswith((".", "_")) or name.endswith(_UNFINISHED):
                continue
            if path.is_file():
                found[str(zlib.crc32(name.encode()) % self._num_partitions)].append(name)
        return {each: sorted(names, key=natural_order) for each, names in found.items()}

    def _names(self, partition: str) -> list[str]:
        return self._listed()[partition]

    def _time_ms(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_mtime_ns // 1_000_000
        except OSError as error:
            raise DataError(f"{self._url}: cannot read {name!r}: {error.strerror}") from error
