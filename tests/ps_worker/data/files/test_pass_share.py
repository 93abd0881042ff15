"""Shares of a pass, by bytes."""

import pytest

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.queue_dataset import PassShare


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
