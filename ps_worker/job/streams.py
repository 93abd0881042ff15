"""The stream of a job: how it is read, and what ends a pass over it."""

import math
import re
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import WorkerProgress
from ctr_ps.ps_worker.data.bad_rows import BadRows, silent_bad_rows
from ctr_ps.ps_worker.data.columnar.record_batches import BLOCK_ROWS
from ctr_ps.ps_worker.data.streams.dead_letters import DeadLetters
from ctr_ps.ps_worker.data.streams.decoding import MessageDecoder
from ctr_ps.ps_worker.data.streams.source import duration_ms, stream_url
from ctr_ps.ps_worker.data.streams.stream_data import StreamData, StreamSettings, position_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.datasets import format_of_job, negatives_of

_ROWS = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(M )?rows")


@dataclass(frozen=True, slots=True)
class PassLength:
    """The length of a pass over a stream, in time or rows of all workers; both 0: it has one pass."""

    milliseconds: float = 0.0
    rows: int = 0

    def end_after(self, time_ms: float) -> float:
        """Returns the end of the pass that a time is in; passes end at multiples of their length."""
        if not self.milliseconds:
            return math.inf
        return (time_ms // self.milliseconds + 1) * self.milliseconds


def pass_length(text: str) -> PassLength:
    """Returns what data.pass_every says, as "10 min" or "1 M rows"; raises UsageError."""
    if not text:
        return PassLength()
    if found := _ROWS.fullmatch(text):
        length = PassLength(rows=int(float(found[1]) * (1_000_000 if found[2] else 1)))
    else:
        length = PassLength(milliseconds=duration_ms(text))
    if length == PassLength():
        raise UsageError(f"{text!r} is no length of a pass, expected more than 0")
    return length


class TrainingStream:
    """The stream of a job, as one worker reads it."""

    def __init__(self, job: Job, schema: Schema, worker: int, num_workers: int) -> None:
        """Opens nothing. Raises JobError if the stream, its format or the length of passes are wrong."""
        self._job, self._schema = job, schema
        with job.errors("data.stream", UsageError):
            url = stream_url(job.data.stream)
        if math.isfinite(url.late_ms) and job.strategy.is_sync and num_workers > 1:
            raise job.error(
                "data.stream",
                "the option late leaves out messages by the order in which they came, which a step that is "
                'repeated may not see again: remove it, or use another mode than "sync"',
            )
        with job.errors("data.pass_every", UsageError):
            self.length = pass_length(job.data.pass_every)
        self._settings = StreamSettings(
            url=url,
            schema=schema,
            batch_size=job.train.batch_size,
            thread_num=job.train.thread_num,
            worker=worker,
            num_workers=num_workers,
        )
        self._bad_rows = BadRows(job.data.bad_row_limit)
        self._decoder(self._bad_rows)

    @property
    def name(self) -> str:
        """The URL without options."""
        return str(self._settings.url)

    @property
    def bad_rows(self) -> int:
        """Malformed rows so far."""
        return self._bad_rows.total

    def open(
        self,
        progress: WorkerProgress | None,
        on_idle: Callable[[], bool] = lambda: False,
        is_told_to_end: Callable[[], bool] = lambda: False,
        keeps_ends: bool = False,
        *,
        is_resumed: bool = False,
    ) -> StreamData:
        """Opens the stream where this worker was in it; None: at its start. Raises DataError.

        Other arguments are those of `StreamData`.
        """
        before = progress or WorkerProgress(incarnation=0, sequence=0, step=0, position="")
        return StreamData(
            self._settings,
            self._decoder(self._bad_rows),
            positions=before.partitions,
            # In other modes batches that some servers have are trained again, as those of files.
            sent=before.sent if self._job.strategy.is_sync else 0,
            sent_positions=before.sent_partitions,
            time_ms=position.time_ms if (position := position_of(progress)) else 0,
            on_idle=on_idle,
            is_told_to_end=is_told_to_end,
            is_resumed=is_resumed,
            keeps_ends=keeps_ends,
        )

    def head(self) -> Generator[Batch, None, None]:
        """Yields the first rows of this worker's partitions, or as many as there are now. Raises DataError.

        As many as one block of a file has, so that a model starts alike from both.
        """
        with closing(
            StreamData(self._settings, self._decoder(silent_bad_rows()), positions={})
        ) as data:
            yield from data.head(BLOCK_ROWS)

    def _decoder(self, bad_rows: BadRows) -> MessageDecoder:
        job, url = self._job, self._settings.url
        lost = Path(job.run.dir) / f"dead_letters-{self._settings.worker}.jsonl"
        is_kept = job.run.dir and bad_rows is self._bad_rows
        with job.errors("data.format", UsageError):
            return MessageDecoder(
                str(url),
                self._schema,
                format_of_job(job) or (None if url.kind == "folder" else "json"),
                bad_rows,
                columns=job.data.columns,
                negatives=negatives_of(job),
                on_lost=DeadLetters(lost) if is_kept else lambda _: None,
                are_files=url.kind == "folder",
            )
