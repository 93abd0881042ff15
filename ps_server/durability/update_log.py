"""The update log that a server writes: append, begin a segment at each checkpoint, remove the older ones.

    append --> | records of segment 8 | <-- fsync of a group (LogSync.FSYNC)
    begin_segment --> | head of segment 9 | then all appends go there
    remove_before(9), when the checkpoint is published

Invariants:
- Under `_lock` records are numbered and written, so their order in the file is that of their numbers.
- `_sync_lock` is held around each fsync of the segment and around its replacement, and taken before `_lock`.
- After an error of the disk nothing is appended or acknowledged any more: a second fsync would not tell what
  the first has lost.
"""

import threading
from collections.abc import Iterable
from typing import Self

from ctr_ps.protos.errors import LogError
from ctr_ps.protos.futures import Answered, Future, WaitingFuture
from ctr_ps.ps_server.durability.saved_log import SavedLog
from ctr_ps.ps_server.durability.segments import Record, SegmentWriter, checksum_of, disk_errors
from ctr_ps.ps_server.settings import LogSync

SYNC_LIMIT_S = 60.0  # how long an append waits for its fsync; no disk that works takes so long


class UpdateLog:
    """An update log that records are appended to. Thread-safe."""

    def __init__(self, saved: SavedLog, writer: SegmentWriter, sync: LogSync) -> None:
        """Takes over the folder of `saved`; made by `create` and `resume`."""
        self._folder = saved.folder
        self._sync = sync
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._writer = writer
        self._older = {
            segment: self._folder.segment_path(segment).stat().st_size
            for segment in saved.segments
            if segment != writer.segment
        }
        self._acknowledged = writer.next_record
        self._waiting: list[WaitingFuture[None]] = []
        self._newest: Future[None] = Answered(None)
        self.num_appended = 0  # records appended by this process, without heads
        self.appended_bytes = 0  # size of these records
        # about the seconds that the calls since the last segment began took, and would take again
        self.replay_s = 0.0
        self._fault = ""  # why nothing can be written
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._sync_groups, name="update-log-sync", daemon=True
        )
        if sync is LogSync.FSYNC:
            self._thread.start()

    @classmethod
    def create(cls, saved: SavedLog, *, sync: LogSync, head: Iterable[Record] = ()) -> Self:
        """Begins a log in a folder that has none, with segment 1; raises LogError if it cannot."""
        if saved.segments:
            raise LogError(
                f"{saved.folder.path} already has an update log, with segments {list(saved.segments)}: "
                "recover from it, or remove the folder if its job is no longer needed"
            )
        with disk_errors(f"cannot begin an update log in {saved.folder.path}"):
            writer = SegmentWriter.create(saved.folder.unpublished_path(1), 1, 0, [*head])
            try:
                saved.folder.drained_path.unlink(missing_ok=True)
                saved.folder.publish(1)
            except OSError:
                writer.close()
                raise
            return cls(saved, writer, sync)

    @classmethod
    def resume(cls, saved: SavedLog, *, sync: LogSync) -> Self:
        """Continues a log after its last whole record; cuts a torn tail off, and makes all of it durable.

        Raises LogError if the last segment is damaged, or cannot be written.
        """
        end = saved.end()
        with disk_errors(f"cannot resume the update log {saved.folder.path}"):
            saved.folder.remove_unpublished()
            saved.folder.sync()  # the process before may have ended between a name and this
            path = saved.folder.segment_path(end.header.segment)
            writer = SegmentWriter.resume(path, end.header, end.offset, end.next_record)
            return cls(saved, writer, sync)

    def append(self, kind: str, payload: bytes | memoryview) -> Future[None]:
        """Writes a record; the future is done when it is durable, with `LogSync.OS` at once.

        The payload, up to 4 GiB, is read before this returns, and not copied. Raises LogError if the record
        is too long, cannot be written, or an earlier one could not, or the log is closed. So does the future
        if the record may not be durable.
        """
        record, checksum = Record(kind, payload), checksum_of(payload)
        with self._lock:
            self._require_usable()
            size = self._writer.size_bytes
            acknowledged = (
                self._acknowledged if self._sync is LogSync.FSYNC else self._writer.next_record
            )
            try:
                self._writer.append(record, checksum, acknowledged)
            except OSError as error:
                raise self._fail(error) from error
            self.num_appended += 1
            self.appended_bytes += self._writer.size_bytes - size
            if self._sync is LogSync.OS:
                return Answered(None)
            future: WaitingFuture[None] = WaitingFuture(SYNC_LIMIT_S, self._sync_timeout)
            self._waiting.append(future)
            self._newest = future
            self._has_work.notify()
        return future

    def durable(self) -> Future[None]:
        """Returns the future of the newest record: a record is durable when a later one is."""
        return self._newest

    def begin_segment(self, head: Iterable[Record]) -> int:
        """Begins the next segment durably and returns its number; later appends go there.

        Everything appended before is durable then. `head` is the state at this moment; it is iterated while
        appends wait, so it must not append. Raises LogError if the segment cannot be written, then the log
        goes on with the one before, or an earlier append could not.
        """
        self.sync()  # most of it now, while others append
        with self._sync_lock, self._lock:
            self._require_usable()
            old, segment, records = self._writer, self._writer.segment + 1, list(head)
            with disk_errors(f"cannot begin segment {segment} of {self._folder.path}"):
                path = self._folder.unpublished_path(segment)
                new = SegmentWriter.create(path, segment, old.next_record, records)
            try:
                old.sync()
                self._folder.publish(segment)
            except OSError as error:
                new.close()
                raise self._fail(error) from error
            old.close()
            self._older[old.segment] = old.size_bytes
            self._writer = new
            self.replay_s = 0.0
            self._acknowledged = new.next_record
            durable, self._waiting = self._waiting, []
        self._answer(durable, "")
        return segment

    def sync(self) -> None:
        """Makes what was appended so far durable, while others append; an error shows at the next append."""
        with self._sync_lock:
            with self._lock:
                group, self._waiting = self._waiting, []
                next_record, fault = self._writer.next_record, self._fault
            try:
                if not fault:
                    self._writer.sync()
                    with self._lock:
                        self._acknowledged = next_record
            except OSError as error:
                with self._lock:
                    fault = str(self._fail(error))
        self._answer(group, fault)

    def remove_before(self, segment: int) -> None:
        """Removes the segments before `segment`, the current one at most; raises LogError if it cannot."""
        with self._lock:
            self._require_usable()
            if segment > self._writer.segment:
                raise LogError(
                    f"segments before {segment} of {self._folder.path} cannot be removed: the log is still "
                    f"written to segment {self._writer.segment}"
                )
        self._folder.remove_before(segment)
        with self._lock:
            self._older = {old: size for old, size in self._older.items() if old >= segment}

    @property
    def segment(self) -> int:
        """Number of the current segment."""
        return self._writer.segment

    @property
    def size_bytes(self) -> int:
        """Size of all segments on disk."""
        with self._lock:
            return sum(self._older.values()) + self._writer.size_bytes

    @property
    def num_waiting(self) -> int:
        """Records that are not durable yet, of those that have to be."""
        return len(self._waiting)

    def close(self) -> None:
        """Ends the log's part of this process; it can be resumed. A second call does nothing."""
        if self._stop():
            self._folder.close()

    def delete(self, *, is_drained: bool = False) -> None:
        """Closes the log and removes its segments, the oldest first; its folder, with the lock, stays.

        Before, that says whether the server was drained.
        """
        if self._stop():
            try:
                if is_drained:
                    with disk_errors(f"cannot end the update log {self._folder.path}"):
                        self._folder.drained_path.touch(0o600)
                        self._folder.sync()
                self._folder.remove_before(self._writer.segment + 1)
            finally:
                self._folder.close()

    def _stop(self) -> bool:
        """Refuses more records, syncs those that wait and closes the file; False if that was done before."""
        with self._lock:
            if self._is_closed:
                return False
            self._is_closed = True
            self._has_work.notify()
        if self._sync is LogSync.FSYNC:
            self._thread.join()
        with self._sync_lock, self._lock:
            self._writer.close()
            self._fault = self._fault or f"the update log {self._folder.path} is closed"
        return True

    def _sync_groups(self) -> None:
        """Syncs all records that were appended during the sync before, until the log is closed."""
        while True:
            with self._lock:
                self._has_work.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
            self.sync()

    @staticmethod
    def _answer(group: Iterable[WaitingFuture[None]], fault: str) -> None:
        def answer() -> None:
            if fault:
                raise LogError(fault)

        for future in group:
            future.answer_with(answer)

    def _sync_timeout(self, _: WaitingFuture[None]) -> LogError:
        return LogError(
            f"the disk of the update log {self._folder.path} did not sync within {SYNC_LIMIT_S:g} s"
        )

    def _fail(self, error: OSError) -> LogError:
        """Lets nothing be appended any more, and returns why; needs `_lock`."""
        self._fault = (
            f"cannot write the update log {self._folder.path}: {error.strerror}; restart the server when "
            "the disk works and has room: it recovers all acknowledged calls"
        )
        return LogError(self._fault)

    def _require_usable(self) -> None:
        if self._is_closed:
            raise LogError(f"the update log {self._folder.path} is closed")
        if self._fault:
            raise LogError(self._fault)
