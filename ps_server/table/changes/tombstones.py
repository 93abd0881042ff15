"""What marks of rows do not tell of the time since the last cut: keys that lost their row, and passes.

    cut ---- removed keys, passes ----> cut, saved: from nothing again
                                        not saved: what was before counts again

With the marks (cut.py) that is all in which a table differs from the checkpoint of its last cut.
"""

from dataclasses import dataclass, field

import numpy as np

from protos.errors import UnknownChangesError
from protos.keys import Keys

LEAST_LIMIT = 4096
"""Removed keys of a shard that are remembered, however few rows it has."""


@dataclass(slots=True)
class _Changes:
    """What happened in one time. `is_known`: since a checkpoint that is there, and all of it."""

    is_known: bool
    passes: int = 0
    removed: dict[int, list[Keys]] = field(default_factory=dict)


class Tombstones:
    """Removed keys and passes. Not thread-safe: a table locks its shards."""

    def __init__(self) -> None:
        """Knows no cut yet, and remembers nothing."""
        self._now = _Changes(is_known=False)
        self._before: _Changes | None = None

    def require_known(self, table: str) -> None:
        """Checks that all that happened since the last cut is remembered; `table` is for the message.

        Raises:
            UnknownChangesError: If it is not.
        """
        if not self._now.is_known:
            raise UnknownChangesError(
                f"it is not known what changed in table {table!r}: it is newer than the last checkpoint, was "
                f"declared otherwise since, or lost more rows than it has; save a full checkpoint"
            )

    @property
    def passes(self) -> int:
        """Passes that ended from the last cut but one to the last, which has not ended."""
        return 0 if self._before is None else self._before.passes

    def removed_keys(self, shard: int) -> Keys:
        """Returns the keys of a shard that lost their row in the same time, uint64[N] ascending."""
        removed = {} if self._before is None else self._before.removed
        return np.unique(np.concatenate([np.empty(0, np.uint64), *removed.get(shard, [])]))

    def add_removed(self, shard: int, keys: Keys, num_rows: int) -> None:
        """Remembers removed keys uint64[N] of a shard.

        Of more keys than the shard's `num_rows` a checkpoint with all rows says the same in less: then all is
        forgotten.
        """
        if not self._now.is_known:
            return
        listed = self._now.removed.setdefault(shard, [])
        listed.append(keys)
        if sum(each.size for each in listed) > max(LEAST_LIMIT, num_rows):
            self.forget()

    def add_pass(self) -> None:
        """Remembers that all rows aged."""
        self._now.passes += 1

    def forget(self) -> None:
        """Knows nothing until the next cut."""
        self._now = _Changes(is_known=False)

    def restart(self) -> None:
        """Remembers from now on: all is as a checkpoint says."""
        self._now = _Changes(is_known=True)

    def begin_snapshot(self) -> None:
        """Begins anew; what was so far stays to be read until the cut ends."""
        self._before = self._now
        self.restart()

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the cut; unless it was saved, what was before it counts again."""
        before, self._before = self._before, None
        if before is None or saved:
            return
        if not (before.is_known and self._now.is_known):
            self.forget()
            return
        self._now.passes += before.passes
        for shard, keys in before.removed.items():
            self._now.removed.setdefault(shard, []).extend(keys)
