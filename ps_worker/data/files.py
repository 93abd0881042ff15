"""Which files there are, and which of them a worker reads."""

import glob
from collections.abc import Sequence
from pathlib import Path

from protos.errors import DataError


def matching_files(patterns: str | Sequence[str]) -> list[Path]:
    """Returns the files that match any of `patterns`, each once, sorted by name.

    Args:
        patterns: Paths, with `*`, `?`, `[...]`, and `**` for any number of folders. A comma has
            no meaning.

    Raises:
        DataError: Names the first pattern that no file matches.
    """
    found: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207 (absolute patterns)
        files = [path for path in matches if path.is_file()]
        if not files:
            hint = ", which is a folder: ask for what is in it" if matches else ""
            raise DataError(f"no file matches {pattern!r}{hint}")
        found.update(files)
    return sorted(found)


def files_of_worker(files: Sequence[Path], worker_index: int, num_workers: int) -> list[Path]:
    """Returns the files that one worker reads; every file goes to exactly one worker.

    Each file, largest first, goes to the worker with the fewest bytes so far, so all workers come
    to the same answer without talking, whatever the order of `files`. A worker may get none.

    Args:
        files: The same for all workers, none twice.
        worker_index: From 0.
        num_workers: At least 1.

    Returns:
        A list sorted by name.

    Raises:
        ValueError: If `worker_index` is not in [0, num_workers).
        DataError: Names a file that is not there.
    """
    if not 0 <= worker_index < num_workers:
        raise ValueError(f"worker_index is {worker_index!r}, expected one of {num_workers} workers")
    sizes = {path: _size_bytes(path) for path in files}
    loads = [0] * num_workers
    own: list[Path] = []
    for path in sorted(files, key=lambda path: (-sizes[path], path)):
        lightest = loads.index(min(loads))
        # An empty file counts as a byte: opening it costs something, too.
        loads[lightest] += max(sizes[path], 1)
        if lightest == worker_index:
            own.append(path)
    return sorted(own)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from error
