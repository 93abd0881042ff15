"""Passes: what a run trains on from one barrier of all workers to the next, and its figures over all workers.

The figures are those of progressive validation, of predictions before training. In the first pass they are of
examples that the model had not seen: what it would have done online (Blum, Kalai and Langford, "Beating the
hold-out", 1999).
"""

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any

from numpy import datetime64

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.store import ReduceOp
from ctr_ps.ps_worker.data.blocks import DataPosition, Position
from ctr_ps.ps_worker.data.dealt_files import DealtFiles
from ctr_ps.ps_worker.data.streams.stream_data import StreamPosition, position_of
from ctr_ps.ps_worker.job.datasets import TrainingData
from ctr_ps.ps_worker.run.run import Run

logger = logging.getLogger(__name__)

_DIGITS = {"auc": 4, "log_loss": 5, "base_log_loss": 5, "normalized_entropy": 4, "calibration": 3}

Positioned = Batch | tuple[Batch, Position]
"""A batch, with the position behind it where the data has an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Data that all workers train on between two barriers: an epoch of files, or a window of a stream."""

    name: str  # of its barrier
    number: int  # counted from 1, on through restarts of the run
    batches: Generator[Positioned, None, None]  # of this worker; to be closed
    # whether training ends with it: all workers call it, once, at the end of the pass
    ends: Callable[[], bool]
    # called when the store has the gradients of its batches: more of them that this worker is to train, as
    # another has left; None: there are none
    again: Callable[[], Generator[Positioned, None, None] | None] = lambda: None
    share: Callable[[Any], float | None] = lambda _: None
    before_ms: float = inf  # of a window by time: its end, in ms since 1970
    # of a window that was not the last: the number and the end of the next one
    following: Callable[[], Sequence[float]] = tuple


class ReadShare:
    """Where a worker is in a pass, for lines of progress. Any thread may ask."""

    def __init__(self, share_of: Callable[[Any], float | None]) -> None:
        """Is nowhere yet; `share_of` says how much of the data is before a position, None if unknown."""
        self._share_of = share_of
        self._last: Position | None = None

    def follow(self, batches: Iterator[Positioned]) -> Iterator[Positioned]:
        """Yields the batches, and notes the position after each."""
        for batch in batches:
            if not isinstance(batch, Batch):
                self._last = batch[1]
            yield batch

    def share(self) -> float | None:
        """Returns the share of the data that was read; None: unknown."""
        return None if self._last is None else self._share_of(self._last)


def epochs(
    data: TrainingData, run: Run, *, first: int, last: int, goes_on: bool = False
) -> Iterator[Pass]:
    """Yields the epochs `first` to `last`; the first one starts where the resumed run was in it.

    Training ends with the last one, unless it `goes_on`.

    Rows in memory are loaded and shuffled before their epoch is yielded; all workers take part in that.
    Raises ProtocolError if this process takes the place of one that had rows of other workers.
    """
    if run.is_replacement and run.num_workers > 1 and data.is_shuffled_globally:
        raise ProtocolError(
            f"worker {run.worker} cannot replace a lost process: with data.shuffle = 'global' the rows that "
            "other workers sent to it are lost; start the job again from its checkpoint. With data.shuffle "
            "= 'local' or 'none' a lost worker can be replaced"
        )
    for epoch in range(first, last + 1):
        nothing = (each for each in list[Positioned]())
        ends = partial(bool, epoch == last and not goes_on)
        found = Pass(name=f"epoch-{epoch}", number=epoch, batches=nothing, ends=ends)
        if epochs_ended(run, 0) < epoch:  # else the lost process before this one has trained on it
            data.prepare(run, epoch)
            if dealt := data.dealt(run.store, run.worker, epoch):
                found = replace(found, batches=dealt.batches(), again=partial(_again, run, dealt))
            else:
                batches, share = data.batches(epoch, _position_in(epoch, run)), data.share(epoch)
                found = replace(found, batches=batches, share=share)
        yield found


def _again(run: Run, dealt: DealtFiles) -> Generator[Positioned, None, None] | None:
    """Waits, with no file left to take, until others have finished theirs, or give one back."""
    run.communicator.let_others_begin()
    return dealt.batches() if dealt.wait() else None


def epochs_ended(run: Run, resumed: int) -> int:
    """Returns the epochs that this worker has ended: `resumed`, or more if a lost process before it did."""
    position = _earlier_position(run) if run.is_replacement else None
    return resumed if position is None else max(resumed, position.epoch - 1)


def _position_in(epoch: int, run: Run) -> DataPosition | None:
    """Returns where in an epoch a worker resumes; None: at its start."""
    position = _earlier_position(run)
    # Of another epoch: it had not begun this one.
    if isinstance(position, DataPosition) and position.epoch == epoch:
        return position
    return None


def _earlier_position(run: Run) -> DataPosition | StreamPosition | None:
    earlier = run.earlier_progress
    if earlier is None:
        return None
    if not earlier.position and earlier.step and run.is_replacement:
        raise ProtocolError(
            f"worker {run.worker} cannot replace a lost process, whose data position is unknown: rows of "
            "several readers have no order (data.reader_num); start the job again from its checkpoint"
        )
    if in_stream := position_of(earlier):
        return in_stream
    return DataPosition.from_json(earlier.position) if earlier.position else None


class Stretches:
    """Batches in their order, a number of them at a time. For one thread; a stretch's may be any."""

    def __init__(self, batches: Iterator[Positioned]) -> None:
        self._batches = batches
        self._ahead: list[Positioned] = []  # a batch that was read to find out whether there is one

    @property
    def has_more(self) -> bool:
        """Whether there is another batch; reads it."""
        if not self._ahead:
            self._ahead = list(islice(self._batches, 1))
        return bool(self._ahead)

    def take(self, number: int) -> Iterator[Positioned]:
        """Returns the next `number` batches, or those left; to be gone through before the next call."""
        ahead, self._ahead = (self._ahead, []) if number > 0 else ([], self._ahead)
        return chain(ahead, islice(self._batches, max(number - len(ahead), 0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFigures:
    """Figures of one pass, of all workers."""

    epoch: int  # its number, from 1
    examples: int  # without those of a lost process before, or of the run that this one resumes
    auc: float  # nan with one class only
    log_loss: float  # mean
    base_log_loss: float  # of predicting its click rate for each example; nan with one class only
    normalized_entropy: float  # log loss over that of the click rate; nan with one class only
    calibration: float  # predicted clicks over actual clicks; nan without clicks
    train_seconds: float  # waiting for the slowest included, without validations
    examples_per_s: float  # in these seconds
    until: str | None = None  # time of messages at its end, ISO, UTC; None: not of a window by time


def end_pass(run: Run, each: Pass) -> ClickMetrics:
    """Waits for all workers at the end of a pass; returns the metrics of all of them.

    The store has the gradients of all then. Where the run is repeating barriers, the figures are of no use:
    servers remember that the barrier was passed, and not its many numbers.
    """
    own = run.progress.of_pass()
    bounds = run.all_reduce(own.bounds(), ReduceOp.MAX, f"{each.name}-bounds")
    numbers = run.all_reduce(own.to_vector(bounds), ReduceOp.SUM, each.name, remember=False)
    return ClickMetrics.from_vector(numbers, bounds)


def figures_of_pass(run: Run, each: Pass, metrics: ClickMetrics, seconds: float) -> PassFigures:
    """Returns the figures of a pass, logs them, and warns of a log loss above that of the base rate."""
    figures = PassFigures(
        epoch=each.number,
        examples=metrics.examples,
        auc=metrics.auc(),
        log_loss=metrics.log_loss(),
        base_log_loss=metrics.base_log_loss(),
        normalized_entropy=metrics.normalized_entropy(),
        calibration=metrics.calibration(),
        train_seconds=seconds,
        examples_per_s=metrics.examples / seconds if seconds > 0 else 0.0,
        until=None if each.before_ms == inf else str(datetime64(int(each.before_ms // 1000), "s")),
    )
    if run.is_first and figures.examples:
        text, speed = "pass epoch=%d examples=%d examples/s=%.0f %s%s", figures.examples_per_s
        until = f" until={figures.until}" if figures.until else ""
        logger.info(text, figures.epoch, figures.examples, speed, shown(metrics), until)
        run.progress.warn_of_base_rate(metrics, f"the pass of epoch {each.number}")
    return figures


def quality(metrics: ClickMetrics) -> dict[str, float]:
    """Returns the figures of a pass by name."""
    return {name: getattr(metrics, name)() for name in _DIGITS}


def shown(metrics: ClickMetrics) -> str:
    """Returns these figures for a line of the log."""
    return " ".join(f"{key}={each:.{_DIGITS[key]}f}" for key, each in quality(metrics).items())
