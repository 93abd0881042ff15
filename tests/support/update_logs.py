"""Update logs of a few small records or of a server's calls, and readers of them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.durability.update_log import LogSync, UpdateLog
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import UpdateJournal, state_records
from ctr_ps.ps_server.rpc.recovery import recover
from ctr_ps.ps_server.store import ParameterStore

LIMIT_S = 5.0


@contextmanager
def new_log(
    folder: Path, *, sync: LogSync = LogSync.OS, head: Iterable[Record] = ()
) -> Iterator[UpdateLog]:
    """Begins a log in an empty folder; closes it after the block."""
    with closing(UpdateLog.create(read_log(folder), sync=sync, head=head)) as log:
        yield log


@contextmanager
def resumed_log(folder: Path, *, sync: LogSync = LogSync.OS) -> Iterator[UpdateLog]:
    """Resumes a log; closes it after the block."""
    with closing(UpdateLog.resume(read_log(folder), sync=sync)) as log:
        yield log


def append_all(log: UpdateLog, records: Sequence[Record]) -> None:
    for record in records:
        log.append(record.kind, record.payload).result()


def read_records(folder: Path, segment: int | None = None) -> list[Record]:
    """Returns the records from a segment on, the first by default."""
    with closing(read_log(folder)) as saved:
        return list(saved.records_from(saved.segments[0] if segment is None else segment))


def read_head(folder: Path, segment: int) -> list[Record]:
    with closing(read_log(folder)) as saved:
        return saved.head(segment)


def last_segment(folder: Path) -> Path:
    return max(folder.glob("segment-*.log"))


def begun_log(folder: Path, store: ParameterStore) -> tuple[Handlers, UpdateLog]:
    """Returns the handlers of a store that log its calls."""
    handlers = Handlers(store.engine)
    head = state_records(store.engine.state(), handlers.completed(), base="")
    log = UpdateLog.create(read_log(folder), sync=LogSync.OS, head=head)
    handlers.engine.journal = UpdateJournal(log, handlers.completed, wait_limit_s=LIMIT_S)
    return handlers, log


def recovered(folder: Path, store: ParameterStore) -> Handlers:
    """Returns the handlers of an empty store after a recovery from the log."""
    handlers = Handlers(store.engine)
    recover(
        store.engine,
        read_log(folder),
        replay=handlers.replay,
        restore_completed=handlers.restore_completed,
    )
    return handlers
