"""The data of a job: the format of its files, and the batches of an epoch.

streamed    files --> batches, read again in each epoch
in memory   files --load--> rows --shuffle--> batches, shuffled before each epoch

An epoch's batches depend on the job, the files and the epoch's number alone, so that a run can resume within
an epoch; but with several readers of streamed files they have no order.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema, SchemaError
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.protos.store import Store
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.dealt_files import DealtFiles
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import FileStamp
from ctr_ps.ps_worker.data.formats import (
    Format,
    has_named_columns,
    require_format,
    values_of_files,
    values_of_messages,
)
from ctr_ps.ps_worker.data.global_shuffle import HasPeers
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.streams.source import stream_url
from ctr_ps.ps_worker.data.text.multislot import MultiSlotReader
from ctr_ps.ps_worker.data.user_code.pipe import piped
from ctr_ps.ps_worker.job import Job


def format_of_job(job: Job) -> Format | None:
    """Returns the format of a job's files, or None: their names decide; UsageError if it is unknown."""
    data = job.data
    if data.pipe_command:
        return piped(data.pipe_command, columns=data.columns or None, values=data.values)
    if data.format == "multislot":
        return partial(MultiSlotReader, columns=data.columns or None, values=data.values)
    if data.format:
        require_format(data.format)
    return data.format or None


def values_of_job(job: Job, schema: Schema, files: Sequence[str]) -> SlotValues:
    """Returns the kind of slot values in files of a job, and in messages of its stream."""
    format = format_of_job(job)
    found = values_of_files(files, schema, format)
    if job.data.stream and not callable(format):
        found.merge(values_of_messages(schema, format or "json"))
    return found


def streamed(
    job: Job,
    schema: Schema,
    *,
    format: Format | None = None,  # None: the job's
    bad_row_limit: int | None = None,  # None: the job's
    is_for_training: bool = False,  # else rows keep their order
) -> QueueDataset:
    """Returns a dataset without files."""
    data = job.data
    return QueueDataset(
        schema,
        job.train.batch_size,
        format=format or format_of_job(job),
        bad_row_limit=data.bad_row_limit if bad_row_limit is None else bad_row_limit,
        reader_num=data.reader_num if is_for_training else 1,
        shuffle_files=data.shuffle_files and is_for_training,
        seed=job.train.seed,
        negatives=negatives_of(job) if is_for_training else None,
    )


def evaluated(
    job: Job,
    schema: Schema,
    files: Sequence[str],
    stamps: Mapping[str, FileStamp | None] = MappingProxyType({}),
) -> QueueDataset:
    """Returns the rows of files in order, with the column of `valid.group_by` if that is no slot.

    `stamps` are those of the files, if listed before. Raises JobError if a file's format has no other named
    columns.
    """
    dataset = streamed(job, _with_group(job, schema, files) if job.valid.group_by else schema)
    dataset.set_filelist([FileSplit(path, stamp=stamps.get(path)) for path in files])
    return dataset


def _with_group(job: Job, schema: Schema, files: Sequence[str]) -> Schema:
    """Returns the schema with the column of `valid.group_by`, unless it is a slot."""
    try:
        schema.slot_index(job.valid.group_by)
    except SchemaError as error:
        for path in files:
            if not has_named_columns(path, format_of_job(job)):
                raise job.error(
                    "valid.group_by",
                    f"{error} Other columns than the slots are read only from CSV, Parquet and ORC, but "
                    f"{path} has none of these formats",
                ) from error
        return replace(schema, group=job.valid.group_by)
    return schema


def negatives_of(job: Job) -> NegativeSampling | None:
    """Returns the choice of rows without a click; None: all are kept."""
    data = job.data
    if data.negative_rate == 1:
        return None
    return NegativeSampling(
        data.negative_rate, job.train.seed, is_weighted=data.negative_correction == "weight"
    )


class TrainingData:
    """The training data of one worker."""

    def __init__(
        self,
        job: Job,
        schema: Schema,
        parts: Sequence[FileSplit],
        format: Format | None = None,  # None: the job's
    ) -> None:
        self._job, self._schema, self._parts = job, schema, parts
        self._format = format or format_of_job(job)
        self._shuffle = job.data.shuffle
        self._is_loaded = False
        self._num_shuffles = 0
        self._dataset: QueueDataset | InMemoryDataset
        if job.data.in_memory:
            self._dataset = InMemoryDataset(
                schema,
                job.train.batch_size,
                format=self._format,
                bad_row_limit=job.data.bad_row_limit,
                reader_num=job.data.reader_num,
                seed=job.train.seed,
                negatives=negatives_of(job),
            )
        else:
            self._dataset = streamed(job, schema, format=self._format, is_for_training=True)
        self._dataset.set_filelist(parts)

    @property
    def bad_rows(self) -> int:
        """Malformed rows skipped in a pass over the files."""
        return self._dataset.bad_rows

    @property
    def is_shuffled_globally(self) -> bool:
        """Whether this worker trains on rows that others have read."""
        return self._shuffle == "global"

    def head(self) -> Iterator[Batch]:
        """Reads the first rows of this worker's files, loaded or not; see `FileDataset.head`."""
        dataset = streamed(self._job, self._schema, format=self._format)
        dataset.set_filelist(self._parts)
        return dataset.head()

    def prepare(self, fleet: HasPeers, epoch: int) -> None:
        """Prepares rows in memory for an epoch, from 1; all workers call it, and `fleet` connects them.

        Rows are loaded once. A run that begins in a later epoch repeats the shuffles of earlier ones.
        """
        if not isinstance(self._dataset, InMemoryDataset):
            return
        if not self._is_loaded:
            self._dataset.load_into_memory()
            self._is_loaded = True
        while self._shuffle != "none" and self._num_shuffles < epoch:
            if self._shuffle == "local":
                self._dataset.local_shuffle()
            else:
                self._dataset.global_shuffle(fleet)
            self._num_shuffles += 1

    def batches(
        self, epoch: int, start: DataPosition | None = None
    ) -> Generator[Batch | tuple[Batch, DataPosition], None, None]:
        """Yields the batches of an epoch, from 1, with the position after each where they have an order.

        `start` is where in this epoch to resume; None: at its start. Raises DataError if it is of other
        files or another order.
        """
        if isinstance(self._dataset, QueueDataset):
            self._dataset.skip_to(epoch)
            if not self._dataset.has_order:
                yield from self._dataset
                return
        yield from self._positioned(epoch, start)

    def dealt(self, store: Store, worker: int, epoch: int) -> DealtFiles | None:
        """Returns the files of an epoch, from 1, that a worker takes from the queue; None: it has its own."""
        if self._job.data.deal == "fixed" or not isinstance(self._dataset, QueueDataset):
            return None
        return DealtFiles(store, worker, self._dataset, epoch)

    def share(self, epoch: int) -> Callable[[DataPosition], float | None]:
        """Returns a function for the share of an epoch, from 0 to 1, before a position; None: unknown.

        For rows in memory, call it after `prepare`.
        """
        if isinstance(self._dataset, QueueDataset):
            shares = self._dataset.shares(epoch)
            return lambda position: shares.at(position.split, position.offset)
        rows = self._dataset.get_memory_data_size()
        return lambda position: ((position.offset or 0) + position.skip) / rows if rows else None

    def _positioned(
        self, epoch: int, start: DataPosition | None
    ) -> Iterator[tuple[Batch, DataPosition]]:
        if start is not None and isinstance(self._dataset, InMemoryDataset):
            start = replace(start, epoch=self._num_shuffles)
        try:
            batches = self._dataset.positioned(start)
        except UsageError as error:
            raise DataError(f"this worker cannot resume at its position: {error}") from error
        for batch, position in batches:
            yield batch, replace(position, epoch=epoch)


def digest_of_files(train_files: Sequence[str]) -> str:
    """Returns a digest of the ordered list of training files: 16 hex digits."""
    text = json.dumps(list(train_files))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def order_of_data(job: Job) -> dict[str, int | str]:
    """Returns the settings of a job that determine the order of its data, by key."""
    data = job.data
    sampling: dict[str, int | str] = (
        {} if data.negative_rate == 1 else {"data.negative_rate": str(data.negative_rate)}
    )
    if data.stream:
        url = stream_url(data.stream)
        # The host may change; another stream has other positions.
        sampling["data.stream"] = (
            f"{url.kind} {url.name} {url.options.get('partitions', '')}".strip()
        )
    return sampling | {
        **({} if data.deal == "fixed" else {"data.deal": data.deal}),
        "data.in_memory": data.in_memory,
        "data.shuffle": data.shuffle,
        "data.shuffle_files": data.shuffle_files,
        "train.seed": job.train.seed,
    }
