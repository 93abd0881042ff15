"""Which worker reads what: whole files, or parts of files where there are more workers than files.

All workers come to the same answer without talking, whatever the order of their lists.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

from protos.errors import UsageError
from ps_worker.data.blocks.reader import FilePart, Reader
from ps_worker.data.files.listing import size_of


def split_files(files: Sequence[str], worker: int, num_workers: int) -> list[str]:
    """Returns the files that one worker reads; every file goes to exactly one worker.

    Each file, largest first, goes to the worker with the fewest bytes so far. A worker may get none.

    Args:
        files: The same for all workers, none twice.
        worker: Index of the worker, from 0.
        num_workers: At least 1.

    Returns:
        A list sorted by name.

    Raises:
        ValueError: If `worker` is not in [0, num_workers).
        UsageError: Names a file that is listed twice.
        DataError: Names a file that is not there.
    """
    _refuse_duplicates(files)
    weights = {FilePart(path): float(size_of(path)) for path in files}
    return [part.path for part in _dealt(weights, worker, num_workers)]


def split_parts(
    reader_of: Callable[[str], Reader], files: Sequence[str], worker: int, num_workers: int
) -> list[FilePart]:
    """Returns what one worker reads; every row goes to exactly one worker.

    These are whole files as long as there is one for each worker, empty ones not counted. Else every file
    that can be cut is cut into as many parts as there are workers, and parts are dealt as files are.

    Args:
        reader_of: Returns the reader of a file.
        files: The same for all workers, none twice.
        worker: Index of the worker, from 0.
        num_workers: At least 1.

    Returns:
        A list sorted by name and place; empty if there is nothing for this worker.

    Raises:
        ValueError: If `worker` is not in [0, num_workers).
        UsageError: Names a file that is listed twice.
        DataError: Names a file that cannot be read.
    """
    _refuse_duplicates(files)
    sizes = {path: size_of(path) for path in files}
    num_full = sum(size > 0 for size in sizes.values())
    num_parts = 1 if num_full >= num_workers else num_workers
    weights: dict[FilePart, float] = {}
    for path, size in sizes.items():
        parts = [FilePart(path)] if num_parts == 1 else reader_of(path).parts(path, num_parts)
        weights |= dict.fromkeys(parts, size / len(parts))
    return _dealt(weights, worker, num_workers)


def shuffled(parts: Sequence[FilePart], seed: int, epoch: int) -> list[FilePart]:
    """Returns the parts in an order that (seed, epoch) and their number decide, on every machine alike."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}/{epoch}/{index}".encode()).digest()

    return [parts[index] for index in sorted(range(len(parts)), key=rank)]


def shown(part: FilePart) -> str:
    """Returns a part as a text: "path" if it is the whole file, else "path[start:stop]"."""
    if part == FilePart(part.path):
        return part.path
    return f"{part.path}[{part.start}:{'' if part.stop is None else part.stop}]"


def _refuse_duplicates(files: Sequence[str]) -> None:
    path, count = next(iter(Counter(files).most_common(1)), ("", 0))
    if count > 1:
        raise UsageError(f"{path!r} is listed {count} times: a file is dealt to one worker, once")


def _dealt(weights: dict[FilePart, float], worker: int, num_workers: int) -> list[FilePart]:
    """Returns one worker's parts: each part, heaviest first, goes to the worker with the least so far."""
    if not 0 <= worker < num_workers:
        raise ValueError(f"worker_index is {worker!r}, expected one of {num_workers} workers")
    loads = [0.0] * num_workers
    own: list[FilePart] = []
    for part in sorted(weights, key=lambda part: (-weights[part], part.path, part.start)):
        lightest = loads.index(min(loads))
        # An empty part counts as a byte: opening it costs something, too.
        loads[lightest] += max(weights[part], 1.0)
        if lightest == worker:
            own.append(part)
    return sorted(own, key=lambda part: (part.path, part.start))
