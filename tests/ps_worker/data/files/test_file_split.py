"""Assignment of files and splits to workers."""

import functools
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import (
    FileSplit,
    file_splits,
    shown,
    shuffled,
    split_files,
)
from ctr_ps.ps_worker.data.text.criteo import CriteoReader

READER = CriteoReader(Schema.numbered(1, 1), BadRows())

each_example = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(folder: Path, sizes: dict[str, int]) -> list[str]:
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    return [str(folder / name) for name in sizes]


def num_bytes(split: FileSplit) -> int:
    size = Path(split.path).stat().st_size
    return (size if split.stop is None else split.stop) - split.start


@each_example
@given(
    sizes=st.lists(st.integers(0, 30), max_size=8),
    num_workers=st.integers(1, 5),
    order=st.randoms(use_true_random=False),
)
def test_every_file_goes_to_exactly_one_worker(
    tmp_path: Path, sizes: list[int], num_workers: int, order: Random
) -> None:
    files = write(tmp_path, {f"{n}.tsv": size for n, size in enumerate(sizes)})

    dealt = []
    for worker in range(num_workers):
        order.shuffle(files)  # workers may list files in any order
        own = split_files(files, worker, num_workers)
        assert own == sorted(own, key=files.index)
        dealt.append(own)

    assert sorted(path for own in dealt for path in own) == sorted(files)
    loads = [sum(Path(path).stat().st_size for path in own) for own in dealt]
    assert max(loads) - min(loads) <= max([*sizes, 1]) + len(sizes)


def test_largest_files_are_dealt_first(tmp_path: Path) -> None:
    a, b, c, d = write(tmp_path, {"a": 10, "b": 10, "c": 30, "d": 20})

    assert split_files([a, b, c, d], 0, 2) == [b, c]
    assert split_files([a, b, c, d], 1, 2) == [a, d]


def test_worker_reads_its_own_in_the_order_given(tmp_path: Path) -> None:
    b, c, a = write(tmp_path, {"b": 100, "c": 400, "a": 300})

    assert split_files([b, c, a], 0, 1) == [b, c, a]
    assert [split_files([c, b, a], worker, 2) for worker in (0, 1)] == [[c], [b, a]]
    assert [shown(split) for split in file_splits(READER.splits, [b, a], 1, 3)] == [
        shown(FileSplit(b, 33, 66)),
        shown(FileSplit(a, 100, 200)),
    ]


def test_empty_files_are_spread(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": 0, "b": 0, "c": 0, "d": 0})

    assert len(split_files(files, 0, 2)) == 2


@pytest.mark.parametrize(("worker", "num_workers"), [(2, 2), (-1, 2), (0, 0)])
def test_worker_outside_the_job_is_refused(worker: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match=f"worker_index is {worker}"):
        split_files([], worker, num_workers)
    with pytest.raises(ValueError, match=f"worker_index is {worker}"):
        file_splits(READER.splits, [], worker, num_workers)


def test_file_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": 10, "b": 10})

    for split in (split_files, functools.partial(file_splits, READER.splits)):
        with pytest.raises(UsageError, match="b' is listed 2 times"):
            split([*files, files[1]], 0, 2)


def test_file_that_vanished_is_named(tmp_path: Path) -> None:
    for num_workers in (1, 2):
        with pytest.raises(DataError, match=r"cannot read .*absent"):
            file_splits(READER.splits, [str(tmp_path / "absent")], 0, num_workers)
    with pytest.raises(DataError, match=r"cannot read .*absent"):
        split_files([str(tmp_path / "absent")], 0, 1)


def test_with_a_file_for_each_worker_splits_are_whole_files(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": 10, "b": 30, "c": 20})

    splits = [file_splits(READER.splits, files, worker, 2) for worker in range(2)]

    assert [[shown(split) for split in own] for own in splits] == [
        split_files(files, 0, 2),
        split_files(files, 1, 2),
    ]


def test_empty_file_is_none_for_a_worker(tmp_path: Path) -> None:
    full, empty = write(tmp_path, {"full": 100, "empty": 0})

    dealt = [file_splits(READER.splits, [full, empty], worker, 2) for worker in range(2)]

    assert dealt == [[FileSplit(full, 0, 50), FileSplit(empty)], [FileSplit(full, 50)]]


@each_example
@given(sizes=st.lists(st.integers(1, 300), max_size=3), num_workers=st.integers(4, 7))
def test_with_fewer_files_than_workers_every_byte_goes_to_one_of_them(
    tmp_path: Path, sizes: list[int], num_workers: int
) -> None:
    files = write(tmp_path, {f"{n}.tsv": size for n, size in enumerate(sizes)})

    dealt = [
        file_splits(READER.splits, files, worker, num_workers) for worker in range(num_workers)
    ]

    splits = sorted((split for own in dealt for split in own), key=lambda p: (p.path, p.start))
    for path in files:
        own = [split for split in splits if split.path == path]
        assert own[0].start == 0
        assert own[-1].stop is None
        assert [split.stop for split in own[:-1]] == [split.start for split in own[1:]]
    loads = [sum(map(num_bytes, own)) for own in dealt]
    assert max(loads) - min(loads) <= max(map(num_bytes, splits), default=0) + len(splits)


def test_equal_files_are_shared_out_evenly_over_one_worker_more(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": 400, "b": 400, "c": 400})

    loads = [sum(map(num_bytes, file_splits(READER.splits, files, w, 4))) for w in range(4)]

    assert loads == [300, 300, 300, 300]


def test_file_that_cannot_be_cut_goes_to_one_worker(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {"a.gz": 400})

    assert file_splits(READER.splits, [path], 0, 2) == [FileSplit(path)]
    assert file_splits(READER.splits, [path], 1, 2) == []


def test_order_of_an_epoch_depends_on_seed_and_epoch_alone() -> None:
    splits = [FileSplit(str(number)) for number in range(20)]

    orders = [shuffled(splits, seed, epoch) for seed in (1, 2) for epoch in (1, 2)]

    assert shuffled(splits, 1, 1) == orders[0]
    assert all(sorted(order, key=splits.index) == splits for order in orders)
    assert len({tuple(order) for order in [splits, *orders]}) == 5


def test_order_is_the_same_in_every_release() -> None:
    splits = [FileSplit(str(number)) for number in range(6)]

    assert "".join(split.path for split in shuffled(splits, 7, 1)) == "340152"


def test_split_is_shown_with_its_range() -> None:
    assert shown(FileSplit("a")) == "a"
    assert shown(FileSplit("a", 0, 9)) == "a[0:9]"
    assert shown(FileSplit("a", 9)) == "a[9:]"
