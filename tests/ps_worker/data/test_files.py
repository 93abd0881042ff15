"""Which files match, and which worker reads them."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.errors import DataError
from ps_worker.data.files import files_of_worker, matching_files


def touch(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


def write(folder: Path, sizes: dict[str, int]) -> list[Path]:
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    return [folder / name for name in sizes]


def test_matches_are_sorted_by_name(tmp_path: Path) -> None:
    b, a, _ = touch(tmp_path, "b.tsv", "a.tsv", "c.txt")

    assert matching_files(str(tmp_path / "*.tsv")) == [a, b]


def test_file_that_two_patterns_match_is_read_once(tmp_path: Path) -> None:
    a, b = touch(tmp_path, "a.tsv", "b.tsv")

    assert matching_files([str(b), str(tmp_path / "*")]) == [a, b]


def test_two_stars_match_any_number_of_folders(tmp_path: Path) -> None:
    paths = touch(tmp_path, "a.tsv", "day/b.tsv", "day/hour/c.tsv")

    assert matching_files(str(tmp_path / "**" / "*.tsv")) == paths


def test_comma_is_part_of_a_name(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a,b.tsv")

    assert matching_files(str(path)) == [path]


def test_pattern_without_match_is_named(tmp_path: Path) -> None:
    (path,) = touch(tmp_path, "a.tsv")

    with pytest.raises(DataError, match=r"no file matches 'absent\*'"):
        matching_files([str(path), "absent*"])


def test_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder: ask for what is in it"):
        matching_files(str(tmp_path))


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    for worker_index in range(num_workers):
        order.shuffle(files)  # workers may list files in any order
        own = files_of_worker(files, worker_index, num_workers)
        assert own == sorted(own)
        dealt.append(own)

    assert sorted(path for own in dealt for path in own) == sorted(files)
    loads = [sum(path.stat().st_size for path in own) for own in dealt]
    assert max(loads) - min(loads) <= max([*sizes, 1]) + len(sizes)


def test_largest_files_are_dealt_first(tmp_path: Path) -> None:
    a, b, c, d = write(tmp_path, {"a": 10, "b": 10, "c": 30, "d": 20})

    assert files_of_worker([a, b, c, d], 0, 2) == [b, c]
    assert files_of_worker([a, b, c, d], 1, 2) == [a, d]


def test_worker_may_get_no_file(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": 10})

    assert files_of_worker(files, 1, 2) == []


def test_empty_files_are_spread(tmp_path: Path) -> None:
    files = write(tmp_path, {"a": 0, "b": 0, "c": 0, "d": 0})

    assert len(files_of_worker(files, 0, 2)) == 2


@pytest.mark.parametrize(("worker_index", "num_workers"), [(2, 2), (-1, 2), (0, 0)])
def test_worker_outside_the_job_is_refused(worker_index: int, num_workers: int) -> None:
    with pytest.raises(ValueError, match=f"worker_index is {worker_index}"):
        files_of_worker([], worker_index, num_workers)


def test_file_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent"):
        files_of_worker([tmp_path / "absent"], 0, 1)
