"""Pipe commands: their output is read, their failures are errors."""

import gzip
import itertools
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import BadRowError, DataError, UsageError
from ctr_ps.protos.wire.security.credentials import TLS_KEY, TOKEN, TOKEN_FILE
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.multislot import MultiSlotScanner
from ctr_ps.ps_worker.data.user_code.pipe import PipeReader, piped
from tests.support.waiting import wait_until

SCHEMA = Schema(dense=(DenseColumn(name="age"),), slots=("user",))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def lines(first: int, stop: int) -> str:
    return "".join(f"1 {n} 1 {n} 1 {n % 2}\n" for n in range(first, stop))


@pytest.fixture
def split(tmp_path: Path) -> FileSplit:
    path = tmp_path / "part-0"
    path.write_text(lines(0, 3))
    return FileSplit(str(path))


@pytest.fixture
def long_split(tmp_path: Path) -> FileSplit:
    """More than fits into a pipe."""
    path = tmp_path / "part-1"
    path.write_text(lines(0, 50_000))
    return FileSplit(str(path))


def reader(command: str, stall_limit_s: float = 60.0) -> PipeReader:
    return PipeReader(command, MultiSlotScanner(SCHEMA), stall_limit_s=stall_limit_s)


def keys(blocks: Iterator[Block]) -> list[int]:
    return list(itertools.chain.from_iterable(block.rows.keys.tolist() for block in blocks))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_command_prints_is_read(long_split: FileSplit) -> None:
    blocks = list(reader("cat").blocks(long_split))

    assert len(blocks) > 1
    assert keys(iter(blocks)) == list(range(50_000))
    assert np.concatenate([block.rows.dense for block in blocks])[:, 0].tolist() == list(
        range(50_000)
    )


def test_compressed_files_are_fed_decompressed(tmp_path: Path) -> None:
    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress(lines(0, 5).encode()))

    assert keys(reader("cat").blocks(FileSplit(str(path)))) == list(range(5))


def test_pipelines_run_in_a_shell(split: FileSplit) -> None:
    assert keys(reader("cat | tac | sed 's/^1 [0-9]* /1 0 /'").blocks(split)) == [2, 1, 0]


def test_command_may_print_nothing(split: FileSplit) -> None:
    assert keys(reader("cat > /dev/null").blocks(split)) == []


def test_command_is_told_no_secret(split: FileSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN, TOKEN_FILE, TLS_KEY):
        monkeypatch.setenv(name, "secret")
    shown = " ".join(f"${{{name}-7}}" for name in (TOKEN, TOKEN_FILE, TLS_KEY))
    command = f"cat > /dev/null; for key in {shown}; do echo 1 1 1 $key 1 0; done"

    assert keys(reader(command).blocks(split)) == [7, 7, 7]


def test_last_line_needs_no_end(split: FileSplit) -> None:
    assert keys(reader("cat > /dev/null; printf '1 1 1 7 1 0'").blocks(split)) == [7]


def test_reading_goes_on_from_the_offset_of_any_block(long_split: FileSplit) -> None:
    for block in reader("cat").blocks(long_split):
        again = keys(reader("cat").blocks(long_split, block.offset))
        assert again == list(range(block.offset, 50_000))


def test_offset_may_be_the_end(split: FileSplit) -> None:
    assert keys(reader("cat").blocks(split, 3)) == []


def test_a_file_is_one_split(long_split: FileSplit) -> None:
    assert reader("cat").splits(long_split.path, 8) == [long_split]

    with pytest.raises(UsageError, match="is a part of a file"):
        next(reader("cat").blocks(FileSplit(long_split.path, 10)))


def test_threads_run_a_command_each(long_split: FileSplit) -> None:
    shared = reader("cat")
    sums: list[int] = []
    threads = [
        threading.Thread(target=lambda: sums.append(sum(keys(shared.blocks(long_split)))))
        for _ in range(3)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sums == [50_000 * 49_999 // 2] * 3


def failure(command: str, split: FileSplit, stall_limit_s: float = 60.0) -> str:
    with pytest.raises(DataError) as caught:
        list(reader(command, stall_limit_s).blocks(split))
    assert not isinstance(caught.value, BadRowError)
    return str(caught.value)


def test_command_that_fails_is_told_with_its_exit_code_and_last_words(split: FileSplit) -> None:
    message = failure("cat; for i in $(seq 30); do echo word $i >&2; done; exit 3", split)

    head, *tail = message.split("\n")
    assert head.startswith(f"{split.path}: the command 'cat; for i in ")
    assert head.endswith("failed; it ended with exit code 3; its stderr ends with:")
    assert tail == [f"  word {i}" for i in range(11, 31)]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("kill -9 $$", "failed; it was killed by SIGKILL; its stderr ends with: nothing"),
        ("kill -35 $$", "failed; it was killed by signal 35; its stderr ends with: nothing"),
        ("bash -c 'kill -TERM $$'; exit $?", "it ended with exit code 143 (SIGTERM)"),
        ("false | cat", "failed; it ended with exit code 1"),
        ("no-such-command", "it ended with exit code 127; its stderr ends with:\n  bash: "),
        ("printf '1 1 1'; exit 1", "failed; it ended with exit code 1"),
    ],
)
def test_command_that_dies_is_told(split: FileSplit, command: str, message: str) -> None:
    assert message in failure(command, split)


@pytest.mark.parametrize("size", ["split", "long_split"])
def test_command_that_leaves_input_unread_is_told(
    size: str, request: pytest.FixtureRequest
) -> None:
    split = request.getfixturevalue(size)

    assert "did not read all of its input; it ended with exit code 0" in failure("head -n 0", split)


def test_command_that_does_nothing_is_told(long_split: FileSplit) -> None:
    assert (
        "printed nothing and read nothing for 0.2 s; it was still running and was killed"
        in failure("sleep 60", long_split, 0.2)
    )


def test_command_that_closes_its_output_has_to_end(split: FileSplit) -> None:
    message = failure("cat >/dev/null; exec >&-; sleep 60", split, 0.2)

    assert "closed its output, but did not exit within 0.2 s" in message


def test_bad_line_is_told_with_its_number_text_and_fault(long_split: FileSplit) -> None:
    message = failure("echo warned >&2; sed '40000s/.*/1 5 3 8/'", long_split)

    assert (
        "printed a bad line 40000, '1 5 3 8': the count of 'user' (column 2 of 3) is 3" in message
    )
    assert message.endswith("its stderr ends with:\n  warned")


def test_bad_line_keeps_its_number_when_lines_before_it_are_passed_over(
    long_split: FileSplit,
) -> None:
    command = reader("sed '40000s/.*/1 5 3 8/'")

    with pytest.raises(DataError, match="bad line 40000, '1 5 3 8'"):
        list(command.blocks(long_split, 39_990))


def test_line_without_end_is_told(split: FileSplit) -> None:
    assert "printed a line longer than 1048576 bytes" in failure(
        "cat; tr '\\0' x < /dev/zero", split
    )


def test_damaged_file_is_told_before_what_the_command_says_of_it(tmp_path: Path) -> None:
    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress(lines(0, 5000).encode())[:-20])

    assert "part-0.gz: the file is truncated" in failure("cat; exit 1", FileSplit(str(path)))


def test_leaving_early_kills_all_that_the_command_started(
    long_split: FileSplit, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $$ $! > {shlex.quote(str(pids))}; cat; sleep 600"
    blocks = reader(command).blocks(long_split)

    next(blocks)
    running = [is_running(int(pid)) for pid in pids.read_text().split()]
    blocks.close()

    assert running == [True, True]
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))


def test_what_a_command_leaves_behind_is_killed(split: FileSplit, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    rows = keys(
        reader(f"sleep 600 >&- 2>&- & echo $! > {shlex.quote(str(pid))}; cat").blocks(split)
    )

    assert rows == [0, 1, 2]
    wait_until(lambda: not is_running(int(pid.read_text())))


def test_format_of_a_command_takes_its_columns(split: FileSplit) -> None:
    make = piped("awk '{print 1, $6, 2, $4, $4, 1, $2}'", columns=["label", "user", "age"])

    blocks = make(SCHEMA, BadRows(0)).blocks(split)

    assert keys(blocks) == [0, 0, 1, 1, 2, 2]


def test_empty_command_is_refused() -> None:
    with pytest.raises(UsageError, match="the command is '  '"):
        reader("  ")
