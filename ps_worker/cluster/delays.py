"""Things that are done later, in the order of their times."""

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Due:
    time: float
    number: int  # those of one time keep their order
    do: Callable[[], None] = field(compare=False)


class Delays:
    """Does things later, in a thread that lives as long as there are some. Thread-safe."""

    def __init__(self, name: str) -> None:
        """Has nothing to do; `name` is that of the thread."""
        self._name = name
        self._due: list[_Due] = []
        self._changed = threading.Condition()
        self._count = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_due(self) -> int:
        """Things that are not done yet."""
        return len(self._due)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Calls `do`, which raises nothing, after this time."""
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, _Due(time.monotonic() + seconds, self._count, do))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            else:
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._due and not self._is_closed:
                    if (left_s := self._due[0].time - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left_s)
                if not self._due:
                    self._thread = None
                    return
                due = heapq.heappop(self._due)
            due.do()

    def close(self) -> None:
        """Does at once what is left, now and from now on, and waits for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
