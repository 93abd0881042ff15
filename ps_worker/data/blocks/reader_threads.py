"""Reader threads: several iterators, each in a thread of its own, merged into one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, TypeVar

from ctr_ps.protos.errors import DataError

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_LIMIT_S = 600.0
JOIN_LIMIT_S = 30.0


def merged(
    sources: Sequence[Iterator[T]],  # each is consumed by its own thread
    *,
    capacity: int,  # size of the queue, at which sources wait
    stall_limit_s: float = STALL_LIMIT_S,  # the longest wait for an item of any source
    # the longest wait for the threads at the end; a stuck one is abandoned with a warning
    join_limit_s: float = JOIN_LIMIT_S,
) -> Generator[T, None, None]:
    """Yields the items of several iterators in order of arrival.

    Closing the generator ends the threads.

    Raises:
        BaseException: The first error of any source.
        DataError: If no source yields an item or ends for longer than `stall_limit_s`.
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
                logger.warning("abandoned a stuck reader: thread=%s", thread.name)


class _Queue(Generic[T]):
    """A bounded queue with several sources. Thread-safe."""

    def __init__(self, num_sources: int, capacity: int, stall_limit_s: float) -> None:
        self._changed = threading.Condition()
        self._items: deque[tuple[T]] = deque()
        self._num_running = num_sources
        self._capacity = capacity
        self._stall_limit_s = stall_limit_s
        self._error: BaseException | None = None
        self._is_closed = False

    def fill(self, source: Iterator[T]) -> None:
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
        """Returns an item as a 1-tuple; None once all sources have ended."""
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
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            # No time limit: the consumer may train for any time between two items.
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if not self._is_closed:
                self._items.append((item,))
                self._changed.notify_all()
            return not self._is_closed
