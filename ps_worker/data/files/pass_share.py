"""How much of a pass over files is read, by their sizes on disk.

Within a file the bytes before a block tell, where its format says so: text that is not compressed. Another
file counts when all of it is read, which says little if it is much of the pass: then nothing is said.
"""

from collections.abc import Callable, Sequence

from protos.errors import DataError
from ps_worker.data.files.content import is_compressed
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.files.listing import size_of

LARGEST_STEP = 0.1
"""Share of a file that may count as a whole; with a larger one no share is known."""


class PassShare:
    """Shares of a pass over splits, in the order of the pass."""

    def __init__(
        self,
        splits: Sequence[FileSplit],
        *,
        has_byte_offsets: Callable[[str], bool],
        size_of: Callable[[str], int] = size_of,
    ) -> None:
        """Asks for the sizes of the files.

        Args:
            splits: In the order of the pass.
            has_byte_offsets: Whether offsets in a file, and its splits, are in bytes of its content.
            size_of: Returns the bytes of a file.
        """
        self._splits = splits
        self._is_smooth = [
            has_byte_offsets(split.path) and not is_compressed(split.path) for split in splits
        ]
        try:
            sizes = [size_of(split.path) for split in splits]
        except DataError:  # reading says which file
            sizes = []
        self._sizes = [
            _stretch(split, size) if is_smooth else size
            for split, size, is_smooth in zip(splits, sizes, self._is_smooth, strict=False)
        ]
        total = sum(self._sizes)
        pairs = zip(self._sizes, self._is_smooth, strict=False)
        steps = [size for size, is_smooth in pairs if not is_smooth]
        self._total = total if max(steps, default=0) <= LARGEST_STEP * total else 0

    def at(self, split: int, offset: int | None) -> float | None:
        """Returns the share, from 0 to 1, before a position; None: unknown.

        Args:
            split: Index of the split in the order of the pass.
            offset: See `DataPosition`; None: the start of the split.
        """
        if not self._total:
            return None
        done = sum(self._sizes[:split])
        if offset is not None and split < len(self._splits) and self._is_smooth[split]:
            done += min(max(offset - self._splits[split].start, 0), self._sizes[split])
        return done / self._total


def _stretch(split: FileSplit, size: int) -> int:
    """Returns the bytes of a split of text."""
    return (size if split.stop is None else split.stop) - split.start
