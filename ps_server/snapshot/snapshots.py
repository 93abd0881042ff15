"""Moments of a store that are saved while it trains on: one at a time, none held for ever.

    take --alone for a moment--> held --writing--> ended, saved or not
                                  |
                                  +-- not written in time, or another is taken --> ended, not saved

Pushes share a lock with each other, so a cut never goes through the middle of one.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from threading import Condition

from protos.errors import CheckpointError, ProtocolError, WaitTimeoutError
from protos.spec import DenseSpec
from protos.store import SaveStatus, Version, WorkerProgress
from ps_server.snapshot.phase_lock import SharedLock
from ps_server.table.contents import DensePiece
from ps_server.table.dense_table import DenseTable
from ps_server.table.sparse_table import SparseTable
from ps_server.table.table_snapshot import CountersSnapshot, RemovedSnapshot, TableSnapshot

logger = logging.getLogger(__name__)

HOLD_LIMIT_S = 60.0
"""How long a cut waits to be written, in seconds: its saver asks for that at once, or is gone."""


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """A copy of a dense piece: a `ps_server.table.contents.DenseSource`."""

    spec: DenseSpec
    piece: DensePiece

    def export(self) -> DensePiece:
        """Returns the piece."""
        return self.piece


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """All that a store holds, as it was at one moment.

    Attributes:
        tables: Copied while they are written.
        live: The tables themselves.
        blocks: Copied already.
        version: Of the store.
        workers: How much of each worker's training is in it.
        is_delta: Whether the tables have only the rows that changed since the last cut that was saved.
    """

    tables: Sequence[TableSnapshot]
    live: Sequence[SparseTable]
    blocks: Sequence[BlockSnapshot]
    version: Version
    workers: Mapping[int, WorkerProgress]
    is_delta: bool = False

    @property
    def candidates(self) -> list[TableSnapshot]:
        """Keys without a row, of the tables that count them one by one."""
        return [
            each.candidates for each in self.tables if isinstance(each.candidates, TableSnapshot)
        ]

    @property
    def counters(self) -> list[CountersSnapshot]:
        """Counters of keys without a row, of the tables that have them."""
        return [
            each.candidates for each in self.tables if isinstance(each.candidates, CountersSnapshot)
        ]

    @property
    def removed(self) -> list[RemovedSnapshot]:
        """Keys that lost their row since the base; of a cut with all rows none."""
        return [each.removed() for each in self.tables] if self.is_delta else []

    def end(self, *, saved: bool) -> None:
        """Lets go of what was kept; unless it was saved, what had changed before counts as changed again."""
        for table in self.live:
            table.end_snapshot(saved=saved)


def snapshot_all(
    tables: Sequence[SparseTable],
    blocks: Sequence[DenseTable],
    version: Version,
    workers: Mapping[int, WorkerProgress],
    *,
    is_delta: bool = False,
) -> StoreSnapshot:
    """Cuts tables and blocks, which nobody may change meanwhile.

    Raises:
        CheckpointError: If memory is short; nothing is cut then.
        UnknownChangesError: If it is not known what changed; likewise.
    """
    with ExitStack() as undo:
        snapshots = []
        try:
            for table in tables:
                snapshots.append(table.begin_snapshot(changes_only=is_delta))
                undo.callback(table.end_snapshot, saved=False)
            pieces = [BlockSnapshot(block.spec, block.export()) for block in blocks]
        except MemoryError as exc:
            raise CheckpointError(
                "there is no memory to keep parameters as they are while they are saved: nothing was "
                "saved; let fewer processes share the machine, or use more servers"
            ) from exc
        undo.pop_all()
    return StoreSnapshot(snapshots, tables, pieces, version, workers, is_delta)


@dataclass(frozen=True, slots=True)
class _Held:
    """A cut that waits to be written, and since when it was taken."""

    token: str
    snapshot: StoreSnapshot
    taken_s: float
    pause_s: float


class Snapshots:
    """Who may change a store, and which moment of it is being saved. Thread-safe."""

    def __init__(
        self,
        freeze: Callable[[str], StoreSnapshot],
        *,
        wait_limit_s: float,
        hold_limit_s: float = HOLD_LIMIT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has taken no cut.

        Args:
            freeze: Cuts the store, as changes to a base or whole; called while nobody changes it.
            wait_limit_s: How long to wait for pushes, or for a save to end, in seconds.
            hold_limit_s: How long a cut waits to be written, in seconds.
            monotonic: The clock, in seconds.
        """
        self._freeze = freeze
        self._wait_limit_s = wait_limit_s
        self._hold_limit_s = hold_limit_s
        self._monotonic = monotonic
        self._lock = SharedLock()
        self._turns = Condition()
        self._whose_turn = ""
        self._held: _Held | None = None
        self._last: SaveStatus | None = None

    def changing(self) -> AbstractContextManager[None]:
        """Held by whoever changes parameters, around all of one change; not twice by one thread."""
        if self._is_overdue():
            self._drop_overdue()
        return self._lock.shared()

    def take(self, token: str, base: str = "") -> None:
        """Cuts the store; the cut waits for `writing`, in the place of one that was not written.

        Args:
            token: Of the save to come.
            base: Token of the save whose changes are cut; empty: all is.

        Raises:
            CheckpointError: If memory is short.
            UnknownChangesError: If it is not known what changed since the base.
            WaitTimeoutError: If another save does not end in time, or pushes do not.
        """
        with self._turn("a cut", after_held=False) as left_s:
            self._drop()
            start = self._monotonic()
            with self._lock.alone(left_s):
                snapshot = self._freeze(base)
            now = self._monotonic()
            self._held = _Held(token, snapshot, start, now - start)
        rows = sum(table.num_rows for table in snapshot.tables)
        logger.info("cut token=%s rows=%d pause_ms=%.1f", token, rows, 1e3 * (now - start))

    @contextmanager
    def writing(self, token: str, *, is_base: bool = True) -> Iterator[StoreSnapshot]:
        """Lends the cut of this token; it ends with the block, as saved unless that raises.

        Args:
            token: Of the cut.
            is_base: Whether what changes from the cut on is what later deltas have; else it is as if nothing
                was saved.

        Raises:
            ProtocolError: If there is none: taken from another store, or held for too long.
            WaitTimeoutError: If another save does not end in time.
        """
        with self._turn("a save", after_held=False):
            held = self._held
            if held is None or held.token != token:
                raise ProtocolError(
                    f"there is no cut {token!r} to be saved: another was taken since, or it was not saved "
                    f"within {self._hold_limit_s:g} s, or the server was started anew; cut again"
                )
            self._held = None
            self._last = SaveStatus(pause_s=held.pause_s, duration_s=0.0, is_over=False)
            with ExitStack() as failed:
                failed.callback(self._end, held, saved=False)
                yield held.snapshot
                failed.pop_all()
            self._end(held, saved=is_base)

    @contextmanager
    def between_saves(self, what: str) -> Iterator[None]:
        """Held by whoever needs no save to go on meanwhile; `what` is for messages.

        Raises:
            WaitTimeoutError: If a save does not end in time.
        """
        with self._turn(what, after_held=True):
            yield

    def alone(self) -> AbstractContextManager[None]:
        """Held between saves by whoever replaces parameters: nobody is in the middle of a change then.

        Raises:
            WaitTimeoutError: If pushes do not end in time.
        """
        return self._lock.alone(self._wait_limit_s)

    @property
    def last(self) -> SaveStatus | None:
        """What the last save cost; None if there was none."""
        return self._last

    @contextmanager
    def _turn(self, what: str, *, after_held: bool) -> Iterator[float]:
        """Waits until nobody else saves, or has the store to itself between saves.

        Lends the seconds that are left of the limit.

        Args:
            what: Whose turn it becomes, for messages.
            after_held: Whether a cut that waits to be written goes first.
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
                        f"{what} had to wait for {self._whose_turn or 'a save'} to end for longer than "
                        f"{self._wait_limit_s:g} s; see the server's log"
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
        self._last = SaveStatus(pause_s=held.pause_s, duration_s=duration_s, is_over=True)

    def _is_overdue(self) -> bool:
        held = self._held
        if held is None:
            return False
        return self._monotonic() - held.taken_s - held.pause_s > self._hold_limit_s

    def _drop_overdue(self) -> None:
        """Drops a cut that nobody came to write: what it keeps would grow with every push."""
        with self._turns:
            if not self._whose_turn and self._is_overdue():
                self._drop()

    def _drop(self) -> None:
        if self._held is not None:
            logger.warning("cut dropped, nobody saved it token=%s", self._held.token)
            self._held.snapshot.end(saved=False)
            self._held = None
