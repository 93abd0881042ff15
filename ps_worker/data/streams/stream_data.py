"""The rows of a stream as training data: batches of a worker's partitions, pass by pass, with positions."""

import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Self

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.protos.store import WorkerProgress
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.streams.decoding import MessageDecoder, Rows
from ctr_ps.ps_worker.data.streams.merging import MOST_MERGED, Merger
from ctr_ps.ps_worker.data.streams.source import (
    START,
    Message,
    StreamUrl,
    offset_and_rows,
    open_source,
    owner_of,
)

logger = logging.getLogger(__name__)

FOREVER = float("inf")
"""The end of a pass that only the end of the stream ends."""

IDLE_S = 0.05
"""How long a batch waits for more rows of a stream that has no more."""

IDLE_PASS_S = 10.0
"""How long a pass of a number of rows waits for more of them."""

LOOK_S = 30.0
"""How often new partitions are looked for."""

LAG_S = 5.0
"""How often the lag is asked for while batches are read."""

STALL_LIMIT_S = 600.0

END = "end of "
"""Before the name of a partition in positions: where a run with the option `end=latest` ends in it."""

LATE_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0)
"""Limits between which late messages are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """A position between two rows of a stream."""

    epoch: int  # number of the pass, from 1
    rows: int = 0  # of this worker in the pass
    before_ms: float | None = None  # end of the pass, in ms since 1970; None: that of the stream
    time_ms: int = 0  # of the newest row, in ms since 1970
    is_idle: bool = False  # there was no row after it yet
    # positions in the partitions that were read since the position before; not in the JSON
    partitions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the position as JSON, without its positions."""
        values = asdict(self)
        del values["partitions"]
        if not self.is_idle:
            del values["is_idle"]  # which releases before do not know
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str, partitions: Mapping[str, str]) -> Self:
        """Returns the position that `to_json` wrote; raises DataError for another text."""
        try:
            values = json.loads(text)
            known = {each.name for each in fields(cls)} & values.keys()  # a later release has more
            return cls(**{name: values[name] for name in known}, partitions=partitions)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{text!r} is no position in a stream") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How a worker reads a stream."""

    url: StreamUrl
    schema: Schema
    batch_size: int
    thread_num: int = 1  # threads that train its batches
    worker: int
    num_workers: int


class StreamData:
    """The partitions of one worker, to be read once. Not thread-safe."""

    def __init__(
        self,
        settings: StreamSettings,
        decoder: MessageDecoder,
        *,
        positions: Mapping[str, str],  # where an earlier run was, by partition
        # batches that some servers have beyond `positions`, and the positions after them
        sent: int = 0,
        sent_positions: Mapping[str, str] | None = None,
        time_ms: int = 0,  # of the newest message before
        is_resumed: bool = False,  # whether the run has begun before
        keeps_ends: bool = False,  # whether ends in `positions` are those of this run
        # called now and then while no message comes; whether an empty batch is to be yielded
        on_idle: Callable[[], bool] = lambda: False,
        is_told_to_end: Callable[[], bool] = lambda: False,  # then no batch is yielded any more
        stall_limit_s: float = STALL_LIMIT_S,  # the longest wait for messages that are there
    ) -> None:
        """Opens the stream; raises DataError if it cannot be read."""
        self._settings = settings
        self._decoder = decoder
        self._on_idle = on_idle
        self._is_told_to_end = is_told_to_end
        self._stall_limit_s = stall_limit_s
        self._source = open_source(settings.url)
        self._looked_s = time.monotonic()
        own = self._own_partitions()
        # A file is read block by block.
        self._most_merged = 1 if settings.url.kind == "folder" else MOST_MERGED
        # Those that no push has had yet. A partition that came since a run began is read from its start.
        start_of = (lambda _: START) if positions or is_resumed else self._source.start_of
        self._untold = {each: start_of(each) for each in own if each not in positions}
        self._positions = {each: positions.get(each, self._untold.get(each, START)) for each in own}
        is_to_now = settings.url.end == "latest"
        known = {**positions, **(sent_positions or {})} if keeps_ends else {}
        self._ends: dict[str, str] | None = None
        if is_to_now:
            self._ends = {
                k: known[f"{END}{k}"] if f"{END}{k}" in known else self._source.last_of(k)
                for k in own
            }
            self._untold |= {f"{END}{k}": at for k, at in self._ends.items()}
        self._owes_ends = is_to_now and not all(f"{END}{each}" in known for each in own)
        self._sent = sent
        # In the order of partitions, which decides between messages of one time.
        self._sent_positions = {
            each: sent_positions[each] for each in own if sent_positions and each in sent_positions
        }
        self._merger: Merger | None = None
        self._rows: Rows | None = None  # read, and not all yielded yet
        self._after: dict[tuple[str, str], int] = {}
        self._time_ms = time_ms  # of the newest message read
        self._told_ms = time_ms  # of the newest one in positions
        self._lag: Mapping[str, int] = {}
        self._lag_s = -LAG_S
        self.latest_ms = 0  # the most that a message was behind the newest one before it
        # such messages by `LATE_S`, with those beyond, and their seconds; left out by the option `late`
        self.lateness = {name: [0.0] * (len(LATE_S) + 2) for name in ("trained", "left_out")}
        # Empty batches to yield when there are no rows: a training thread reads a batch before it ends the
        # one before. Of several threads one may take two.
        self._most_owed = 1 if settings.thread_num == 1 else 2 * settings.thread_num
        # With the first one, servers know where a run began that begins at the end of partitions.
        self._owed = int(any(self._untold.values()))

    def _own_partitions(self) -> list[str]:
        own, found = self._settings.worker, self._source.partitions()
        return [each for each in found if owner_of(each, self._settings.num_workers) == own]

    @property
    def partitions(self) -> list[str]:
        """The partitions that this worker reads."""
        return list(self._positions)

    def lag(self) -> Mapping[str, int]:
        """Returns, to any thread, how many messages of each partition were not polled some seconds ago.

        Asked for by `batches`, every `LAG_S`; see `StreamSource.lag`.
        """
        return self._lag

    def late(self) -> tuple[int, int]:
        """Returns how many messages came after one of a later time, and how many of them were left out."""
        trained, left_out = (int(sum(self.lateness[k][:-1])) for k in ("trained", "left_out"))
        return trained + left_out, left_out

    def close(self) -> None:
        """Closes the connections."""
        self._source.close()

    def next_ms(self) -> float:
        """Returns the time of the next row; now without one, and `FOREVER` at the end of the stream.

        nan if this process is told to end before that is known.
        """
        if self._sent or (self._rows is not None and self._rows.left):
            return 0.0
        merger = self._merger_here()
        found = merger.next_ms()
        if found is not None:
            return found
        return FOREVER if merger.is_over else time.time() * 1000

    def batches(
        self, epoch: int, *, before_ms: float = FOREVER, max_rows: int = 0, rows: int = 0
    ) -> Generator[tuple[Batch, StreamPosition], None, None]:
        """Yields the batches of a pass, each with the position after it.

        The pass ends before the first message of `before_ms`, or when it is that time and there is none; with
        `max_rows` after so many of this worker, of which `rows` were yielded before, or when none came for
        `IDLE_PASS_S`.
        """

        def yielded(pieces: Sequence[Batch]) -> tuple[Batch, StreamPosition]:
            nonlocal rows
            rows += sum(piece.size for piece in pieces)
            told, self._untold, self._owes_ends = self._untold, {}, False
            batch = joined(pieces) if pieces else empty_batch(self._settings.schema)
            self._owed = self._most_owed if batch.size else self._owed - 1
            end = before_ms if before_ms < FOREVER else None
            return batch, StreamPosition(
                epoch=epoch, rows=rows, before_ms=end, time_ms=self._told_ms, partitions=told
            )

        self._decoder.bad_rows.begin_pass()
        if self._sent:
            yield from map(yielded, self._sent_batches())
            if self._sent:
                return
        held: list[Batch] = []
        size, batch_size = 0, self._settings.batch_size
        most = max_rows or FOREVER
        last_s = time.monotonic()
        while rows + size < most:
            left = 0 if self._rows is None else self._rows.left
            if not left and not self._read(before_ms):
                if self._is_told_to_end():
                    return  # rows that are held are read again, with those that would have come
                is_idle = max_rows and time.monotonic() - last_s > IDLE_PASS_S
                if is_idle or self._is_at_end(before_ms):
                    if self._owes_ends and not held:
                        yield yielded([])
                    break
                if held or self._owed > 0 or self._on_idle():
                    batch, position = yielded(held)
                    yield batch, replace(position, is_idle=True)
                    held, size = [], 0
                continue
            if self._rows is None or not self._rows.left:
                continue
            last_s = time.monotonic()
            part, positions = self._rows.take(int(min(batch_size - size, most - rows - size)))
            held.append(part)
            size += part.size
            self._note(positions, self._rows)
            if not self._rows.left:
                self._note(self._rows.rest(), self._rows)
            if size == batch_size:
                yield yielded(held)
                held, size = [], 0
        if held:
            yield yielded(held)
        self._decoder.bad_rows.report(rows)

    def head(self, number: int) -> Iterator[Batch]:
        """Yields the first `number` rows, or as many as there are now; this is not to be read on."""
        while number and self._read(FOREVER):
            while number and self._rows is not None and self._rows.left:
                batch, _ = self._rows.take(number)
                number -= batch.size
                yield batch

    def _read(self, before_ms: float) -> bool:
        """Reads messages; False if none of a time before that came in a while."""
        messages = self._without_late(self._merger_here().take(before_ms, IDLE_S))
        if time.monotonic() - self._lag_s >= LAG_S:
            self._lag, self._lag_s = self._source.lag(), time.monotonic()
        if not messages:
            return False
        self._rows = self._decoder.rows(messages, self._after, {})
        for message in messages if self._after else ():
            self._after.pop((message.partition, message.offset), None)
        if not self._rows.left:
            self._note(self._rows.rest(), self._rows)
        return True

    def _without_late(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Counts the messages that are late, and empties those that are too late; their positions count."""
        found = []
        for message in messages:
            behind_ms = self._time_ms - message.time_ms
            is_out = behind_ms > self._settings.url.late_ms
            if behind_ms > 0:
                self.latest_ms = max(self.latest_ms, behind_ms)
                counts = self.lateness["left_out" if is_out else "trained"]
                counts[bisect_left(LATE_S, behind_ms / 1000)] += 1
                counts[-1] += behind_ms / 1000
            if is_out:
                message = replace(message, value=b"")  # noqa: PLW2901 (no rows)
            self._time_ms = max(self._time_ms, message.time_ms)
            found.append(message)
        return found

    def _is_at_end(self, before_ms: float) -> bool:
        merger = self._merger_here()
        found = merger.next_ms()
        if found is not None:
            return found >= before_ms
        return merger.is_over or time.time() * 1000 >= before_ms

    def _note(self, positions: Mapping[str, str], rows: Rows | None = None) -> None:
        self._positions.update(positions)
        self._untold.update(positions)
        self._told_ms = max(self._told_ms, 0 if rows is None else rows.time_ms)

    def _merger_here(self) -> Merger:
        """Returns what merges the partitions, from their positions on; new ones are added now and then."""
        url = self._settings.url
        if self._merger is None:
            self._merger = Merger(
                self._source,
                self._positions,
                ends=self._ends,
                end_ms=url.end_ms,
                time_column=url.time,
                most_merged=self._most_merged,
                stall_limit_s=self._stall_limit_s,
                is_told_to_end=self._is_told_to_end,
            )
            self._after = _partly_read(self._positions)
        elif self._ends is None and time.monotonic() - self._looked_s > LOOK_S:
            self._looked_s = time.monotonic()
            try:
                found = self._own_partitions()
            except DataError as error:  # reading says so, if it lasts
                logger.warning("cannot look for new partitions: %s", error)
                found = []
            if new := [each for each in found if each not in self._positions]:
                logger.info("the stream has new partitions: %s", ", ".join(new))
                self._merger.add(dict.fromkeys(new, START))
                self._note(dict.fromkeys(new, START))
        return self._merger

    def _sent_batches(self) -> Iterator[list[Batch]]:
        """Yields the batches that a process before this one sent to some servers, of the very rows."""
        sent, ends = self._sent, {}
        before = {}
        for partition, position in self._sent_positions.items():
            offset, rows = offset_and_rows(position)
            ends[partition] = offset
            if rows:
                before[partition, offset] = rows
        starts = {each: self._positions[each] for each in ends}
        source = open_source(self._settings.url)
        try:
            limit_s, time_column = self._stall_limit_s, self._settings.url.time
            merger = Merger(
                source, starts, ends=ends, time_column=time_column, stall_limit_s=limit_s
            )
            messages: list[Message] = []
            while not merger.is_over and not self._is_told_to_end():
                messages += merger.take(FOREVER, IDLE_S)
        finally:
            source.close()
        if self._is_told_to_end():
            return
        kept = self._without_late(messages)
        found = self._decoder.rows(kept, _partly_read(starts), before) if kept else None
        for number in range(sent):
            part: list[Batch] = []
            positions: dict[str, str] = {}
            size = self._settings.batch_size
            while found is not None and size and found.left:
                taken, of_taken = found.take(size)
                part.append(taken)
                size -= taken.size
                positions |= of_taken
            self._note(self._sent_positions if number == sent - 1 else positions, found)
            self._sent -= 1
            yield part


def _partly_read(positions: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Returns the rows that are done of messages, by partition and offset."""
    found = {each: offset_and_rows(position) for each, position in positions.items()}
    return {(each, offset): rows for each, (offset, rows) in found.items() if rows}


def empty_batch(schema: Schema) -> Batch:
    """Returns a batch without rows."""
    return Batch(
        labels=np.empty(0, np.float32),
        dense=np.empty((0, schema.num_dense), np.float32),
        keys=np.empty(0, np.uint64),
        offsets=np.zeros(1, np.int32),
        num_slots=len(schema.slots),
    )


def position_of(progress: WorkerProgress | None) -> StreamPosition | None:
    """Returns where a worker was in a stream; None: it had not begun with it."""
    # A worker without partitions has none of their positions.
    if progress is None or '"before_ms"' not in progress.position:
        return None
    return StreamPosition.from_json(progress.position, progress.partitions)


def newest_ms(workers: Mapping[int, WorkerProgress]) -> int:
    """Returns the time of the newest row that the worker furthest behind has trained on, in ms; 0: of none.

    Of those that had more to read in the newest pass; if none had, of all the newest. Raises DataError for a
    position that is none.
    """
    found = [each for each in _positions_of(workers) if each.time_ms]
    newest = max((each.epoch for each in found), default=0)
    behind = [each.time_ms for each in found if each.epoch == newest and not each.is_idle]
    return min(behind) if behind else max((each.time_ms for each in found), default=0)


def _positions_of(workers: Mapping[int, WorkerProgress]) -> list[StreamPosition]:
    return [found for each in workers.values() if (found := position_of(each)) is not None]


def without_ends(progress: Mapping[int, WorkerProgress]) -> dict[int, WorkerProgress]:
    """Returns the progress for another run, which has ends of its own."""
    return {
        worker: replace(
            each,
            partitions={k: v for k, v in each.partitions.items() if not k.startswith(END)},
        )
        for worker, each in progress.items()
    }


def dealt_again(
    progress: Mapping[int, WorkerProgress], num_workers: int
) -> dict[int, WorkerProgress]:
    """Returns the progress of other workers, to which the partitions of all are dealt."""
    positions = {name: at for each in progress.values() for name, at in each.partitions.items()}
    found = _positions_of(progress)
    latest = max(found, key=lambda each: each.epoch)
    # The oldest of the newest rows: with a later one some would be too late.
    time_ms = min(each.time_ms for each in found)
    text = replace(latest, rows=0, time_ms=time_ms, partitions={}).to_json()
    return {
        worker: WorkerProgress(
            incarnation=0,
            sequence=0,
            step=progress[worker].step if worker in progress else 0,
            position=text,
            partitions={k: v for k, v in positions.items() if owner_of(k, num_workers) == worker},
        )
        for worker in range(num_workers)
    }
