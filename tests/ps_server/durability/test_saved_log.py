"""What is read of a log that was cut short, altered, or has lost files; and who may use its folder."""

import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.protos.errors import LogError
from ctr_ps.ps_server.durability.saved_log import LogFolder, read_log
from ctr_ps.ps_server.durability.segments import (
    MARKER,
    SEGMENT_HEADER_BYTES,
    Record,
    RecordHeader,
    SegmentHeader,
    checksum_of,
)
from ctr_ps.ps_server.durability.update_log import LogSync
from tests.support.processes import LIMIT_S, started
from tests.support.update_logs import (
    append_all,
    last_segment,
    new_log,
    read_head,
    read_records,
    resumed_log,
)

HEAD = [Record("state", b"version 7"), Record("ledger", b"")]
EARLY = [Record("push", b"early")]
LATE = [Record("push", b"one"), Record("shrink", b""), Record("push", MARKER + b"three")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of two segments: EARLY in the first, HEAD and LATE in the second."""
    folder = tmp_path / "log"
    with new_log(folder, head=[Record("state", b"fresh")]) as log:
        append_all(log, EARLY)
        log.begin_segment(HEAD)
        append_all(log, LATE)
    return folder


def ends(path: Path) -> list[int]:
    """Returns where the records of a segment end, by walking over them."""
    content = path.read_bytes()
    seed = SegmentHeader.decode(content).seed
    found = [SEGMENT_HEADER_BYTES]
    while found[-1] < len(content):
        header = RecordHeader.decode(content[found[-1] :], seed)
        assert header is not None
        found.append(found[-1] + header.header_bytes + header.payload_bytes)
    return found


def rewrite(path: Path, number: int, change: Callable[[RecordHeader], RecordHeader]) -> None:
    """Replaces the header of record `number` of a file by another one that is valid."""
    content = path.read_bytes()
    start = ends(path)[number]
    seed = SegmentHeader.decode(content).seed
    header = RecordHeader.decode(content[start:], seed)
    assert header is not None
    altered = change(header).encode(seed)
    path.write_bytes(content[:start] + altered + content[start + header.header_bytes :])


def flip(path: Path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def test_records_come_without_heads_and_heads_by_themselves(folder: Path) -> None:
    with closing(read_log(folder)) as saved:
        assert saved.segments == (1, 2)
        assert saved.head(1) == [Record("state", b"fresh")]
        assert saved.head(2) == HEAD
        assert list(saved.records_from(1)) == EARLY + LATE
        assert list(saved.records_from(2)) == LATE


def test_cut_at_every_byte_leaves_the_whole_records_before_and_can_be_resumed(folder: Path) -> None:
    """Within header or head, which were on disk before the segment had its name, it is damage."""
    segment = last_segment(folder)
    content = segment.read_bytes()
    boundaries = ends(segment)[len(HEAD) :]

    for size in range(len(content)):
        segment.write_bytes(content[:size])
        if size < boundaries[0]:
            with pytest.raises(LogError, match=str(segment)):
                read_records(folder, 2)
        else:
            whole = sum(end <= size for end in boundaries) - 1
            assert read_records(folder, 2) == LATE[:whole]
            assert read_records(folder) == EARLY + LATE[:whole]
            assert read_head(folder, 2) == HEAD
            with resumed_log(folder) as log:
                assert segment.stat().st_size == max(end for end in boundaries if end <= size)
                append_all(log, [Record("push", b"new")])
            assert read_records(folder, 2) == [*LATE[:whole], Record("push", b"new")]


@pytest.mark.parametrize("segment", [1, 2])
def test_every_flipped_bit_is_damage_or_a_torn_tail_and_never_a_wrong_record(
    folder: Path, segment: int
) -> None:
    path = folder / f"segment-{segment:08}.log"
    content = path.read_bytes()
    last_record = ends(path)[-2]

    for at in range(len(content)):
        for bit in range(8):
            path.write_bytes(content)
            flip(path, at, bit)
            if segment == 2 and at >= last_record:
                assert read_records(folder) == EARLY + LATE[:-1]
            else:
                with pytest.raises(LogError, match=str(path)):
                    read_records(folder)


def test_damaged_head_is_noticed(folder: Path) -> None:
    segment = last_segment(folder)
    flip(segment, ends(segment)[1] - 1)

    with pytest.raises(LogError, match="is damaged at byte 48: record 2 is incomplete or altered"):
        read_head(folder, 2)


def test_damage_names_file_place_and_what_to_do(folder: Path) -> None:
    segment = last_segment(folder)
    start = ends(segment)[2]
    flip(segment, start + 20)

    with pytest.raises(LogError) as raised:
        read_records(folder)

    assert str(raised.value) == (
        f"{segment} is damaged at byte {start}: record 4 is incomplete or altered, although it was "
        f"acknowledged before record 5, which follows; restore the file, or start the server from a "
        f"checkpoint with another, empty folder as its update log"
    )


def test_records_that_were_never_acknowledged_may_be_lost_in_any_order(folder: Path) -> None:
    """A machine that dies during an fsync may have written the second record and not the first."""
    segment = last_segment(folder)
    rewrite(segment, 4, lambda header: replace(header, acknowledged=5))
    flip(
        segment, ends(segment)[4] - 1
    )  # record 5; 6 says that 4 was the last that was acknowledged

    assert read_records(folder, 2) == LATE[:1]


def test_tail_of_zeros_is_torn(folder: Path) -> None:
    """As a file system leaves it that had the new size on disk and not yet the data."""
    with last_segment(folder).open("ab") as file:
        file.write(bytes(10_000))

    assert read_records(folder, 2) == LATE


def test_torn_tail_is_reported_once_with_its_size(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = last_segment(folder)
    torn = segment.stat().st_size - 1 - ends(segment)[-2]
    os.truncate(segment, segment.stat().st_size - 1)

    with closing(read_log(folder)) as saved, caplog.at_level(logging.WARNING):
        for _ in range(2):
            list(saved.records_from(1))
        saved.end()

    assert caplog.messages == [
        f"ignored an incomplete record at the end of the update log file={segment} bytes={torn}"
    ]


def test_torn_record_may_hold_what_looks_like_a_later_one(folder: Path) -> None:
    """A payload cannot know the seed, so what a client sends is never taken for a record."""
    segment = last_segment(folder)
    forged = RecordHeader(
        number=90, acknowledged=90, kind="", payload_bytes=0, payload_checksum=checksum_of(b"")
    ).encode(0)
    with resumed_log(folder) as log:
        append_all(log, [Record("push", 3 * forged)])
    os.truncate(segment, segment.stat().st_size - 1)

    assert read_records(folder, 2) == LATE


def test_later_record_is_found_across_the_blocks_of_the_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = last_segment(folder)
    flip(segment, ends(segment)[2])

    for size in range(len(MARKER), 60):
        monkeypatch.setattr("ctr_ps.ps_server.durability.segments._SCAN_BYTES", size)
        with pytest.raises(LogError, match="record 5, which follows"):
            read_records(folder)


def test_lost_records_of_an_earlier_segment_are_damage(folder: Path) -> None:
    first = folder / "segment-00000001.log"
    os.truncate(first, ends(first)[-2])

    with pytest.raises(
        LogError, match=rf"{first} ends before record 1, but .*0002.log begins with 2"
    ):
        read_records(folder)
    assert read_records(folder, 2) == LATE


def test_bytes_after_an_earlier_segment_are_damage(folder: Path) -> None:
    """It was complete when the next one began, so nothing can be torn."""
    first = folder / "segment-00000001.log"
    with first.open("ab") as file:
        file.write(b"more")

    with pytest.raises(
        LogError, match=rf"{first} is damaged at byte \d+: .* later segments follow"
    ):
        read_records(folder)


def test_number_out_of_order_is_damage(folder: Path) -> None:
    segment = last_segment(folder)
    rewrite(segment, 4, lambda header: replace(header, number=9))

    with pytest.raises(LogError, match="record 9 follows, expected 6"):
        read_records(folder)


def test_segment_under_the_name_of_another_is_refused(folder: Path) -> None:
    shutil.copy(folder / "segment-00000001.log", folder / "segment-00000003.log")

    with pytest.raises(LogError, match=r"0003.log: its header says segment 1"):
        read_records(folder)


def test_segment_that_does_not_exist_is_refused(folder: Path) -> None:
    with closing(read_log(folder)) as saved:
        for read in (saved.head, lambda segment: list(saved.records_from(segment))):
            with pytest.raises(LogError, match=r"has no segment 3; it has \[1, 2\]"):
                read(3)


@pytest.mark.parametrize("sync", LogSync)
def test_first_segments_that_were_removed_are_not_missed(tmp_path: Path, sync: LogSync) -> None:
    folder = tmp_path / "log"
    with new_log(folder, sync=sync) as log:
        append_all(log, EARLY)
        log.remove_before(log.begin_segment(HEAD))
        append_all(log, LATE)

    assert read_records(folder) == LATE
    assert read_head(folder, 2) == HEAD


@pytest.mark.parametrize("sync", LogSync, ids=lambda sync: sync.value)
def test_record_of_an_earlier_run_counts_as_acknowledged(folder: Path, sync: LogSync) -> None:
    """What was there when a log was resumed is relied on, as it was recovered."""
    with resumed_log(folder, sync=sync) as log:
        log.append("push", b"after the restart").result()
    segment = last_segment(folder)

    flip(segment, ends(segment)[-2] - 1)

    with pytest.raises(
        LogError, match="is incomplete or altered, although it was acknowledged before record"
    ):
        read_records(folder, 2)


# The folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "log"


def test_folder_without_log_is_empty(place: Path) -> None:
    with closing(read_log(place)) as saved:
        assert saved.segments == ()


def test_nobody_else_may_read_folder_and_files(place: Path) -> None:
    with new_log(place) as log:
        log.begin_segment([])

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert modes == dict.fromkeys(["LOCK", "segment-00000001.log", "segment-00000002.log"], 0o600)


def test_second_user_of_a_folder_is_refused_and_told_who_has_it(place: Path) -> None:
    with closing(LogFolder(place)), pytest.raises(LogError) as refused:
        LogFolder(place)

    assert str(refused.value).startswith(
        f"the update log {place} is in use by process {os.getpid()}"
    )


def test_other_process_is_refused_until_the_first_dies(place: Path) -> None:
    command = ["-m", "tests.support.append_target", place, LogSync.OS.value]

    with started([sys.executable, *command]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LogError, match=rf"{place} is in use by process \d+:"):
            read_log(place)
        process.kill()
        process.wait(LIMIT_S)

    assert read_records(place)


@pytest.mark.parametrize("end", ["close", "delete"])
def test_folder_is_free_when_the_log_ended(place: Path, end: str) -> None:
    with new_log(place) as log:
        getattr(log, end)()

        read_log(place).close()


def test_folder_is_free_when_it_could_not_be_read(place: Path) -> None:
    with new_log(place) as log:
        log.begin_segment([])
        log.begin_segment([])
    (place / "segment-00000002.log").unlink()

    for _ in range(2):
        with pytest.raises(LogError, match="lacks segments"):
            read_log(place)


@pytest.mark.parametrize("below", ["", "log", "logs/0"])
def test_file_where_the_folder_should_be_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / below

    with pytest.raises(LogError) as refused:
        read_log(path)

    assert str(refused.value) == (
        f"cannot open the update log {path}: {tmp_path}/file is a file, expected a folder, or a path for a "
        "new one"
    )


def test_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    with pytest.raises(LogError, match=rf"{tmp_path}/link is not a folder, expected a folder"):
        read_log(tmp_path / "link")


def test_folder_that_cannot_be_made_is_named_with_the_one_it_would_be_in() -> None:
    with pytest.raises(LogError) as refused:
        read_log(Path("/proc/none/log"))

    assert str(refused.value) == (
        "cannot create the folder of the update log /proc/none/log in /proc: No such file or directory; "
        "expected a folder that this user may write to"
    )


def test_missing_segment_is_named(place: Path) -> None:
    with new_log(place) as log:
        for _ in range(4):
            log.begin_segment([])
    (place / "segment-00000002.log").unlink()
    (place / "segment-00000004.log").unlink()

    with pytest.raises(LogError, match=r"lacks segments \[2, 4\] of 1 to 5"):
        read_log(place)


def test_segment_that_was_never_published_is_ignored_and_removed(place: Path) -> None:
    with new_log(place) as log:
        append_all(log, [])
    (place / "segment-00000002.next").write_bytes(b"half a head")

    assert read_records(place) == []
    with resumed_log(place) as log:
        assert sorted(path.name for path in place.iterdir()) == ["LOCK", "segment-00000001.log"]
        assert log.begin_segment([]) == 2
