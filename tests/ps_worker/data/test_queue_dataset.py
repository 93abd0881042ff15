"""A dataset that reads its files while they are trained on."""

from pathlib import Path

import pytest

from ctr_model.schema import Schema
from protos.errors import BadRowError, UsageError
from ps_worker.data.queue_dataset import QueueDataset

SCHEMA = Schema.numbered(1, 1)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "b", tmp_path / "a"]
    for number, path in enumerate(paths, start=1):
        path.write_text("".join(f"0\t{number}\tx\n" for _ in range(3)))
    return paths


def test_files_are_read_in_the_order_given_and_anew_in_each_pass(files: list[Path]) -> None:
    dataset = QueueDataset(SCHEMA, batch_size=4)
    dataset.set_filelist([str(file) for file in files])

    for _ in range(2):
        assert [batch.dense[:, 0].tolist() for batch in dataset] == [[1, 1, 1, 2], [2, 2]]


def test_bad_rows_count_anew_in_each_pass(files: list[Path]) -> None:
    files[0].write_text("0\tone\tx\n")
    dataset = QueueDataset(SCHEMA, batch_size=4, bad_row_limit=1)
    dataset.set_filelist(files)
    strict = QueueDataset(SCHEMA, batch_size=4)
    strict.set_filelist(files)

    for _ in range(2):
        assert [batch.size for batch in dataset] == [3]
    with pytest.raises(BadRowError):
        list(strict)


def test_dataset_without_files_says_what_to_call() -> None:
    with pytest.raises(UsageError, match=r"set_filelist\(files\)"):
        iter(QueueDataset(SCHEMA, batch_size=4))


def test_pattern_instead_of_files_is_refused() -> None:
    with pytest.raises(UsageError, match="'part-\\*', expected a list"):
        QueueDataset(SCHEMA, batch_size=4).set_filelist("part-*")


@pytest.mark.parametrize("name", ["batch_size", "thread_num", "bad_row_limit"])
def test_number_too_small_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is -1"):
        QueueDataset(SCHEMA, **{"batch_size": 1, name: -1})
