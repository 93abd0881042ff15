"""Iterators that run in threads of their own, as one iterator."""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, TypeVar

from protos.errors import DataError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_LIMIT_S = 600.0
JOIN_LIMIT_S = 30.0


def merged(
    sources: Sequence[Iterator[T]],
    *,
    capacity: int,
    stall_limit_s: float = STALL_LIMIT_S,
    join_limit_s: float = JOIN_LIMIT_S,
) -> Generator[T, None, None]:
    """Yields what several iterators yield, in the order in which it comes.

    Leaving the iteration early ends the threads.

    Args:
        sources: Each is gone through in a thread of its own.
        capacity: The most items that wait to be yielded; who has one more waits.
        stall_limit_s: The longest without an item from any source.
        join_limit_s: The longest that leaving waits for sources that are stuck; their threads are left
            behind, each with a warning.

    Raises:
        BaseException: The first error of any source.
        DataError: If the sources give nothing for longer than the limit, and do not end.
    """
    queue = _Queue[T](len(sources), capacity, stall_limit_s)
    threads = [
        threading.Thread(target=queue.fill, args=(source,), name=f"reader-{number}", daemon=True)
        for number, source in enumerate(sources)
    ]
    try:
        for thread in threads:
            thread.start()
        while (item := queue.take()) is not None:
            yield item[0]
    finally:
        queue.close()
        deadline = time.monotonic() + join_limit_s
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("a reader is stuck and is left behind: thread=%s", thread.name)


class _Queue(Generic[T]):
    """What waits to be taken. Thread-safe."""

    def __init__(self, num_sources: int, capacity: int, stall_limit_s: float) -> None:
        self._changed = threading.Condition()
        self._items: deque[tuple[T]] = deque()
        self._num_running = num_sources
        self._capacity = capacity
        self._stall_limit_s = stall_limit_s
        self._error: BaseException | None = None
        self._is_closed = False

    def fill(self, source: Iterator[T]) -> None:
        """Puts in all that a source yields, until the queue is closed."""
        try:
            for item in source:
                if not self._put(item):
                    break
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            if isinstance(source, Generator):
                source.close()
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def take(self) -> tuple[T] | None:
        """Returns an item as a tuple of one; None if all sources have ended."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._items or self._error is not None or not self._num_running,
                self._stall_limit_s,
            )
            if self._error is not None:
                raise self._error
            if not is_there:
                raise DataError(
                    f"no reader has read a row for {self._stall_limit_s:g} s: is the storage reachable?"
                )
            if not self._items:
                return None
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Lets the sources end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Waits for room; returns False if the queue was closed, and nobody will take the item."""
        with self._changed:
            # Whoever iterates may train or rest as long as they like, and closes when they leave.
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if not self._is_closed:
                self._items.append((item,))
                self._changed.notify_all()
            return not self._is_closed
