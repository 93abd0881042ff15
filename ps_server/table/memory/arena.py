"""Arena: memory that grows in place, reserved as address space and allocated when it is first touched.

An arena is one array of rows, divided into equal regions. Where the system allows it, each region reserves
more address space than it will need, so nothing is ever copied. Where it does not (a limit on address space,
another system), regions start small and double by copying.

    array:  | region 0: used ..... reserved | region 1: used .. reserved | ...
"""

import errno
import gc
import logging
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

logger = logging.getLogger(__name__)

STAGGER_BYTES = 37 * 2**12
"""By which a shard's rows and index begin later than another's, in the lower bits of their addresses.

Processors cache translations of addresses by the lower bits of the page: at equal distances of powers of two
all shards would share a few places. 1,800 of as many rows were then read in 106 µs instead of 55.
"""

RESERVED_REGION_BYTES = 16 * 2**30 + STAGGER_BYTES
"""Address space of a region. 64 regions are 1/128 of a process's address space on x86-64."""

_ADDRESSES = 2**47

SMALL_REGION_BYTES = 2**16  # first size of a region where address space cannot be reserved

HUGE_PAGE = 2 * 2**20
_MOST_HUGE_REGIONS = 2048
"""Each region with huge pages makes two more mappings, of which Linux allows a process 65,530."""

# Not in the mmap module; the value on Linux. Elsewhere the mapping fails, which is handled.
MAP_NORESERVE = 0x4000


def region_bytes_of_table(num_regions: int) -> int:
    """Returns the address space of a region of rows: less where this process has used much of it.

    So 256 tables have room: each takes up to 1/120 of what is left for rows, and half of that for its index.
    """
    left = (_ADDRESSES - _addresses_in_use()) // 120 // max(num_regions, 1)
    power = max(left, SMALL_REGION_BYTES).bit_length() - 1
    return min(RESERVED_REGION_BYTES, (1 << power) + STAGGER_BYTES)


class Arena:
    """Zeroed rows in regions that grow independently; `array` is replaced by copying. Not thread-safe."""

    def __init__(
        self,
        dtype: DTypeLike,
        *,
        num_regions: int,
        width: int,
        region_bytes: int = RESERVED_REGION_BYTES,
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._num_regions = num_regions
        self._width = width
        self._row_bytes = width * self._dtype.itemsize
        self.region_rows = region_bytes // self._row_bytes
        num_rows = num_regions * self.region_rows
        # Linux (from 6.7 on) begins mappings of whole huge pages at one, and no others.
        num_huge_pages = -(-num_rows * self._row_bytes // HUGE_PAGE)
        self._mapping = _reserved(num_huge_pages * HUGE_PAGE)
        if self._mapping is None:
            _tell_of_copying()
            self.region_rows = min(self.region_rows, SMALL_REGION_BYTES // self._row_bytes)
            self.array = self._zeros(self.region_rows)
        else:
            numbers = np.frombuffer(self._mapping, self._dtype, count=num_rows * width)
            self.array = numbers.reshape(-1, width)

    def _zeros(self, region_rows: int) -> NDArray[Any]:
        return np.zeros((self._num_regions * region_rows, self._width), self._dtype)

    def reserve(self, rows: int) -> None:
        """Makes every region at least `rows` long; if memory is short, changes nothing."""
        if rows <= self.region_rows:
            return
        region_rows = max(rows, 2 * self.region_rows)
        array = self._zeros(region_rows)
        old = self.array.reshape(self._num_regions, self.region_rows, self._width)
        array.reshape(self._num_regions, region_rows, self._width)[:, : self.region_rows] = old
        self._mapping, self.array, self.region_rows = None, array, region_rows

    def expect(self, start: int, stop: int) -> None:
        """Requests huge pages for rows that will be used, from the first on.

        With them 10 M rows are loaded in 0.85 s instead of 1.25. A partly released huge page is returned to
        the system when memory is short.
        """
        first = -(-start * self._row_bytes // HUGE_PAGE) * HUGE_PAGE
        last = stop * self._row_bytes // HUGE_PAGE * HUGE_PAGE
        if self._mapping is not None and first < last and self._num_regions <= _MOST_HUGE_REGIONS:
            with suppress(AttributeError, OSError):  # another system, or one built without
                self._mapping.madvise(mmap.MADV_HUGEPAGE, first, last - first)

    def release(self, start: int, stop: int) -> None:
        """Zeroes rows and returns their whole pages to the system where possible."""
        first = -(-start * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if self._mapping is None or first >= last:
            self.array[start:stop] = 0
            return
        self.array[start : -(-first // self._row_bytes)] = 0
        self.array[last // self._row_bytes : stop] = 0
        self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _reserved(num_bytes: int) -> mmap.mmap | None:
    """Returns zeroed memory that is allocated at the first touch, or None."""
    try:
        return _map(num_bytes)
    except OSError as error:
        if error.errno != errno.ENOMEM or _addresses_in_use() < num_bytes:
            return None  # a limit: no garbage could make so much room
        # A process can use 128 TiB: garbage holds them, such as the tables of runs that failed.
        gc.collect()
    except (AttributeError, ValueError, OverflowError):  # another system, or more than there can be
        return None
    with suppress(OSError):
        return _map(num_bytes)
    return None


@cache  # once a process
def _tell_of_copying() -> None:
    logger.warning(
        "cannot reserve address space, usually because of a limit such as `ulimit -v`: tables grow by "
        "copying, which is slower and needs twice their memory meanwhile"
    )


def _map(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


def _addresses_in_use() -> int:
    """Returns the bytes of addresses that this process uses or reserves; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0
