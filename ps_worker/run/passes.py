"""Passes: what a run trains on from one barrier of all workers to the next."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

from ctr_model.batch import Batch
from ps_worker.data.blocks.position import DataPosition
from ps_worker.job.datasets import TrainingData
from ps_worker.run.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Data that all workers train on between two barriers: an epoch of files, or a window of a stream.

    Attributes:
        name: Of its barrier.
        number: Counted from 1, on through restarts of the run.
        batches: Of this worker, with positions where its data has an order; to be closed.
        is_last: Training ends with it.
    """

    name: str
    number: int
    batches: Generator[Batch | tuple[Batch, DataPosition], None, None]
    is_last: bool


def epochs(data: TrainingData, run: Run, *, first: int, last: int) -> Iterator[Pass]:
    """Yields the epochs `first` to `last`; the first one starts where the resumed run was in it.

    Rows in memory are loaded and shuffled before their epoch is yielded; all workers take part in that.
    """
    for epoch in range(first, last + 1):
        data.prepare(run, epoch)
        yield Pass(
            name=f"epoch-{epoch}",
            number=epoch,
            batches=data.batches(epoch, _position_in(epoch, run)),
            is_last=epoch == last,
        )


def _position_in(epoch: int, run: Run) -> DataPosition | None:
    """Returns where in an epoch a worker resumes; None: at its start."""
    earlier = run.earlier_progress
    if earlier is None or not earlier.position:
        return None
    position = DataPosition.from_json(earlier.position)
    return position if position.epoch == epoch else None  # else it had not begun this one
