"""The messages of several partitions in one order: that of their times, as far as a partition has any.

    clicks/0   10:00:01  10:00:04  10:00:05          a partition that has a message that was not polled yet
    clicks/1   10:00:02  10:00:03  | (at its end)    is waited for, one at its end is not
    merged     10:00:01 10:00:02 10:00:03 10:00:04 10:00:05

So the order of messages that are there depends on the stream alone, and not on when they come; as in Kafka
Streams.
"""

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.streams.source import (
    Message,
    StreamSource,
    event_ms,
    has_reached,
    offset_and_rows,
)

logger = logging.getLogger(__name__)

MOST_QUEUED = 2000
"""Messages of a partition that wait here; no more are polled."""

MOST_QUEUED_BYTES = 16 << 20
"""Bytes of all messages that wait here, beside one of each partition."""

MOST_MERGED = 1000
MOST_MERGED_BYTES = 4 << 20
FUTURE_MS = 60_000
"""How far the time of a message may be ahead of this machine's clock: else it is that of the one before."""

END_SLACK_MS = 600_000
"""How long after the time to end at earlier messages are looked for, in the times of messages."""
_POLL_S = 0.2


class Merger:
    """Merges the partitions of one worker. Not thread-safe."""

    def __init__(
        self,
        source: StreamSource,
        positions: Mapping[str, str],  # of the partitions to read
        *,
        ends: Mapping[str, str] | None = None,  # last offsets to read; None: there is no end
        end_ms: int | None = None,  # messages from this time on are not read; None: no such time
        time_column: str = "",  # column of JSON with the time of a message; "": its own
        most_merged: int = MOST_MERGED,  # messages that `take` returns
        stall_limit_s: float,  # the longest wait for a partition that is not at its end
        is_told_to_end: Callable[[], bool] = lambda: False,  # then nothing is returned any more
    ) -> None:
        self._source = source
        self._ends = ends
        self._end_ms = end_ms
        self._time = time_column
        self._has_told = False  # of a message without a time there
        self._most_merged = most_merged
        self._bytes = 0
        self._last_ms: dict[str, int] = {}  # time of each partition's last message
        self.num_future = 0  # messages whose times were too far ahead
        self._stall_limit_s = stall_limit_s
        self._is_told_to_end = is_told_to_end
        self._queues: dict[str, deque[Message]] = {}
        self._ranks: dict[str, int] = {}
        self._ended: set[str] = set()
        self._heads: list[tuple[int, int, str]] = []
        self.add(positions)

    def add(self, positions: Mapping[str, str]) -> None:
        """Reads more partitions, from their positions on."""
        for partition in positions:
            self._ranks[partition] = len(self._ranks)
            self._queues[partition] = deque()
        self._source.seek(positions)
        for partition, position in positions.items():
            offset, rows = offset_and_rows(position)
            if (
                self._ends is not None
                and not rows
                and has_reached(self._source, offset, self._ends[partition])
            ):
                self._ended.add(partition)

    @property
    def is_over(self) -> bool:
        """Whether all partitions are at the end to read to."""
        has_end = self._ends is not None or self._end_ms is not None
        return has_end and not self._heads and len(self._ended) == len(self._queues)

    def next_ms(self) -> float | None:
        """Returns the time of the next message; None: there is none now; nan: told to end before."""
        if not self._fill(0.0):
            return math.nan
        return self._heads[0][0] if self._heads else None

    def take(self, before_ms: float, timeout_s: float) -> list[Message]:
        """Returns the next messages that are of a time before one; none if `timeout_s` brings no new one.

        Raises DataError if a partition has messages, but its server sends none.
        """
        found: list[Message] = []
        if not self._fill(timeout_s):
            return found
        size = 0
        while self._heads and len(found) < self._most_merged and self._heads[0][0] < before_ms:
            _, rank, partition = self._heads[0]
            queue = self._queues[partition]
            message = queue.popleft()
            found.append(message)
            size += len(message.value)
            self._bytes -= len(message.value)
            if self._ends is not None and has_reached(
                self._source, message.offset, self._ends[partition]
            ):
                self._ended.add(partition)
                self._bytes -= sum(len(each.value) for each in queue)
                queue.clear()
            if queue:
                heapq.heapreplace(self._heads, (queue[0].time_ms, rank, partition))
            else:
                heapq.heappop(self._heads)
                if partition not in self._ended and partition not in self._source.at_end:
                    break
            if size >= MOST_MERGED_BYTES:
                break
        return found

    def _fill(self, timeout_s: float) -> bool:
        """Polls until each partition has a message, or is at its end; then waits for the first one.

        False: this process is told to end before.
        """
        start = time.monotonic()
        wait_s = 0.0
        if not self._queues:
            time.sleep(timeout_s)  # a partition may be added
        while empty := [
            each for each, queue in self._queues.items() if not queue and each not in self._ended
        ]:
            self._poll(wait_s)
            passed = time.monotonic() - start
            late = [
                each
                for each in empty
                if not self._queues[each]
                and each not in self._ended
                and each not in self._source.at_end
            ]
            if not late and (self._heads or passed >= timeout_s):
                return True
            if self._is_told_to_end():
                return False
            if late and passed >= self._stall_limit_s:
                raise DataError(
                    f"partition {late[0]} has messages, but none came for {self._stall_limit_s:g} s"
                )
            wait_s = _POLL_S if late else min(_POLL_S, timeout_s - passed)
        return True

    def _poll(self, timeout_s: float) -> None:
        wanted = [
            each
            for each, queue in self._queues.items()
            if each not in self._ended
            and (not queue or (len(queue) < MOST_QUEUED and self._bytes < MOST_QUEUED_BYTES))
        ]
        for message in self._source.poll(wanted, timeout_s):
            partition = message.partition
            if partition in self._ended:
                continue
            if self._time and (found := event_ms(message.value, self._time)) is not None:
                message = replace(message, time_ms=found)  # noqa: PLW2901
            elif self._time and not self._has_told:
                self._has_told = True
                logger.warning(
                    "a message has no time in column %s, and keeps its own: partition=%s offset=%s",
                    *(self._time, partition, message.offset),
                )
            if message.time_ms > time.time() * 1000 + FUTURE_MS:
                self.num_future += 1
                if self.num_future == 1:
                    logger.warning(
                        "a message has a time in the future, and takes that of the one before: partition=%s "
                        "offset=%s time_ms=%d",
                        partition,
                        message.offset,
                        message.time_ms,
                    )
                message = replace(message, time_ms=self._last_ms.get(partition, 0))  # noqa: PLW2901
            self._last_ms[partition] = message.time_ms
            if self._end_ms is not None and message.time_ms >= self._end_ms:
                if message.time_ms >= self._end_ms + END_SLACK_MS:
                    self._ended.add(partition)
                continue
            queue = self._queues[partition]
            if not queue:
                heapq.heappush(self._heads, (message.time_ms, self._ranks[partition], partition))
            queue.append(message)
            self._bytes += len(message.value)
        # What comes after the last message, as the mark of a transaction, is never delivered.
        if self._ends is not None or (
            self._end_ms is not None and time.time() * 1000 >= self._end_ms
        ):
            self._ended |= self._source.at_end & {*wanted}
