"""Splits of files, and their assignment to workers.

A worker reads whole files, or splits of files if there are fewer files than workers. All workers compute the
same assignment without communicating, independent of the order of their lists.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import numpy as np

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.files.listing import FileStamp, stamp_of


@dataclass(frozen=True, slots=True)
class FileSplit:
    """A range of a file, in units of its format.

    The unit of text is a byte: a split holds the lines that begin in its range. Parquet is split by row
    groups, ORC by stripes. Compressed text cannot be split.
    """

    path: str  # local path or URL
    start: int = 0  # first unit
    stop: int | None = None  # end, exclusive; None: the end of the file
    # of the listed file, and required when it is read; None: unknown
    stamp: FileStamp | None = field(default=None, compare=False)


SplitFile = Callable[[str, int], list[FileSplit]]
"""Returns at most so many splits of a file; see `Reader.splits`."""


def split_files(files: Sequence[str], worker: int, num_workers: int) -> list[str]:
    """Returns the files of one worker in the order of `files`; every file goes to exactly one worker.

    Each file, largest first, goes to the worker with the fewest bytes so far. A worker may get no files.
    Raises ValueError if `worker` is not in [0, num_workers), and UsageError for a file that is listed twice.
    """
    _refuse_duplicates(files)
    stamps = {path: stamp_of(path) for path in files}
    weights = {FileSplit(path): float(_size(stamp)) for path, stamp in stamps.items()}
    return [split.path for split in _of_worker(_assigned(weights, num_workers), worker)]


def file_splits(
    split_file: SplitFile, files: Sequence[str], worker: int, num_workers: int
) -> list[FileSplit]:
    """Returns the splits of worker `worker`, from 0, or raises ValueError; see `splits_of_workers`."""
    return _of_worker(splits_of_workers(split_file, files, num_workers), worker)


def splits_of_workers(
    split_file: SplitFile,
    files: Sequence[str],  # the same for all workers, without duplicates
    num_workers: int,  # at least 1
    # stamps of files already listed; None: list them now
    stamps: Mapping[str, FileStamp | None] | None = None,
) -> list[list[FileSplit]]:
    """Returns the splits of each worker in the order of `files`; every row goes to exactly one worker.

    With at least one non-empty file per worker, these are whole files. Otherwise every file is divided into
    one split per worker if its format allows it, and splits are assigned as files are. Raises UsageError for
    a file that is listed twice.
    """
    _refuse_duplicates(files)
    stamps = {path: stamp_of(path) for path in files} if stamps is None else stamps
    num_full = sum(_size(stamps[path]) > 0 for path in files)
    num_splits = 1 if num_full >= num_workers else num_workers
    weights: dict[FileSplit, float] = {}
    for path in files:
        stamp = stamps[path]
        splits = [FileSplit(path)] if num_splits == 1 else split_file(path, num_splits)
        stamped = [replace(split, stamp=stamp) for split in splits]
        weights |= dict.fromkeys(stamped, _size(stamp) / len(splits))
    return _assigned(weights, num_workers)


def split_evenly(sizes: Sequence[int], num_splits: int) -> list[tuple[int, int]]:
    """Returns at most `num_splits` ranges [start, stop) of about equal sums that cover `sizes`."""
    ends = np.cumsum(np.maximum(sizes, 1))
    goals = ends[-1] * np.arange(1, num_splits + 1) / num_splits if len(sizes) else ends
    # A range ends where the sum is nearest to its goal.
    stops = np.searchsorted(ends - np.maximum(sizes, 1) / 2, goals, side="left")
    cuts = [0, *dict.fromkeys(int(stop) for stop in stops if stop > 0)]
    return list(itertools.pairwise(cuts)) or [(0, 0)]


def shuffled(splits: Sequence[FileSplit], seed: int, epoch: int) -> list[FileSplit]:
    """Returns the splits in an order that is a function of seed, epoch and the number of splits."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()

    return [splits[index] for index in sorted(range(len(splits)), key=rank)]


def shown(split: FileSplit) -> str:
    """Returns "path" for a whole file, else "path[start:stop]"."""
    if split == FileSplit(split.path):
        return split.path
    return f"{split.path}[{split.start}:{'' if split.stop is None else split.stop}]"


def _size(stamp: FileStamp | None) -> int:
    return 0 if stamp is None else stamp.size


def _refuse_duplicates(files: Sequence[str]) -> None:
    path, count = next(iter(Counter(files).most_common(1)), ("", 0))
    if count > 1:
        raise UsageError(f"{path!r} is listed {count} times, expected each file once")


def _of_worker(splits: Sequence[list[FileSplit]], worker: int) -> list[FileSplit]:
    if not 0 <= worker < len(splits):
        raise ValueError(f"worker_index is {worker!r}, expected 0 to {len(splits) - 1}")
    return splits[worker]


def _assigned(weights: dict[FileSplit, float], num_workers: int) -> list[list[FileSplit]]:
    """Assigns splits, heaviest first, to the worker with the least load; each keeps their order."""

    def rank(split: FileSplit) -> tuple[float, str, str, int]:
        return -weights[split], PurePath(split.path).name, split.path, split.start

    loads = [0.0] * num_workers
    assigned: list[list[FileSplit]] = [[] for _ in range(num_workers)]
    for split in sorted(weights, key=rank):
        lightest = loads.index(min(loads))
        # An empty split counts as one byte, since opening a file has a cost.
        loads[lightest] += max(weights[split], 1.0)
        assigned[lightest].append(split)
    places = {split: place for place, split in enumerate(weights)}
    return [sorted(own, key=places.__getitem__) for own in assigned]
