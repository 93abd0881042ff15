"""Group commit: an fsync for all records that were appended during the one before; and after a kill."""

import errno
import os
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ctr_ps.protos.errors import LogError
from ctr_ps.protos.futures import Future, WaitingFuture
from ctr_ps.ps_server.durability import update_log
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.durability.update_log import LogSync, UpdateLog
from tests.support import append_target, processes
from tests.support.threads import run_together
from tests.support.update_logs import (
    append_all,
    last_segment,
    new_log,
    read_records,
    resumed_log,
)

LIMIT_S = 10.0
SOON_S = 0.02  # for what must not happen: too short a wait hides a fault, but never makes one
THREADS = 8


class Disk:
    """An fdatasync that counts, ends when it may, and can fail."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.error = 0
        self._real: Callable[[int], None] = os.fdatasync

    def fdatasync(self, descriptor: int) -> None:
        self.num_syncs += 1
        self.has_begun.set()
        assert self.may_end.wait(LIMIT_S)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self._real(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "fdatasync", disk.fdatasync)
    return disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def append(log: UpdateLog, number: int) -> Future[None]:
    return log.append("push", str(number).encode())


def is_done(future: Future[None]) -> bool:
    assert isinstance(future, WaitingFuture)
    return future.done()


def test_eight_threads_need_fewer_fsyncs_than_records(folder: Path, disk: Disk) -> None:
    num_records = 50

    def append_some(log: UpdateLog) -> None:
        for number in range(num_records):
            append(log, number).result()

    with new_log(folder, sync=LogSync.FSYNC) as log:
        run_together([partial(append_some, log)] * THREADS)

    assert len(read_records(folder)) == THREADS * num_records
    assert disk.num_syncs < THREADS * num_records


def test_records_of_one_fsync_are_acknowledged_by_the_next(folder: Path, disk: Disk) -> None:
    disk.may_end.clear()
    with new_log(folder, sync=LogSync.FSYNC) as log:
        first = append(log, 0)
        assert disk.has_begun.wait(LIMIT_S)
        group = [append(log, number) for number in range(1, 20)]
        threading.Event().wait(SOON_S)
        assert not any(map(is_done, [first, *group]))

        disk.may_end.set()

        for future in [first, *group]:
            future.result()
        assert disk.num_syncs == 2


def test_closing_waits_for_the_records_on_their_way(folder: Path, disk: Disk) -> None:
    with new_log(folder, sync=LogSync.FSYNC) as log:
        futures = [append(log, number) for number in range(5)]

    assert all(map(is_done, futures))
    assert len(read_records(folder)) == 5


def test_segment_that_begins_acknowledges_what_was_appended(folder: Path, disk: Disk) -> None:
    with new_log(folder, sync=LogSync.FSYNC) as log:
        futures = [append(log, number) for number in range(5)]
        log.begin_segment([])

        for future in futures:
            future.result()


def test_failed_fsync_fails_its_records_and_all_later_ones(folder: Path, disk: Disk) -> None:
    """A second fsync would succeed, though what the first one lost is lost."""
    message = f"cannot write the update log {folder}: Input/output error"
    with new_log(folder, sync=LogSync.FSYNC) as log:
        append_all(log, [Record("push", b"")])
        disk.may_end.clear()
        disk.has_begun.clear()
        disk.error = errno.EIO
        futures = [append(log, 1)]
        assert disk.has_begun.wait(LIMIT_S)
        futures += [append(log, 2)]  # during the fsync that fails

        disk.may_end.set()

        for future in futures:
            with pytest.raises(LogError, match=message):
                future.result()
        disk.error = 0
        with pytest.raises(LogError, match=message):
            append(log, 3)
        assert disk.num_syncs == 2


def test_fsync_that_fails_while_a_segment_begins_ends_the_log(folder: Path, disk: Disk) -> None:
    with new_log(folder, sync=LogSync.OS) as log:
        append(log, 1)
        disk.error = errno.EIO

        for call in (partial(log.begin_segment, []), partial(append, log, 2)):
            with pytest.raises(LogError, match="Input/output error"):
                call()

    assert last_segment(folder).name == "segment-00000001.log"


def test_disk_that_does_not_answer_is_an_error(
    folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_log, "SYNC_LIMIT_S", 0.01)
    disk.may_end.clear()
    with new_log(folder, sync=LogSync.FSYNC) as log:
        future = append(log, 1)

        with pytest.raises(LogError, match=f"{folder} did not sync within 0.01 s"):
            future.result()
        disk.may_end.set()


def test_record_says_what_was_acknowledged_before_it(folder: Path, disk: Disk) -> None:
    """So two records of one group that a dying machine wrote in the wrong order are no damage."""
    with new_log(folder, sync=LogSync.FSYNC) as log:
        append(log, 0).result()
        disk.may_end.clear()
        disk.has_begun.clear()
        append(log, 1)
        assert disk.has_begun.wait(LIMIT_S)
        append(log, 2)
        disk.may_end.set()
    segment = last_segment(folder)
    content = bytearray(segment.read_bytes())
    content[-2 * 46] ^= 1  # the marker of record 1

    segment.write_bytes(content)

    assert read_records(folder) == [Record("push", b"0")]


@pytest.mark.parametrize("seed", range(100))
def test_machine_that_dies_during_an_fsync_loses_only_what_was_not_acknowledged(
    folder: Path, disk: Disk, seed: int
) -> None:
    """Whatever is then on disk of the records that were on their way."""
    rng = random.Random(seed)
    with new_log(folder, sync=LogSync.FSYNC) as log:
        acknowledged = rng.randrange(4)
        for number in range(acknowledged):
            append(log, number).result()
        durable = log.size_bytes
        disk.may_end.clear()
        disk.has_begun.clear()
        append(log, acknowledged)
        assert disk.has_begun.wait(LIMIT_S)
        for number in range(acknowledged + 1, 8):
            append(log, number)
        content = bytearray(last_segment(folder).read_bytes())
        disk.may_end.set()

    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(durable, len(content))
        end = rng.randrange(start, len(content)) + 1
        content[start:end] = (
            bytes(end - start) if rng.random() < 0.7 else rng.randbytes(end - start)
        )
    last_segment(folder).write_bytes(content)

    found = [bytes(record.payload).decode() for record in read_records(folder)]
    assert acknowledged <= len(found) <= 8
    assert found == [str(number) for number in range(len(found))]


@pytest.mark.parametrize("sync", LogSync, ids=lambda sync: sync.value)
@pytest.mark.parametrize("run", range(4))
def test_acknowledged_records_survive_a_kill(folder: Path, sync: LogSync, run: int) -> None:
    command = [sys.executable, "-m", "tests.support.append_target", folder, sync.value]

    with processes.started(command) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(random.Random(run).randrange(10, 200))]
        process.kill()
        lines += process.stdout.readlines()
        process.wait(processes.LIMIT_S)
    acknowledged = {line.strip() for line in lines if line.endswith("\n")}
    found = [bytes(record.payload).split()[0].decode() for record in read_records(folder)]

    assert acknowledged <= set(found), lines[-3:]
    for thread in range(append_target.THREADS):
        own = [name for name in found if name.startswith(f"{thread}:")]
        assert own == [f"{thread}:{number}" for number in range(len(own))]
        # One more may have been written and not yet acknowledged.
        assert len(own) <= sum(name.startswith(f"{thread}:") for name in acknowledged) + 1
    with resumed_log(folder, sync=sync) as log:
        log.begin_segment([])
