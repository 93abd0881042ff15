"""Update logs of a few small records, and what is read back from them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ps_server.durability.saved_log import read_log
from ps_server.durability.segment_format import Record
from ps_server.durability.update_log import LogSync, UpdateLog


@contextmanager
def new_log(
    folder: Path, *, sync: LogSync = LogSync.OS, head: Iterable[Record] = ()
) -> Iterator[UpdateLog]:
    """Begins a log in an empty folder and closes it in the end."""
    with closing(UpdateLog.create(read_log(folder), sync=sync, head=head)) as log:
        yield log


@contextmanager
def resumed_log(folder: Path, *, sync: LogSync = LogSync.OS) -> Iterator[UpdateLog]:
    """Resumes a log and closes it in the end."""
    with closing(UpdateLog.resume(read_log(folder), sync=sync)) as log:
        yield log


def append_all(log: UpdateLog, records: Sequence[Record]) -> None:
    """Appends records, each after the one before was acknowledged."""
    for record in records:
        log.append(record.kind, record.payload).result()


def read_records(folder: Path, segment: int | None = None) -> list[Record]:
    """Returns the records from a segment on, the first by default."""
    with closing(read_log(folder)) as saved:
        return list(saved.records_from(saved.segments[0] if segment is None else segment))


def read_head(folder: Path, segment: int) -> list[Record]:
    """Returns the head of a segment."""
    with closing(read_log(folder)) as saved:
        return saved.head(segment)


def last_segment(folder: Path) -> Path:
    """Returns the file of the last segment."""
    return max(folder.glob("segment-*.log"))
