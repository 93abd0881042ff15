"""Appending, segments, and errors of the disk."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctr_ps.protos.errors import LogError
from ctr_ps.protos.futures import Answered
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.segments import MARKER, Record
from ctr_ps.ps_server.durability.update_log import LogSync, UpdateLog
from tests.support.commands import printed_by
from tests.support.threads import run_together
from tests.support.update_logs import (
    append_all,
    last_segment,
    new_log,
    read_head,
    read_records,
    resumed_log,
)

PUSH = Record("push", b"gradients")
THREADS = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(params=LogSync, ids=lambda sync: sync.value)
def sync(request: pytest.FixtureRequest) -> LogSync:
    return request.param


records = st.builds(
    Record,
    kind=st.text(max_size=20),
    payload=st.binary(max_size=200) | st.binary(max_size=3).map(lambda some: MARKER + some),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    runs=st.lists(
        st.lists(
            st.one_of(records, st.lists(records, max_size=3)),  # a record, or the head of a segment
            max_size=6,
        ),
        min_size=1,
        max_size=3,
    ),
    sync=st.sampled_from(LogSync),
)
def test_log_of_several_runs_and_segments_is_read_back(
    runs: Sequence[Sequence[Record | list[Record]]], sync: LogSync
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "log"
        heads: dict[int, list[Record]] = {1: [PUSH]}
        appended: dict[int, list[Record]] = {1: []}
        new_log_ = partial(new_log, head=[PUSH])

        for number, run in enumerate(runs):
            with (resumed_log if number else new_log_)(folder, sync=sync) as log:
                for event in run:
                    if isinstance(event, Record):
                        append_all(log, [event])
                        appended[log.segment].append(event)
                    else:
                        segment = log.begin_segment(iter(event))
                        heads[segment], appended[segment] = event, []

        for segment, head in heads.items():
            assert read_head(folder, segment) == head
            later = [appended[other] for other in appended if other >= segment]
            assert read_records(folder, segment) == [each for some in later for each in some]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview], ids=lambda wrap: wrap.__name__)
def test_payload_may_be_any_buffer(folder: Path, wrap: Callable[[bytes], memoryview]) -> None:
    with new_log(folder) as log:
        log.append("push", wrap(b"gradients"))
        log.append("push", memoryview(wrap(b"gradients")).cast("b"))

    assert read_records(folder) == [PUSH, PUSH]


def test_payload_is_written_with_one_call_and_not_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = bytes(8_000_000)
    written: list[object] = []
    real = os.writev

    def writev(descriptor: int, buffers: Sequence[bytes | memoryview]) -> int:
        written.append([memoryview(buffer).obj for buffer in buffers][1])
        return real(descriptor, buffers)

    with new_log(folder) as log:
        monkeypatch.setattr(os, "writev", writev)
        log.append("push", payload)

    assert len(written) == 1
    assert written[0] is payload
    assert read_records(folder) == [Record("push", payload)]


def test_record_is_acknowledged_at_once_without_fsync(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_log(folder) as log:
        monkeypatch.setattr(os, "fdatasync", lambda descriptor: pytest.fail("it was synced"))

        assert isinstance(log.append("push", b""), Answered)


def test_record_that_is_too_long_is_refused_and_the_log_goes_on(
    folder: Path, sync: LogSync
) -> None:
    with new_log(folder, sync=sync) as log:
        with pytest.raises(LogError, match="too long"):
            log.append("p" * 256, b"")
        append_all(log, [PUSH])

    assert read_records(folder) == [PUSH]


def test_folder_with_a_log_is_not_begun_again(folder: Path) -> None:
    with new_log(folder) as log:
        append_all(log, [PUSH])

    with (
        closing(read_log(folder)) as saved,
        pytest.raises(LogError, match=r"already has an update log, with segments \[1\]"),
    ):
        UpdateLog.create(saved, sync=LogSync.OS)

    assert read_records(folder) == [PUSH]


def test_each_acknowledged_record_of_many_threads_is_there_once_and_in_order(
    folder: Path, sync: LogSync
) -> None:
    """While segments begin: what was acknowledged before a head is before it, and later is after."""
    num_records, num_segments = 60, 15
    acknowledged = [0] * THREADS
    seen: dict[int, tuple[list[int], list[int]]] = {}

    def append(thread: int) -> None:
        for number in range(num_records):
            payload = f"{thread}:{number} ".encode() + bytes(number % 3 * 5_000)
            log.append("push", payload).result()
            acknowledged[thread] = number + 1

    def begin_segments() -> None:
        for _ in range(num_segments):
            before = list(acknowledged)
            segment = log.begin_segment([Record("head", b"")])
            seen[segment] = before, list(acknowledged)

    with new_log(folder, sync=sync) as log:
        run_together([*(partial(append, thread) for thread in range(THREADS)), begin_segments])

    for segment in range(1, num_segments + 2):
        found: list[list[int]] = [[] for _ in range(THREADS)]
        for record in read_records(folder, segment):
            thread, number = bytes(record.payload).split()[0].decode().split(":")
            found[int(thread)].append(int(number))
        firsts = [numbers[0] if numbers else num_records for numbers in found]
        before, after = seen.get(segment, ([0] * THREADS, [0] * THREADS))
        for thread in range(THREADS):
            assert found[thread] == list(range(firsts[thread], num_records))
            assert before[thread] <= firsts[thread] <= after[thread] + 1
    assert read_records(folder, 1)


def test_appends_wait_while_a_segment_begins(folder: Path, sync: LogSync) -> None:
    is_asked = threading.Event()
    with new_log(folder, sync=sync) as log:
        ended = threading.Event()

        def append() -> None:
            is_asked.set()
            log.append("push", b"gradients").result()
            ended.set()

        thread = threading.Thread(target=append)

        def head() -> Iterator[Record]:
            thread.start()
            assert is_asked.wait(10)
            assert not ended.wait(0.02)
            yield Record("state", b"")

        segment = log.begin_segment(head())
        thread.join(10)

    assert read_records(folder, segment) == [PUSH]


def test_sizes_and_counts_are_those_of_the_files(folder: Path, sync: LogSync) -> None:
    def on_disk() -> int:
        return sum(path.stat().st_size for path in folder.glob("segment-*"))

    with new_log(folder, sync=sync) as log:
        append_all(log, [PUSH, PUSH])
        size = log.size_bytes
        assert size == on_disk()
        log.begin_segment([PUSH])
        append_all(log, [PUSH])
        assert log.size_bytes == on_disk()
        assert log.num_appended == 3
        assert log.appended_bytes == 3 * (size - 48) / 2

    with resumed_log(folder, sync=sync) as log:
        assert (log.num_appended, log.appended_bytes) == (0, 0)
        assert log.size_bytes == on_disk()
        log.remove_before(2)
        assert log.size_bytes == on_disk() < size + 200
        assert log.segment == 2


def test_current_segment_is_never_removed(folder: Path) -> None:
    with new_log(folder) as log:
        with pytest.raises(
            LogError, match=r"before 2 .* cannot be removed: .* is still written to segment 1"
        ):
            log.remove_before(2)
        append_all(log, [PUSH])

    assert read_records(folder) == [PUSH]


def test_oldest_segments_are_removed_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a log that is being removed, when the machine dies, is one with fewer segments."""
    removed: list[str] = []
    real = Path.unlink
    with new_log(folder) as log:
        monkeypatch.setattr(Path, "unlink", lambda path: (removed.append(path.name), real(path)))
        log.begin_segment([])
        log.begin_segment([])
        log.delete()

    assert removed == [f"segment-0000000{number}.log" for number in (1, 2, 3)]
    assert [path.name for path in folder.iterdir()] == ["LOCK"]


def test_deleted_log_may_be_begun_again(folder: Path, sync: LogSync) -> None:
    with new_log(folder, sync=sync) as log:
        append_all(log, [PUSH])
        log.delete()
    with new_log(folder, sync=sync) as log:
        append_all(log, [PUSH])

    assert read_records(folder) == [PUSH]


def test_closed_log_takes_nothing_more(folder: Path, sync: LogSync) -> None:
    with new_log(folder, sync=sync) as log:
        append_all(log, [PUSH])
        log.close()

        for call in (partial(log.append, "push", b""), partial(log.begin_segment, [])):
            with pytest.raises(LogError, match=f"the update log {folder} is closed"):
                call()
    assert read_records(folder) == [PUSH]


# Errors of the disk


def fail(code: int) -> Callable[..., int]:
    def raise_error(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return raise_error


def test_after_a_failed_write_nothing_is_appended(
    folder: Path, sync: LogSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = rf"cannot write the update log {folder}: No space left on device; restart the server"
    with new_log(folder, sync=sync) as log:
        append_all(log, [PUSH])
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", fail(errno.ENOSPC))
            with pytest.raises(LogError, match=message):
                log.append("push", b"lost").result()

        for call in (partial(log.append, "push", b""), partial(log.begin_segment, [])):
            with pytest.raises(LogError, match=message):
                call()

    assert read_records(folder) == [PUSH]


@pytest.mark.parametrize("can_truncate", [True, False], ids=["truncated", "left-torn"])
@pytest.mark.parametrize("part", [1, 41, 47, 48])
def test_short_write_leaves_no_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: int, can_truncate: bool
) -> None:
    real = os.write

    def writev(descriptor: int, buffers: Sequence[bytes]) -> int:
        monkeypatch.setattr(os, "write", fail(errno.ENOSPC))
        return real(descriptor, b"".join(buffers)[:part])

    with new_log(folder) as log:
        append_all(log, [PUSH])
        size = log.size_bytes
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", writev)
            if not can_truncate:
                patch.setattr(os, "ftruncate", fail(errno.EIO))
            with pytest.raises(LogError, match="No space left"):
                log.append("push", b"lost")
    monkeypatch.undo()

    assert last_segment(folder).stat().st_size == size + (0 if can_truncate else part)
    with resumed_log(folder) as log:
        append_all(log, [PUSH])
    assert read_records(folder) == [PUSH, PUSH]


def test_write_in_two_parts_is_one_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_log(folder) as log:
        with monkeypatch.context() as patch:
            patch.setattr(
                os,
                "writev",
                lambda descriptor, buffers: os.write(descriptor, b"".join(buffers)[:46]),
            )
            log.append("push", b"gradients")
        append_all(log, [PUSH])

    assert read_records(folder) == [PUSH, PUSH]


LIMITED = """
import resource, signal, sys
from tests.support.update_logs import new_log
from pathlib import Path
from ctr_ps.protos.errors import LogError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with new_log(Path(sys.argv[1])) as log:
    for number in range(100):
        try:
            log.append("push", bytes([number]) * 3_000)
        except LogError as error:
            print(number, error)
            break
"""


def test_file_that_cannot_grow_keeps_what_was_acknowledged(folder: Path) -> None:
    number, message = printed_by(LIMITED, folder).split(" ", 1)
    assert "File too large" in message
    assert read_records(folder) == [
        Record("push", bytes([each]) * 3_000) for each in range(int(number))
    ]
    assert number == "6"


@pytest.mark.parametrize("call", ["writev", "fsync"])
def test_segment_that_cannot_be_written_leaves_the_one_before(
    folder: Path, sync: LogSync, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with new_log(folder, sync=sync) as log:
        append_all(log, [PUSH])
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail(errno.ENOSPC))
            with pytest.raises(LogError, match=r"cannot begin segment 2 .* No space left"):
                log.begin_segment([PUSH])
        append_all(log, [PUSH])
        assert log.segment == 1
        assert not list(folder.glob("*.next"))
        assert log.begin_segment([PUSH]) == 2
        append_all(log, [PUSH])

    assert read_records(folder) == [PUSH, PUSH, PUSH]


def test_head_that_cannot_be_made_leaves_the_segment_before(folder: Path, sync: LogSync) -> None:
    def head() -> Iterator[Record]:
        yield PUSH
        raise KeyError("state")

    with new_log(folder, sync=sync) as log:
        with suppress(KeyError):
            log.begin_segment(head())
        append_all(log, [PUSH])

    assert read_records(folder) == [PUSH]


def test_segment_that_may_not_be_published_ends_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the two segments is read then is not known, so nothing goes to either."""
    with new_log(folder) as log:
        append_all(log, [PUSH])
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail(errno.EIO))
            with pytest.raises(LogError, match="Input/output error"):
                log.begin_segment([])
        with pytest.raises(LogError, match="Input/output error"):
            log.append("push", b"")

    assert read_records(folder) == [PUSH]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which every sync and every new name of a file is added from now on."""
    events: list[str] = []

    def spy(name: str, what: Callable[[object], str]) -> None:
        owner = Path if name == "rename" else os
        real = getattr(owner, name)

        def called(*arguments: object) -> object:
            events.append(f"{name} {what(arguments[0])}")
            return real(*arguments)

        monkeypatch.setattr(owner, name, called)

    def file_of(descriptor: object) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    spy("fsync", file_of)
    spy("fdatasync", file_of)
    spy("rename", lambda path: Path(str(path)).name)
    return events


def test_new_segment_is_on_disk_before_it_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is all that was appended to the one before."""
    with new_log(folder) as log:
        append_all(log, [PUSH])
        events = spied(monkeypatch)
        log.begin_segment([PUSH])

    assert events == [
        "fdatasync segment-00000001.log",
        "fsync segment-00000002.next",
        "fdatasync segment-00000001.log",
        "rename segment-00000002.next",
        "fsync log",
    ]


def test_resumed_log_is_on_disk_before_it_takes_a_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process before left to the system is relied on once it is recovered."""
    with new_log(folder) as log:
        append_all(log, [PUSH])
    events = spied(monkeypatch)

    with resumed_log(folder):
        # The folder, too: a process that is killed in `publish` has not made the name durable.
        assert events == ["fsync log", "fsync segment-00000001.log"]


def test_folder_says_that_its_server_was_drained_until_it_has_another_log(folder: Path) -> None:
    for is_drained, names in ((True, {"LOCK", "DRAINED"}), (False, {"LOCK"})):
        with new_log(folder) as log:
            log.delete(is_drained=is_drained)
        assert {path.name for path in folder.iterdir()} == names
