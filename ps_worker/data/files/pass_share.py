"""The share of a pass over files that is read, by their sizes on disk.

Within a file it follows byte offsets, which only uncompressed text has. Other files count once they are read
completely; if such a file is much of the pass, the share is unknown.
"""

from collections.abc import Callable, Sequence

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.content import is_compressed
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import size_of

LARGEST_STEP = 0.1
"""Largest share of a file that counts as a whole; with a larger one the share is unknown."""


class PassShare:
    """Shares of a pass over splits, in the order of the pass."""

    def __init__(
        self,
        splits: Sequence[FileSplit],  # in the order of the pass
        *,
        # whether offsets in a file, and its splits, are in bytes of its content
        has_byte_offsets: Callable[[str], bool],
        size_of: Callable[[str], int] = size_of,  # returns the bytes of a file
    ) -> None:
        self._splits = splits
        self._is_smooth = [
            has_byte_offsets(split.path) and not is_compressed(split.path) for split in splits
        ]
        try:
            sizes = [size_of(split.path) for split in splits]
        except DataError:  # reading reports it
            sizes = []
        self._sizes = [
            (size if split.stop is None else split.stop) - split.start if is_smooth else size
            for split, size, is_smooth in zip(splits, sizes, self._is_smooth, strict=False)
        ]
        total = sum(self._sizes)
        pairs = zip(self._sizes, self._is_smooth, strict=False)
        steps = [size for size, is_smooth in pairs if not is_smooth]
        self._total = total if max(steps, default=0) <= LARGEST_STEP * total else 0

    def at(self, split: int, offset: int | None) -> float | None:
        """Returns the share, from 0 to 1, before a position; None: unknown. See `DataPosition`."""
        if not self._total:
            return None
        done = sum(self._sizes[:split])
        if offset is not None and split < len(self._splits) and self._is_smooth[split]:
            done += min(max(offset - self._splits[split].start, 0), self._sizes[split])
        return done / self._total
