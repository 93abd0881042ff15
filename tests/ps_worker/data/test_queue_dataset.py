"""A dataset that reads its files while they are trained on."""

import logging
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.queue_dataset import PassShare, QueueDataset

SCHEMA = Schema.numbered(1, 1)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "b", tmp_path / "a"]
    for number, path in enumerate(paths, start=1):
        path.write_text("".join(f"0\t{number}\tx\n" for _ in range(3)))
    return paths


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    """Twelve files; file n has n rows, all of them of the number n."""
    paths = [tmp_path / f"part-{number:02}" for number in range(1, 13)]
    for number, path in enumerate(paths, start=1):
        path.write_text(f"0\t{number}\tx\n" * number)
    return paths


def dataset_of(files: list, batch_size: int = 4, **options: object) -> QueueDataset:
    dataset = QueueDataset(SCHEMA, batch_size, **options)
    dataset.set_filelist(files)
    return dataset


def numbers(batches: Iterator[Batch] | QueueDataset) -> list[float]:
    return [number for batch in batches for number in batch.dense[:, 0].tolist()]


def test_files_are_read_in_the_order_given_and_afresh_in_each_pass(files: list[Path]) -> None:
    dataset = dataset_of([str(file) for file in files])

    for _ in range(2):
        assert [batch.dense[:, 0].tolist() for batch in dataset] == [[1, 1, 1, 2], [2, 2]]
        assert dataset.rows == 6


@pytest.mark.parametrize("change", ["grows", "is truncated", "is replaced", "vanishes"])
def test_file_that_changes_between_two_passes_is_an_error(change: str, files: list[Path]) -> None:
    dataset, path = dataset_of(files), files[1]
    assert len(numbers(dataset)) == 6

    changed(path, change)

    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        numbers(dataset)
    if change != "vanishes":
        now = path.stat().st_size
        assert f"{path} has changed since it was listed: it had 18 bytes of 20" in str(caught.value)
        assert f", and now {now} bytes of 20" in str(caught.value)
    if change == "grows":
        dataset.set_filelist(files)  # listed anew
        assert len(numbers(dataset)) == 7


def test_file_that_changes_while_it_is_read_is_an_error(files: list[Path]) -> None:
    batches = iter(dataset_of(files, batch_size=1))
    next(batches)

    changed(files[0], "grows")

    with pytest.raises(DataError, match="has changed since it was listed"):
        list(batches)


def changed(path: Path, how: str) -> None:
    content = path.read_text()
    match how:
        case "grows":
            path.write_text(content + "0\t9\tx\n")
        case "is truncated":
            path.write_text(content[:-6])
        case "is replaced":
            path.write_text(content.replace("x", "y"))
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # whatever the clock of the disk
        case "vanishes":
            path.unlink()


@pytest.mark.parametrize("shuffle_files", [False, True])
@pytest.mark.parametrize("reader_num", [1, 3, 20])
def test_every_row_is_read_once_by_any_number_of_readers(
    many: list[Path], reader_num: int, shuffle_files: bool
) -> None:
    dataset = dataset_of(many, reader_num=reader_num, shuffle_files=shuffle_files)

    for _ in range(2):
        sizes = []
        found = []
        for batch in dataset:
            sizes.append(batch.size)
            found += batch.dense[:, 0].tolist()
        assert sorted(found) == [number for number in range(1, 13) for _ in range(number)]
        assert dataset.rows == 78
        assert sum(size < 4 for size in sizes) <= reader_num


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides(many: list[Path]) -> None:
    def orders(seed: int) -> list[tuple[float, ...]]:
        dataset = dataset_of(many, shuffle_files=True, seed=seed)
        return [tuple(dict.fromkeys(numbers(dataset))) for _ in range(3)]

    assert orders(1) == orders(1)
    assert len({*orders(1), *orders(2), tuple(range(1, 13))}) == 7


def test_leaving_early_ends_the_readers(many: list[Path]) -> None:
    before = threading.active_count()
    batches = iter(dataset_of(many, batch_size=1, reader_num=3))
    next(batches)
    assert threading.active_count() > before

    batches.close()

    assert threading.active_count() == before


def test_worker_without_files_or_with_a_split_without_rows_has_no_rows(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert list(dataset_of([])) == []
        assert list(dataset_of([FileSplit(str(files[0]), 1, 2)])) == []

    assert caplog.messages == []


@pytest.mark.parametrize("is_first_labelled", [True, False])
def test_files_with_and_without_labels_are_refused_by_name(
    files: list[Path], is_first_labelled: bool
) -> None:
    files[1].write_text("1\tx\n")

    with pytest.raises(DataError, match=rf"{files[1]} has rows without labels, but {files[0]} has"):
        list(dataset_of(files if is_first_labelled else files[::-1]))


def test_dataset_without_files_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"set_filelist\(files\)"):
        iter(QueueDataset(SCHEMA, batch_size=4))


def test_pattern_instead_of_files_is_refused() -> None:
    with pytest.raises(UsageError, match="'part-\\*', expected a list"):
        QueueDataset(SCHEMA, batch_size=4).set_filelist("part-*")


@pytest.mark.parametrize(
    "name", ["batch_size", "thread_num", "bad_row_limit", "reader_num", "seed"]
)
def test_number_too_small_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is -1"):
        QueueDataset(SCHEMA, **{"batch_size": 1, name: -1})


def test_unknown_format_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="unknown format 'critio'"):
        QueueDataset(SCHEMA, 1, format="critio")


def test_position_after_the_last_batch_is_the_end_of_the_epoch(files: list[Path]) -> None:
    dataset = dataset_of(files)
    *_, (_, position) = dataset.positioned()

    assert list(dataset.positioned(position)) == []
    assert [at.epoch for _, at in dataset.positioned()] == [2, 2]


def test_position_of_other_files_or_another_seed_is_refused(files: list[Path]) -> None:
    dataset = dataset_of(files)
    _, start = next(dataset.positioned())

    with pytest.raises(DataError, match="beyond the end of 2 files"):
        next(dataset.positioned(replace(start, split=3)))
    with pytest.raises(DataError, match="beyond the end of its split by 6 rows"):
        next(dataset.positioned(replace(start, offset=0, skip=9)))
    with pytest.raises(UsageError, match="has seed 3, but the dataset has 0"):
        dataset.positioned(replace(start, seed=3))
    for other in (
        dataset_of(files[:1]),
        dataset_of(files[::-1]),
        dataset_of(files, shuffle_files=True),
    ):
        with pytest.raises(UsageError, match="another order of files or another shuffle_files"):
            other.positioned(start)


def test_positions_are_of_one_reader(files: list[Path]) -> None:
    with pytest.raises(UsageError, match="reader_num is 2, expected 1: batches of several"):
        dataset_of(files, reader_num=2).positioned()


def test_command_that_cannot_be_is_refused_before_a_file_is_read(files: list[Path]) -> None:
    with pytest.raises(UsageError, match="the command is ''"):
        dataset_of(files).set_pipe_command("")
    with pytest.raises(UsageError, match="C9"):
        dataset_of(files).set_pipe_command("cat", columns=["click", "I1", "C9"])


def test_head_is_of_all_rows_in_order_and_no_pass(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    files[0].write_text("x\ty\tz\n" + files[0].read_text())
    dataset = dataset_of(
        files, shuffle_files=True, bad_row_limit=1, negatives=NegativeSampling(0.01, seed=0)
    )

    assert numbers(dataset.head()) == [1, 1, 1, 2, 2, 2]

    assert (dataset.rows, dataset.bad_rows) == (0, 0)
    assert not caplog.messages
    (_, position), *_ = dataset_of(files, bad_row_limit=1).positioned()
    again = dataset_of(files, bad_row_limit=1)
    list(again.head())
    assert next(again.positioned())[1] == position


def test_head_ends_where_a_pass_would(files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """It does not go through all files for one good row."""
    files[1].write_text("x\ty\tz\n" * 3)
    dataset = dataset_of(files, bad_row_limit=2)
    dataset.set_filelist([*files, *files[:1]])

    assert numbers(dataset.head()) == [1, 1, 1]
    assert not caplog.messages


def shares(splits: list[FileSplit], sizes: dict[str, int]) -> PassShare:
    return PassShare(
        splits,
        has_byte_offsets=lambda path: not path.endswith(".parquet"),
        size_of=sizes.__getitem__,
    )


def test_bytes_of_text_count_within_a_file() -> None:
    share = shares([FileSplit("a"), FileSplit("b")], {"a": 100, "b": 300})

    assert [share.at(0, None), share.at(0, 50), share.at(1, None), share.at(1, 150)] == [
        0.0,
        0.125,
        0.25,
        0.625,
    ]
    assert share.at(2, None) == 1.0


def test_split_is_its_stretch_of_the_file() -> None:
    share = shares([FileSplit("a", 60, None), FileSplit("b", 20, 80)], {"a": 100, "b": 300})

    assert share.at(0, 80) == 0.2
    assert share.at(1, 20) == 0.4
    assert share.at(1, 90) == 1.0  # the last line of a split ends behind it


@pytest.mark.parametrize("suffix", [".gz", ".parquet"])
def test_file_whose_positions_are_no_bytes_counts_when_it_is_read(suffix: str) -> None:
    paths = [f"{number}{suffix}" for number in range(20)]
    share = shares([FileSplit(path) for path in paths], dict.fromkeys(paths, 10))

    assert share.at(5, 7) == share.at(5, None) == 0.25


@pytest.mark.parametrize("suffix", [".gz", ".parquet"])
def test_nothing_is_said_where_such_a_file_is_much_of_the_pass(suffix: str) -> None:
    share = shares([FileSplit("a"), FileSplit(f"b{suffix}")], {"a": 100, f"b{suffix}": 100})

    assert share.at(0, 50) is None


def test_nothing_is_said_without_sizes() -> None:
    def refuse(path: str) -> int:
        raise DataError(f"{path}: gone")

    splits = [FileSplit("a")]
    assert PassShare([], has_byte_offsets=lambda _: True).at(0, None) is None
    assert PassShare(splits, has_byte_offsets=lambda _: True, size_of=refuse).at(0, 1) is None
    assert shares(splits, {"a": 0}).at(0, None) is None
