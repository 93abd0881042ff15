"""Point-in-time snapshots of a store, written while it trains: one at a time, none held for ever.

    taking --alone for a moment--> held --writing--> ended, saved or not
                                  |
                                  +-- not written in time, or another is taken --> ended, not saved

Pushes share a lock that a snapshot takes alone, so it has each push and each step as a whole or not at all.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from threading import Condition

from ctr_ps.protos.errors import CheckpointError, SnapshotLostError, WaitTimeoutError
from ctr_ps.protos.store import Applied, SaveStatus
from ctr_ps.ps_server.snapshot.phase_lock import PhaseLock
from ctr_ps.ps_server.table.contents import DensePiece, Rows, ShardSource
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_server.table.table_snapshot import CountersSource, TableSnapshot

logger = logging.getLogger(__name__)

REMEMBERED_TOKENS = 64  # no copy of a call is so late that as many saves come before it

HOLD_LIMIT_S = 60.0
"""How long a snapshot waits to be written, in seconds: its saver asks for that at once, or has died."""


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """All parameters of a store at one moment."""

    tables: Sequence[TableSnapshot]  # copied while they are written
    live: Sequence[SparseTable]  # the tables themselves
    blocks: Mapping[str, DensePiece]  # copied already
    applied: Applied  # what is in them
    # tables have only the rows changed since the last snapshot that was saved
    is_delta: bool = False

    @property
    def candidates(self) -> list[TableSnapshot]:
        """Keys without a row, of the tables that count them one by one."""
        return [
            each.candidates for each in self.tables if isinstance(each.candidates, TableSnapshot)
        ]

    @property
    def counters(self) -> list[CountersSource]:
        """Counters of keys without a row, of the tables that have them."""
        return [each.candidates for each in self.tables if isinstance(each.candidates, ShardSource)]

    @property
    def removed(self) -> list[ShardSource[Rows]]:
        """Keys that lost their row since the base; empty unless it is a delta."""
        return [each.removed() for each in self.tables] if self.is_delta else []

    def end(self, *, saved: bool) -> None:
        """Releases the rows kept; unless it was saved, restores the marks of changed rows."""
        for table in self.live:
            table.end_snapshot(saved=saved)


def snapshot_all(
    tables: Sequence[SparseTable],
    blocks: Sequence[DenseTable],
    applied: Applied,
    *,
    is_delta: bool = False,
) -> StoreSnapshot:
    """Takes a snapshot of tables and blocks, while nothing changes them.

    Raises CheckpointError if memory is short, and UnknownChangesError if the changes are not known; no
    snapshot remains then.
    """
    with ExitStack() as undo:
        snapshots = []
        try:
            for table in tables:
                snapshots.append(table.begin_snapshot(changes_only=is_delta))
                undo.callback(table.end_snapshot, saved=False)
            pieces = {block.spec.name: block.export() for block in blocks}
        except MemoryError as exc:
            raise CheckpointError(
                "not enough memory for a snapshot, so nothing was saved: run fewer processes on the "
                "machine, or use more servers"
            ) from exc
        undo.pop_all()
    return StoreSnapshot(snapshots, tables, pieces, applied, is_delta)


class Taking:
    """A snapshot that is being taken: `snapshot` is to be set within `moment`, and empty before."""

    def __init__(self, lock: PhaseLock, wait_limit_s: float) -> None:
        self._lock = lock
        self._wait_limit_s = wait_limit_s
        self.snapshot = StoreSnapshot((), (), {}, Applied())

    def moment(self) -> AbstractContextManager[None]:
        """Held while nothing changes the parameters; WaitTimeoutError if pushes do not end in time."""
        return self._lock.alone(self._wait_limit_s)


@dataclass(frozen=True, slots=True)
class _Held:
    """A snapshot that waits to be written, and when it was taken."""

    token: str
    snapshot: StoreSnapshot
    taken_s: float
    pause_s: float


class Snapshots:
    """The lock between changes and snapshots of a store, and the snapshot being saved. Thread-safe."""

    def __init__(
        self,
        *,
        wait_limit_s: float,
        hold_limit_s: float = HOLD_LIMIT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has no snapshot; `wait_limit_s` is how long to wait for pushes, or for a save to end."""
        self._wait_limit_s = wait_limit_s
        self._hold_limit_s = hold_limit_s
        self._monotonic = monotonic
        self._lock = PhaseLock()
        self._turns = Condition()
        self._whose_turn = ""
        self._held: _Held | None = None
        self._taken: deque[str] = deque(maxlen=REMEMBERED_TOKENS)
        self.last: SaveStatus | None = None  # of saves; None: there was none
        self._num_saves = 0

    def changing(self) -> AbstractContextManager[None]:
        """Held around all of one change of parameters; not twice by one thread."""
        if self._is_overdue():
            self._drop_overdue()
        return self._lock.shared()

    @contextmanager
    def taking(self, token: str) -> Iterator[Taking | None]:
        """Lends what takes the snapshot of a save to come, once no other save runs; drops one not written.

        The snapshot waits for `writing` when the block ends; if the block raises, there is none. A token has
        one snapshot: when it is asked for again, since its answer was lost, None is lent. A second one would
        be of another moment than those of other servers. Raises WaitTimeoutError if another save does not end
        in time.
        """
        with self._turn("a snapshot", after_held=False) as left_s:
            if token in self._taken:
                yield None
                return
            self._drop()
            start = self._monotonic()
            taking = Taking(self._lock, left_s)
            try:
                yield taking
            except BaseException:
                taking.snapshot.end(saved=False)
                raise
            now = self._monotonic()
            self._taken.append(token)
            self._held = _Held(token, taking.snapshot, start, now - start)
        rows = sum(table.num_rows for table in taking.snapshot.tables)
        logger.info("snapshot token=%s rows=%d pause_ms=%.1f", token, rows, 1e3 * (now - start))

    @contextmanager
    def writing(self, token: str, *, is_base: bool = True) -> Iterator[StoreSnapshot]:
        """Lends the snapshot of this token; it ends with the block, as saved unless that raises.

        If later deltas are not based on it, the marks of changed rows are restored. Raises SnapshotLostError
        if there is no such snapshot, since another was taken, or it was held for too long; WaitTimeoutError
        if another save does not end in time.
        """
        with self._turn("a save", after_held=False):
            held = self._held
            if held is None or held.token != token:
                raise SnapshotLostError(
                    f"snapshot {token!r} no longer exists: a later one was taken, it was not saved within "
                    f"{self._hold_limit_s:g} s, or the server was restarted; save again"
                )
            self._held = None
            self._num_saves += 1
            self.last = SaveStatus(
                pause_s=held.pause_s, duration_s=0.0, is_over=False, number=self._num_saves
            )
            with ExitStack() as failed:
                failed.callback(self._end, held, saved=False)
                yield held.snapshot
                failed.pop_all()
            self._end(held, saved=is_base)

    @contextmanager
    def between_saves(self, what: str) -> Iterator[None]:
        """Held while no save may run; raises WaitTimeoutError if one does not end in time."""
        with self._turn(what, after_held=True):
            yield

    def require_none(self) -> None:
        """Raises WaitTimeoutError if a save, load or shrink runs, or a snapshot waits to be written."""
        with self._turns:
            if self._whose_turn or self._held is not None:
                raise WaitTimeoutError(f"{self._whose_turn or 'a save'} is under way")

    def alone(self) -> AbstractContextManager[None]:
        """Held between saves while parameters are replaced: no change is applied meanwhile.

        Raises WaitTimeoutError if pushes do not end in time.
        """
        return self._lock.alone(self._wait_limit_s)

    @contextmanager
    def _turn(self, what: str, *, after_held: bool) -> Iterator[float]:
        """Waits until no other save, load or shrink runs; lends the seconds that are left of the limit.

        With `after_held`, a snapshot that waits to be written is first. `what` is for messages.
        """
        give_up_s = self._monotonic() + self._wait_limit_s
        with self._turns:
            while self._whose_turn or (after_held and self._held is not None):
                if self._is_overdue() and not self._whose_turn:
                    self._drop()
                    continue
                left_s = give_up_s - self._monotonic()
                if left_s <= 0:
                    raise WaitTimeoutError(
                        f"{what} waited more than {self._wait_limit_s:g} s for "
                        f"{self._whose_turn or 'a save'} to end; see the server's log"
                    )
                self._turns.wait(min(left_s, self._hold_limit_s))
            self._whose_turn = what
        try:
            yield max(0.0, give_up_s - self._monotonic())
        finally:
            with self._turns:
                self._whose_turn = ""
                self._turns.notify_all()

    def _end(self, held: _Held, *, saved: bool) -> None:
        held.snapshot.end(saved=saved)
        duration_s = self._monotonic() - held.taken_s
        self.last = SaveStatus(
            pause_s=held.pause_s, duration_s=duration_s, is_over=True, number=self._num_saves
        )

    def _is_overdue(self) -> bool:
        held = self._held
        if held is None:
            return False
        return self._monotonic() - held.taken_s - held.pause_s > self._hold_limit_s

    def _drop_overdue(self) -> None:
        """Drops a snapshot that was not written in time: the rows it keeps would grow with every push."""
        with self._turns:
            if not self._whose_turn and self._is_overdue():
                self._drop()

    def _drop(self) -> None:
        if self._held is not None:
            logger.warning(
                "snapshot dropped, as it was not saved in time: token=%s", self._held.token
            )
            self._held.snapshot.end(saved=False)
            self._held = None
