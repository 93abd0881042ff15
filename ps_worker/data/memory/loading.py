"""Loading of files into memory by reader threads, with progress logs."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.blocks.reader_threads import merged
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import Format
from ctr_ps.ps_worker.data.memory.rows import RowsInMemory
from ctr_ps.ps_worker.data.reading import Reading

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0

_QUEUED_BLOCKS = 2  # per reader, waiting to be stored


def load_rows(
    splits: Sequence[FileSplit],
    schema: Schema,
    *,
    format: Format | None,
    bad_rows: BadRows,
    reader_num: int,
    negatives: NegativeSampling | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RowsInMemory:
    """Returns the rows of all splits, possibly none; the index of a split is the source of its rows.

    `format`, `negatives` and errors are those of `FileDataset`; `clock` is in seconds. Raises DataError if
    whole files have no rows.
    """
    rows = RowsInMemory(schema.num_dense, len(schema.slots))
    reading = Reading(splits, schema, format, bad_rows, negatives=negatives)
    progress = _Progress(reading, rows, clock)
    readers = [reading.blocks() for _ in range(min(reader_num, len(splits)))]
    with closing(merged(readers, capacity=_QUEUED_BLOCKS * reader_num)) as blocks:
        for source, block in blocks:
            try:
                rows.extend(block.rows, source)
            except DataError as error:
                raise DataError(f"{splits[source].path}: {error}") from error
            progress.show_if_due()
    reading.end(rows.size)
    progress.show("loaded into memory")
    return rows


class _Progress:
    def __init__(self, reading: Reading, rows: RowsInMemory, clock: Callable[[], float]) -> None:
        self._reading = reading
        self._rows = rows
        self._clock = clock
        self._start = self._shown = clock()

    def show_if_due(self) -> None:
        if self._clock() - self._shown >= PROGRESS_EVERY_S:
            self.show("loading into memory")

    def show(self, stage: str) -> None:
        self._shown = self._clock()
        seconds = self._shown - self._start
        logger.info(
            "%s: files=%d/%d rows=%d MB=%d rows/s=%d",
            stage,
            self._reading.num_done,
            self._reading.num_splits,
            self._rows.size,
            self._rows.size_bytes // 10**6,
            self._rows.size / seconds if seconds else 0,
        )
