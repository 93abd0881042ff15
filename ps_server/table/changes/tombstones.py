"""Tombstones: keys whose row was removed since the last snapshot, and passes that ended since.

    snapshot ---- removed keys, passes ----> snapshot, saved: starts empty
                                             not saved: the earlier ones are restored

Together with the dirty rows (dirty_rows.py) these are all changes since the last checkpoint.
"""

from dataclasses import dataclass, field

import numpy as np

from ctr_ps.protos.errors import UnknownChangesError
from ctr_ps.protos.keys import Keys

LEAST_LIMIT = 4096
"""Removed keys that are recorded for a shard even if it has fewer rows."""

MAX_PASSES = 10_000
"""Passes that a delta may have, each of which its readers repeat; a full checkpoint has no limit."""


@dataclass(slots=True)
class _Changes:
    """Removals and passes between two snapshots; `is_known` is false if some may be missing."""

    is_known: bool
    passes: int = 0
    removed: dict[int, list[Keys]] = field(default_factory=dict)


class Tombstones:
    """Removed keys and passes, from the first snapshot on. Not thread-safe: a table locks its shards."""

    def __init__(self) -> None:
        self._now = _Changes(is_known=False)
        self._before: _Changes | None = None

    def require_known(self, table: str) -> None:
        """Raises UnknownChangesError if changes since the last snapshot are unknown; `table` is for it."""
        if not self._now.is_known:
            raise UnknownChangesError(
                f"the changes of table {table!r} are unknown: it is newer than the last checkpoint, was "
                f"declared with another spec since, lost more rows than it has, or was shrunk more than "
                f"{MAX_PASSES} times; save a full checkpoint"
            )

    @property
    def passes(self) -> int:
        """Passes between the last snapshot and the current one."""
        return 0 if self._before is None else self._before.passes

    def removed_keys(self, shard: int) -> Keys:
        """Returns the keys of a shard removed between the two, uint64[N] ascending."""
        removed = {} if self._before is None else self._before.removed
        return np.unique(np.concatenate([np.empty(0, np.uint64), *removed.get(shard, [])]))

    def add_removed(self, shard: int, keys: Keys, num_rows: int) -> None:
        """Records removed keys uint64[N] of a shard of `num_rows` rows.

        With more removed keys than rows a full checkpoint is smaller than a delta: then all are forgotten.
        """
        if not self._now.is_known:
            return
        listed = self._now.removed.setdefault(shard, [])
        listed.append(keys)
        if sum(each.size for each in listed) > max(LEAST_LIMIT, num_rows):
            self.forget()

    def add_pass(self) -> None:
        """Records the end of a pass, in which all rows aged; after too many, all is forgotten."""
        self._now.passes += 1
        if self._now.passes > MAX_PASSES:
            self.forget()

    def forget(self) -> None:
        """Forgets all, and records nothing until the next snapshot."""
        self._now = _Changes(is_known=False)

    def restart(self) -> None:
        """Starts empty: the table is as in a checkpoint."""
        self._now = _Changes(is_known=True)

    def begin_snapshot(self) -> None:
        """Starts empty; what was recorded so far can be read until the snapshot ends."""
        self._before = self._now
        self.restart()

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the snapshot; unless it was saved, restores what was recorded before it."""
        before, self._before = self._before, None
        if before is None or saved:
            return
        if not (before.is_known and self._now.is_known):
            self.forget()
            return
        self._now.passes += before.passes
        if self._now.passes > MAX_PASSES:
            self.forget()
            return
        for shard, keys in before.removed.items():
            self._now.removed.setdefault(shard, []).extend(keys)
