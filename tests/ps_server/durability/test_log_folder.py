"""Who may use a folder, and what is in it."""

import os
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ctr_ps.protos.errors import LogError
from ctr_ps.ps_server.durability.saved_log import LogFolder, read_log
from ctr_ps.ps_server.durability.update_log import LogSync
from tests.support.processes import LIMIT_S, started
from tests.support.update_logs import append_all, new_log, read_records, resumed_log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs" / "log"


def test_folder_without_log_is_empty(folder: Path) -> None:
    with closing(read_log(folder)) as saved:
        assert saved.segments == ()


def test_nobody_else_may_read_folder_and_files(folder: Path) -> None:
    with new_log(folder) as log:
        log.begin_segment([])

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes == dict.fromkeys(["LOCK", "segment-00000001.log", "segment-00000002.log"], 0o600)


def test_second_user_of_a_folder_is_refused_and_told_who_has_it(folder: Path) -> None:
    with closing(LogFolder(folder)), pytest.raises(LogError) as refused:
        LogFolder(folder)

    assert str(refused.value).startswith(
        f"the update log {folder} is in use by process {os.getpid()}"
    )


def test_other_process_is_refused_until_the_first_dies(folder: Path) -> None:
    command = ["-m", "tests.support.append_target", folder, LogSync.OS.value]

    with started([sys.executable, *command]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LogError, match=rf"{folder} is in use by process \d+:"):
            read_log(folder)
        process.kill()
        process.wait(LIMIT_S)

    assert read_records(folder)


@pytest.mark.parametrize("end", ["close", "delete"])
def test_folder_is_free_when_the_log_ended(folder: Path, end: str) -> None:
    with new_log(folder) as log:
        getattr(log, end)()

        read_log(folder).close()


def test_folder_is_free_when_it_could_not_be_read(folder: Path) -> None:
    with new_log(folder) as log:
        log.begin_segment([])
        log.begin_segment([])
    (folder / "segment-00000002.log").unlink()

    for _ in range(2):
        with pytest.raises(LogError, match="lacks segments"):
            read_log(folder)


@pytest.mark.parametrize("below", ["", "log", "logs/0"])
def test_file_where_the_folder_should_be_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / below

    with pytest.raises(LogError) as refused:
        read_log(path)

    assert str(refused.value) == (
        f"cannot open the update log {path}: {tmp_path}/file is a file, expected a folder, or a path at "
        "which one can be made"
    )


def test_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    with pytest.raises(LogError, match=rf"{tmp_path}/link is not a folder, expected a folder"):
        read_log(tmp_path / "link")


def test_folder_that_cannot_be_made_is_named_with_the_one_it_would_be_in() -> None:
    with pytest.raises(LogError) as refused:
        read_log(Path("/proc/none/log"))

    assert str(refused.value) == (
        "cannot make the folder of the update log /proc/none/log in /proc: No such file or directory; "
        "expected a folder that this user may write to"
    )


def test_missing_segment_is_named(folder: Path) -> None:
    with new_log(folder) as log:
        for _ in range(4):
            log.begin_segment([])
    (folder / "segment-00000002.log").unlink()
    (folder / "segment-00000004.log").unlink()

    with pytest.raises(LogError, match=r"lacks segments \[2, 4\] of 1 to 5"):
        read_log(folder)


def test_segment_that_was_never_published_is_ignored_and_removed(folder: Path) -> None:
    with new_log(folder) as log:
        append_all(log, [])
    (folder / "segment-00000002.next").write_bytes(b"half a head")

    assert read_records(folder) == []
    with resumed_log(folder) as log:
        assert sorted(path.name for path in folder.iterdir()) == ["LOCK", "segment-00000001.log"]
        assert log.begin_segment([]) == 2
