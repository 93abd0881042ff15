"""Files of a pass that a worker takes from the queue of the servers, one by one.

    queue --take_file--> file, begun where pushes of its worker before ended --> batches, each of one file
                                                          --none is free--> wait: another may give one back

Positions are told with pushes, by file, as those in partitions of a stream.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.store import FILE, Store, TakenFile, WorkerProgress
from ctr_ps.ps_worker.data.blocks import DataPosition, batches
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.reading import Reading

Place = tuple[int, int]
"""Where in a file: `offset` and `skip` of a `DataPosition`."""

END: Place = 10**20 - 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePosition:
    """A position in one of the files of a pass; it tells nothing of the others."""

    epoch: int  # number of the pass, from 1
    file: int  # number in the order of the pass
    place: Place

    @property
    def partitions(self) -> Mapping[str, str]:
        """The place, by file."""
        offset, skip = self.place
        return {f"{FILE}{self.file}": f"{self.epoch:010} {offset:020} {skip:010}"}

    def to_json(self) -> str:
        """Returns the pass as the position at its start."""
        return DataPosition(epoch=self.epoch).to_json()


def places_of(progress: Mapping[int, WorkerProgress], epoch: int) -> dict[int, Place]:
    """Returns how far files of a pass are trained, by their numbers; others are not begun."""
    found: dict[int, Place] = {}
    for each in progress.values():
        for file, text in each.partitions.items():
            of, offset, skip = map(int, text.split())
            if of == epoch:
                number = int(file.removeprefix(FILE))
                found[number] = max((offset, skip), found.get(number, (0, 0)))
    return found


class DealtFiles:
    """The files of a pass that one worker trains. For one thread at a time."""

    def __init__(self, store: Store, worker: int, dataset: QueueDataset, epoch: int) -> None:
        """Takes none yet."""
        self._store, self._worker, self._epoch = store, worker, epoch
        self._reading: Reading = dataset.reading_of(epoch)
        self._batch_size = dataset.batch_size
        self._received = 0
        self._places: dict[int, Place] | None = None

    def batches(self) -> Generator[tuple[Batch, FilePosition], None, None]:
        """Takes files, and yields their batches with the positions after them, until no file is free.

        The last batch of a file may be smaller. Raises as `Reading.blocks`.
        """
        while (taken := self._take_file(waits=False)).file is not None:
            self._received += 1
            if taken.was_taken or self._places is None:  # then of a run that this one resumes
                self._places = places_of(self._store.status().progress, self._epoch)
            yield from self._rest_of(taken.file, self._places.get(taken.file))

    def _rest_of(
        self, file: int, begun: Place | None
    ) -> Generator[tuple[Batch, FilePosition], None, None]:
        if begun == END:
            return
        offset, skip = (None, 0) if begun is None else begun
        start = DataPosition(epoch=self._epoch, split=file, offset=offset, skip=skip)
        blocks = self._reading.blocks_of(file, offset)
        last: tuple[Batch, Place] | None = None  # read on, to know the last batch of the file
        for batch, position in batches(blocks, self._batch_size, start):
            if last is not None:
                yield last[0], self._position(file, last[1])
            self._reading.rows += batch.size
            last = batch, (position.offset or 0, position.skip)
        if last is not None:
            yield last[0], self._position(file, END)

    def _position(self, file: int, place: Place) -> FilePosition:
        return FilePosition(epoch=self._epoch, file=file, place=place)

    def wait(self) -> bool:
        """Waits until a file is free, and returns True, or until the pass is over.

        The store has all gradients of the batches before. Raises WaitTimeoutError if others do not finish.
        """
        is_over = self._take_file(waits=True).is_over
        if is_over:
            self._reading.bad_rows.report(self._reading.rows)
        return not is_over

    def _take_file(self, *, waits: bool) -> TakenFile:
        return self._store.take_file(
            self._worker,
            pass_number=self._epoch,
            num_files=self._reading.num_splits,
            received=self._received,
            waits=waits,
        ).result()
