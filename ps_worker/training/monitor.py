"""A user's fetch handler, called every few seconds while a worker trains.

    training thread(s)   batch, batch, batch, ...
    fetch thread         ... handler(figures) ... handler(figures) ...           then once more at the end

Training never waits for the handler. An error in it ends training at the next batch, with its traceback.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Staleness
from ctr_ps.ps_worker.training.evaluation.groups import ratio
from ctr_ps.ps_worker.training.meter import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Figures of one worker's pass so far; each example was predicted before it was trained on."""

    examples: int  # trained examples
    examples_per_s: float  # since the handler's last call
    loss: float  # mean over the examples; nan before the first
    auc: float  # over the same; nan without both classes
    accuracy: float  # share of the same that was predicted right, by a probability of 0.5
    staleness: Staleness  # staleness of all workers' batches since the servers started

    def __str__(self) -> str:
        return (
            f"examples={self.examples} examples/s={self.examples_per_s:.0f} loss={self.loss:.5f} "
            f"auc={self.auc:.4f} accuracy={self.accuracy:.4f} staleness={self.staleness.mean:.1f}"
        )


FetchHandler = Callable[[Fetched], object]


class Fetching:
    """Calls a handler during one pass; leaving the `with` block without an error calls it once more."""

    def __init__(
        self,
        handler: FetchHandler,
        *,
        period_s: float,
        progress: Progress,
        staleness: Callable[[], Staleness],
    ) -> None:
        """Prepares calls every `period_s` seconds, or as often as a slower handler returns.

        Raises UsageError if `period_s` is not above 0.
        """
        if not period_s > 0:
            raise UsageError(f"fetch_period is {period_s!r}, expected seconds above 0")
        self._handler = handler
        self._period_s = period_s
        self._progress = progress
        self._staleness = staleness
        self._start = self._last = progress.counts()
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._call_forever, name="fetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over.set()
        if kind is None:  # else training has failed, which must not wait for the handler
            self._thread.join()
            self._require_health()
            self._handler(self._fetched())

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches until the handler fails, then raises its error."""
        for batch in batches:
            self._require_health()
            yield batch

    def _require_health(self) -> None:
        if self._error is not None:
            raise self._error

    def _call_forever(self) -> None:
        try:
            while not self._is_over.wait(self._period_s):
                self._handler(self._fetched())
        except BaseException as error:
            self._error = error

    def _fetched(self) -> Fetched:
        start, last, now = self._start, self._last, self._progress.counts()
        self._last = now
        seconds = now.at_s - last.at_s
        metrics = now.metrics.without(start.metrics)
        return Fetched(
            examples=now.examples - start.examples,
            examples_per_s=(now.examples - last.examples) / seconds if seconds > 0 else 0.0,
            loss=ratio(now.loss - start.loss, now.weight - start.weight),
            auc=metrics.auc(),
            accuracy=metrics.accuracy(),
            staleness=self._staleness(),
        )
