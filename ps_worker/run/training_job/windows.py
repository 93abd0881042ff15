"""Windows: the passes over a stream, which all workers end at the same time of its messages.

    messages    10:01 10:04 10:09 | 10:10 10:12 ...        pass_every = "10 min"
    worker 0    trains ...        | barrier, shrink, validate, save | trains ...
    worker 1    has no more       | barrier                         | ...

A worker without messages comes to the barrier once it is that time, so an idle partition holds nobody back.
The end of a window is agreed on at its start: it is that of the window with the oldest row of all workers.
"""

import logging
import math
from collections.abc import Generator, Iterator
from functools import partial
from operator import sub

import numpy as np

from ctr_ps.protos.store import ReduceOp
from ctr_ps.ps_worker.data.streams.stream_data import FOREVER, StreamData, StreamPosition
from ctr_ps.ps_worker.job.streams import PassLength
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.termination import EXIT_CODE
from ctr_ps.ps_worker.run.training_job.passes import Pass, Positioned

logger = logging.getLogger(__name__)


class Windows:
    """The windows of one worker. For one thread."""

    def __init__(
        self,
        data: StreamData,
        run: Run,
        length: PassLength,
        start: StreamPosition | None,
        first: tuple[int, float] = (0, 0.0),
    ) -> None:
        """Reads nothing yet; `start` is where a process before this one was, None: there was none.

        `first` are the number and the end of a window on which all have agreed.
        """
        self._data = data
        self._run = run
        self._length = length
        self._start = start
        self._agreed = first  # number of a window, and its end
        # End of the window before; ends only grow.
        self._last_ms = 0.0 if start is None or start.before_ms is None else start.before_ms
        self._last_ms = first[1] if 0 < first[1] < FOREVER else self._last_ms

    def windows(self, first: int) -> Iterator[Pass]:
        """Yields the windows from number `first` on, up to the end of the stream."""
        number = first
        while (before_ms := self._end_of(number)) is not None:
            yield Pass(
                name=f"window-{number}",
                number=number,
                batches=self._batches(number, before_ms),
                ends=partial(self._is_last, number),
                before_ms=before_ms,
                following=lambda: self._agreed,
            )
            number += 1

    def _is_last(self, number: int) -> bool:
        return self._end_of(number + 1) is None

    def _end_of(self, number: int) -> float | None:
        """Returns the time before which a window ends, in milliseconds; None: the stream has ended.

        All workers call it, once for each number. Raises SystemExit if this one is told to end meanwhile.
        """
        if self._agreed[0] != number:
            start = self._start
            before_ms = FOREVER
            if start is not None and start.epoch == number and start.before_ms is not None:
                before_ms = start.before_ms
            last_ms = self._last_ms if before_ms == FOREVER else 0.0
            own_ms = self._data.next_ms()
            if math.isnan(own_ms):
                self._run.end_early()
                raise SystemExit(EXIT_CODE)
            own = np.array([own_ms, before_ms, -last_ms])
            found = self._run.all_reduce(own, ReduceOp.MIN, f"window-{number}-start").tolist()
            next_ms, before_ms, last_ms = found[0], found[1], -found[2]
            if before_ms == FOREVER:
                before_ms = self._length.end_after(max(next_ms, last_ms))
            self._last_ms = before_ms if before_ms < FOREVER else 0.0
            self._agreed = number, before_ms if next_ms < FOREVER else np.nan
        return None if np.isnan(self._agreed[1]) else self._agreed[1]

    def _batches(self, number: int, before_ms: float) -> Generator[Positioned, None, None]:
        start, rows = self._start, 0
        if start is not None and start.epoch == number:
            rows = start.rows
        # A lost process before this one has come to the end of the window.
        if self._run.is_repeating:
            return
        max_rows = -(-self._length.rows // self._run.num_workers)
        before = self._data.late()
        yield from self._data.batches(number, before_ms=before_ms, max_rows=max_rows, rows=rows)
        late, left_out = map(sub, self._data.late(), before)
        if late:
            longest_s = self._data.latest_ms / 1000
            logger.info("late messages=%d left_out=%d longest_s=%.1f", late, left_out, longest_s)
