"""The in-memory dataset: loading, shuffling, resuming."""

import itertools
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError, DataError, ProtocolError, UsageError
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data import in_memory_dataset
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, DataPosition, joined
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.rows_in_memory import MAX_KEYS
from tests.support.peers import StoreFleet, fleets_of, on_each
from tests.support.rows import (
    NUM_DENSE,
    NUM_SLOTS,
    assert_same_rows,
    numbered_lists,
    numbered_rows,
    numbers_of,
)

SCHEMA = Schema.numbered(NUM_DENSE, NUM_SLOTS)
KINDS = [numbered_rows, numbered_lists]


class RangeReader:
    """Reads "files" whose names are ranges of numbers, as 10-25, seven rows a block."""

    def __init__(self, kind=numbered_rows, gate: threading.Event | None = None) -> None:
        self._kind = kind
        self._gate = gate

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return [FileSplit(path)]

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        if self._gate is not None:
            assert self._gate.wait(10)
        start, stop = map(int, split.path.split("-"))
        for first in range(start, stop, 7):
            yield Block(self._kind(range(first, min(first + 7, stop))), first)


def dataset_of(
    *files: str, batch_size: int = 10, kind=numbered_rows, **settings
) -> InMemoryDataset:
    """Returns a dataset with numbered rows, loaded."""
    reader = RangeReader(kind)
    dataset = InMemoryDataset(SCHEMA, batch_size, format=lambda *_: reader, **settings)
    dataset.set_filelist(files)
    dataset.load_into_memory()
    return dataset


def numbers(dataset: InMemoryDataset) -> list[int]:
    return [int(each) for batch in dataset for each in numbers_of(batch)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_in_the_order_of_the_files_in_batches(kind) -> None:
    dataset = dataset_of("0-25", "90-97", "40-60", kind=kind)

    batches = list(dataset)

    assert [batch.size for batch in batches] == [10] * 5 + [2]
    assert_same_rows(kind([*range(25), *range(90, 97), *range(40, 60)]), joined(batches))
    assert dataset.get_memory_data_size() == 52


@pytest.mark.parametrize("kind", KINDS)
def test_local_shuffle_keeps_the_rows_and_changes_their_order(kind) -> None:
    dataset = dataset_of("0-500", kind=kind)

    dataset.local_shuffle()

    first = numbers(dataset)
    assert first != list(range(500))
    assert sorted(first) == list(range(500))
    assert numbers(dataset) == first
    dataset.local_shuffle()
    assert numbers(dataset) != first


def test_shuffles_depend_on_seed_and_number_alone() -> None:
    def shuffled(seed: int, times: int, reader_num: int) -> list[int]:
        dataset = dataset_of("0-50", "50-100", "100-150", seed=seed, reader_num=reader_num)
        for _ in range(times):
            dataset.local_shuffle()
        return numbers(dataset)

    assert shuffled(1, 2, 1) == shuffled(1, 2, 3)
    assert shuffled(1, 2, 1) != shuffled(2, 2, 1)
    assert shuffled(1, 2, 1) != shuffled(1, 1, 1)


def test_shuffle_is_fair() -> None:
    """Where a row ends is as likely everywhere: chi-square of 20 places, 400 seeds, far in the tail."""
    places = np.zeros(20)
    dataset = dataset_of("0-20", batch_size=20)
    for _ in range(400):
        dataset.local_shuffle()
        places[numbers(dataset).index(7)] += 1

    assert np.sum((places - 20) ** 2 / 20) < 43.8  # 0.001 of 19 degrees of freedom


@pytest.mark.parametrize("kind", KINDS)
def test_slots_shuffle_swaps_one_set_of_slots_at_a_time(kind) -> None:
    dataset = dataset_of("0-200", batch_size=200, kind=kind)
    (before,) = dataset

    dataset.slots_shuffle(["C1"])
    dataset.slots_shuffle(["C2", "C3"])
    (swapped,) = dataset

    np.testing.assert_array_equal(before.dense, swapped.dense)
    own, given_rows = slots_of(before), slots_of(swapped)
    assert own[0] == given_rows[0]
    pairs, swapped_pairs = list(zip(*own[1:], strict=True)), list(zip(*given_rows[1:], strict=True))
    assert sum(each == other for each, other in zip(pairs, swapped_pairs, strict=True)) < 100
    assert sorted(pairs) == sorted(swapped_pairs)
    dataset.slots_shuffle([])
    assert_same_rows(before, next(iter(dataset)))


def slots_of(rows: Batch) -> list[list[tuple[int, ...]]]:
    """Returns for each slot the keys of each row."""
    pieces = np.split(rows.keys, rows.offsets[1:-1])
    return [[tuple(keys.tolist()) for keys in pieces[slot::NUM_SLOTS]] for slot in range(NUM_SLOTS)]


@given(
    batch_size=st.integers(1, 40),
    shuffles=st.integers(0, 2),
    given_batches=st.integers(0, 12),
    kind=st.sampled_from(KINDS),
)
def test_position_resumes_with_exactly_the_rest(batch_size, shuffles, given_batches, kind) -> None:
    def dataset() -> InMemoryDataset:
        fresh = dataset_of("0-60", "60-100", batch_size=batch_size, kind=kind, seed=5)
        for _ in range(shuffles):
            fresh.local_shuffle()
        return fresh

    batches = list(dataset().positioned())
    given_batches = min(given_batches, len(batches) - 1)
    position = DataPosition.from_json(batches[given_batches][1].to_json())
    rest = [batch for batch, _ in dataset().positioned(position)]

    assert len(rest) == len(batches) - given_batches - 1
    for (expected, _), actual in zip(batches[given_batches + 1 :], rest, strict=True):
        assert_same_rows(expected, actual)


def test_position_may_skip_rows() -> None:
    dataset = dataset_of("0-60", batch_size=100)

    *_, (_, end) = dataset.positioned()

    ((rest, _),) = dataset.positioned(replace(end, offset=10, skip=5))

    assert_same_rows(numbered_rows(range(15, 60)), rest)


def test_position_of_other_shuffles_is_refused() -> None:
    dataset = dataset_of("0-60", seed=1)
    *_, (_, position) = dataset.positioned()
    dataset.local_shuffle()

    with pytest.raises(UsageError, match="seed 1 and 0 shuffles, but the dataset has seed 1 and 1"):
        dataset.positioned(position)
    with pytest.raises(UsageError, match="seed 2 and 1 shuffles"):
        dataset.positioned(replace(position, epoch=1, seed=2))
    with pytest.raises(DataError, match="beyond the end of 60 rows"):
        dataset.positioned(replace(position, epoch=1, seed=1, offset=61))
    with pytest.raises(UsageError, match="belongs to other files, not the loaded"):
        dataset_of("0-61", seed=1).positioned(position)


def test_pass_goes_on_with_its_rows_whatever_happens_meanwhile() -> None:
    dataset = dataset_of("0-60")
    batches = iter(dataset)
    first = next(batches)

    dataset.local_shuffle()
    dataset.release_memory()

    assert_same_rows(numbered_rows(range(60)), joined([first, *batches]))


def test_pass_ends_with_an_error_once_its_rows_are_dealt_to_others() -> None:
    def work(fleet: StoreFleet) -> str:
        dataset = dataset_of("0-300")
        batches = iter(dataset)
        next(batches)
        dataset.global_shuffle(fleet)
        with pytest.raises(UsageError) as raised:
            next(batches)
        return str(raised.value)

    for message in on_each(work, fleets_of([ParameterStore(num_workers=2)] * 2)):
        assert "in the middle of this pass and sent its rows to other workers" in message


def test_rows_are_loaded_in_the_background() -> None:
    gate = threading.Event()
    dataset = InMemoryDataset(SCHEMA, 10, format=lambda *_: RangeReader(gate=gate))
    dataset.set_filelist(["0-30"])

    dataset.preload_into_memory()
    with pytest.raises(UsageError, match=r"wait_preload_done\(\) before dataset.local_shuffle"):
        dataset.local_shuffle()
    with pytest.raises(UsageError, match=r"wait_preload_done\(\) before another loading"):
        dataset.load_into_memory()
    gate.set()
    dataset.wait_preload_done()

    assert numbers(dataset) == list(range(30))
    with pytest.raises(UsageError, match=r"preload_into_memory\(\) before"):
        dataset.wait_preload_done()


def test_error_of_the_background_is_raised_by_who_waits(tmp_path) -> None:
    (tmp_path / "part-0").write_text("not a row\n")
    dataset = InMemoryDataset(SCHEMA, 10)
    dataset.set_filelist([tmp_path / "part-0"])
    dataset.preload_into_memory()

    with pytest.raises(BadRowError, match="part-0:1: 1 column"):
        dataset.wait_preload_done()
    with pytest.raises(UsageError, match=r"load_into_memory\(\) before a pass"):
        iter(dataset)


def test_list_that_is_too_long_names_its_file(tmp_path) -> None:
    path = tmp_path / "long.multislot"
    path.write_text(f"1 0 {MAX_KEYS + 1} {'7 ' * (MAX_KEYS + 1)} 1 1\n")
    dataset = InMemoryDataset(Schema.numbered(1, 1), 10)
    dataset.set_filelist([path])

    with pytest.raises(DataError, match=rf"{path}: slot 1 of a row has {MAX_KEYS + 1} values"):
        dataset.load_into_memory()


def test_released_rows_are_gone() -> None:
    dataset = dataset_of("0-30")

    dataset.release_memory()

    assert dataset.get_memory_data_size() == 0
    with pytest.raises(UsageError, match=r"load_into_memory\(\) before dataset.local_shuffle"):
        dataset.local_shuffle()


def test_rows_are_loaded_afresh_with_shuffles_from_the_start() -> None:
    dataset = dataset_of("0-300", seed=3)
    dataset.local_shuffle()
    first = numbers(dataset)

    dataset.load_into_memory()
    assert numbers(dataset) == list(range(300))
    dataset.local_shuffle()

    assert numbers(dataset) == first


def test_no_files_are_no_rows() -> None:
    dataset = InMemoryDataset(SCHEMA, 10)
    with pytest.raises(UsageError, match="set_filelist"):
        dataset.load_into_memory()

    dataset.set_filelist([])
    dataset.load_into_memory()
    assert list(dataset) == []


def test_loading_says_how_far_it_is(caplog) -> None:
    clock = itertools.count(0.0, in_memory_dataset.PROGRESS_EVERY_S / 2).__next__
    with caplog.at_level(logging.INFO):
        in_memory_dataset.load_rows(
            [FileSplit("0-14"), FileSplit("20-27")],
            SCHEMA,
            format=lambda *_: RangeReader(),
            bad_rows=BadRows(),
            reader_num=1,
            clock=clock,
        )

    # The reader may be ahead of what was stored.
    assert re.search(r"loading into memory: files=[012]/2 rows=14 MB=0", caplog.text)
    assert "loaded into memory: files=2/2 rows=21 MB=0 rows/s=" in caplog.text


def test_unknown_slot_is_refused() -> None:
    dataset = dataset_of("0-30")

    with pytest.raises(UsageError, match="no slot 'C9', expected one of C1, C2, C3"):
        dataset.slots_shuffle(["C1", "C9"])


# With other workers


def test_global_shuffle_deals_all_rows_in_an_order_of_the_seed() -> None:
    files = [["0-9000"], ["9000-9100", "9100-20000"]]

    def shuffled(seed: int, reader_num: int = 1) -> list[list[int]]:
        def work(fleet: StoreFleet) -> list[int]:
            dataset = dataset_of(*files[fleet.worker], seed=seed, reader_num=reader_num)
            dataset.global_shuffle(fleet)
            size = dataset.get_memory_data_size()
            assert size == dataset.get_shuffle_data_size() == len(numbers(dataset))
            assert dataset.get_memory_data_size(fleet) == 20_000
            assert dataset.get_shuffle_data_size(fleet) == 20_000
            return numbers(dataset)

        return on_each(work, fleets_of([ParameterStore(num_workers=2)] * 2))

    first = shuffled(1)

    assert sorted(first[0] + first[1]) == list(range(20_000))
    assert all(abs(len(each) - 10_000) < 200 for each in first)
    for each in first:
        assert abs(np.corrcoef(each, range(len(each)))[0, 1]) < 0.05
    on_first = np.isin(np.arange(18_000), first[0])
    assert (
        0.45 < np.mean(on_first[:9_000] == on_first[9_000:]) < 0.55
    )  # each worker draws for itself
    assert shuffled(1, reader_num=2) == first
    assert shuffled(2) != first


def test_global_shuffle_without_others_is_a_local_one() -> None:
    dataset, other = dataset_of("0-300"), dataset_of("0-300")

    dataset.global_shuffle()
    other.local_shuffle()

    assert numbers(dataset) == numbers(other)
    assert (dataset.get_shuffle_data_size(), other.get_shuffle_data_size()) == (300, 0)


def test_rows_of_a_shuffle_that_failed_must_be_loaded_again() -> None:
    store = ParameterStore(num_workers=2)
    store.leave(1, step=0)
    dataset = dataset_of("0-300")

    with pytest.raises(ProtocolError, match="rows are shuffled for 1 worker, but"):
        dataset.global_shuffle(StoreFleet(store, 0, 2))

    with pytest.raises(UsageError, match="load_into_memory"):
        iter(dataset)


def test_head_is_of_the_rows_in_memory(tmp_path) -> None:
    """Their files may have been removed since."""
    (tmp_path / "a").write_text("1\t5\tx\n0\t6\ty\n")
    dataset = InMemoryDataset(Schema.numbered(1, 1), batch_size=4)
    dataset.set_filelist([tmp_path / "a"])
    dataset.load_into_memory()
    (tmp_path / "a").unlink()

    assert [batch.dense[:, 0].tolist() for batch in dataset.head()] == [[5.0, 6.0]]
