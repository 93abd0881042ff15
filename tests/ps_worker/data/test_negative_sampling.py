"""Negative down-sampling: which rows are kept, and that no reading of a file keeps others."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, joined, rows_where
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import reader_of
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling, file_label
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.user_code.data_generator import MultiSlotDataGenerator
from ctr_ps.ps_worker.data.user_code.generator_reader import generated
from tests.support.rows import assert_same_rows, numbered_lists, numbered_rows, numbers_of

SCHEMA = Schema(dense=(DenseColumn(name="row"),), slots=("user",))
NUM_ROWS = 40_000
TENTH = NegativeSampling(0.1, seed=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same rows in several formats, of which every fourth is clicked; text in several blocks."""
    folder = tmp_path_factory.mktemp("clicks")
    rows = np.arange(NUM_ROWS)
    text = "".join(
        f"{int(row % 4 == 0)}\t{row}\tuser of a row number {row % 50:030d}\n" for row in rows
    )
    (folder / "a.tsv").write_text(text)
    (folder / "a.tsv.gz").write_bytes(gzip.compress(text.encode(), 1))
    table = pa.table(
        {"click": (rows % 4 == 0).astype(np.int8), "row": rows, "user": (rows % 50).astype(str)}
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=7000)
    return {suffix: f"{folder}/a.{suffix}" for suffix in ("tsv", "tsv.gz", "parquet")}


def dataset_of(
    path: str | list[FileSplit],
    kind=QueueDataset,
    reader_num: int = 1,
    negatives=TENTH,
    format=None,
):
    dataset = kind(SCHEMA, 100, reader_num=reader_num, negatives=negatives, format=format)
    dataset.set_filelist([path] if isinstance(path, str) else path)
    return dataset


def kept(batches) -> list[int]:
    return sorted(int(row) for batch in batches for row in batch.dense[:, 0])


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz", "parquet"])
def test_clicks_are_all_kept_and_a_tenth_of_the_others(files, suffix: str) -> None:
    rows = np.array(kept(dataset_of(files[suffix])))

    others = rows[rows % 4 != 0]
    expected = NUM_ROWS * 3 // 4 / 10
    assert np.count_nonzero(rows % 4 == 0) == NUM_ROWS // 4
    assert others.size == pytest.approx(expected, abs=4 * np.sqrt(0.9 * expected))
    halves = np.count_nonzero(others < NUM_ROWS // 2)  # evenly over the file
    assert halves == pytest.approx(others.size / 2, abs=2 * np.sqrt(others.size))


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz", "parquet"])
def test_rows_do_not_depend_on_epoch_threads_or_memory(files, suffix: str) -> None:
    dataset = dataset_of(files[suffix])
    first = kept(dataset)
    in_memory = dataset_of(files[suffix], InMemoryDataset, reader_num=2)
    in_memory.load_into_memory()

    assert kept(dataset) == first
    assert kept(dataset_of(files[suffix], reader_num=3)) == first
    assert kept(in_memory) == first


class Clicks(MultiSlotDataGenerator):
    """Lines "click row user"."""

    def generate_sample(self, line: str | None) -> list[list[tuple[str, list[int]]]]:
        click, row, user = map(int, (line or "").split())
        return [[("click", [click]), ("row", [row]), ("user", [user])]]


class PairedClicks(MultiSlotDataGenerator):
    """Of each line, two samples."""

    def generate_sample(self, line: str | None) -> list[list[tuple[str, list[int]]]]:
        return [sample for _ in range(2) for sample in Clicks().generate_sample(line)]


LAYOUTS = {
    "tsv": ("{click}\t{row}\t{user}", None),
    "csv": ("{click},{row},{user}", None),
    "multislot": ("1 {row} 1 {user} 1 {click}", None),
    "ffm": ("{click} 0:0:{row} 1:{user}:1", None),
    "generator": ("{click} {row} {user}", generated(Clicks())),
    "generator of pairs": ("{click} {row} {user}", generated(PairedClicks())),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_text_do_not_depend_on_its_splits(tmp_path: Path, layout: str) -> None:
    """So as many workers as one likes train on the same rows of a file that they share."""
    form, format = LAYOUTS[layout]
    path = tmp_path / f"a.{layout}"
    lines = [form.format(click=int(row % 4 == 0), row=row, user=row % 50) for row in range(20_000)]
    path.write_text("\n".join(["click,row,user"] * (layout == "csv") + lines) + "\n")
    reader = reader_of(str(path), SCHEMA, BadRows(), format)

    first, *others = (
        kept(dataset_of(reader.splits(str(path), num_splits), format=format))
        for num_splits in (1, 2, 3, 7)
    )

    assert 5000 < len(first) < 20_000
    assert others == [first] * 3


def test_samples_of_one_line_are_chosen_apart(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    path.write_text("".join(f"0 {row} 1\n" for row in range(5000)))

    rows = kept(dataset_of(str(path), format=generated(PairedClicks())))

    both = len(rows) - len(set(rows))
    assert both == pytest.approx(5000 * 0.01, abs=4 * np.sqrt(5000 * 0.01))


@pytest.mark.parametrize("suffix", ["tsv", "tsv.gz", "parquet"])
def test_reading_resumed_anywhere_keeps_the_same_rows(files, suffix: str) -> None:
    """Compressed text, too, whose stream gives other stretches from another start on."""
    whole = list(dataset_of(files[suffix]).positioned())
    after = [batch for batch, _ in whole]

    for stop in (1, len(whole) // 3, len(whole) - 1):
        resumed = dataset_of(files[suffix]).positioned(whole[stop - 1][1])
        assert_same_rows(joined(after[stop:]), joined([batch for batch, _ in resumed]))


def test_another_seed_and_another_file_keep_other_rows(files, tmp_path: Path) -> None:
    original = Path(files["tsv"])
    copy = tmp_path / original.parent.name / "b.tsv"
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())

    first = kept(dataset_of(files["tsv"]))
    assert kept(dataset_of(str(copy))) != first
    assert kept(dataset_of(str(copy.rename(copy.with_name("a.tsv"))))) == first
    assert kept(dataset_of(files["tsv"], negatives=replace(TENTH, seed=4))) != first


def test_file_is_told_from_others_of_its_name() -> None:
    paths = [
        *(f"clicks/dt={day}/part-0.parquet" for day in (0, 1)),
        *(f"clicks/dt={day}/hour={hour}/part-0.parquet" for day in (0, 1) for hour in (0, 1)),
        *(f"clicks/{day}/part-0.parquet" for day in (0, 1)),
        "part-0.parquet",
    ]

    assert len({file_label(path) for path in paths}) == len(paths)


@pytest.mark.parametrize("rest", ["dt=0/hour=1/part-0.parquet", "train/part-0.parquet"])
def test_file_of_a_data_set_that_moved_is_the_same(rest: str) -> None:
    roots = ["", "/data/", "/mnt/b/", "s3://bucket/a/"]

    assert len({file_label(root + rest) for root in roots}) == 1


def test_kept_negatives_weigh_as_much_as_all() -> None:
    rows = numbered_rows(range(2000), weights=True)
    (labels,) = (rows.labels,)

    sampled = replace(TENTH, rate=0.25).sampled("a", Block(rows, 0))
    unweighted = replace(TENTH, rate=0.25, is_weighted=False).sampled("a", Block(rows, 0))

    assert sampled is not None
    assert unweighted is not None
    numbers = sampled.rows.dense[:, 0].astype(np.int64)
    expected = np.where(
        numbers % 2 == 0, numbers, numbers / 4
    )  # rows weigh a quarter of their number
    np.testing.assert_allclose(sampled.rows.weights, expected, rtol=1e-6)
    assert np.array_equal(numbers_of(unweighted.rows), numbers)
    assert labels is not None


def test_rate_of_1_and_rows_without_labels_are_kept_as_they_are() -> None:
    labelled, unlabelled = numbered_rows(range(9)), numbered_rows(range(9), labels=False)

    for sampling, rows in ((NegativeSampling(1.0), labelled), (TENTH, unlabelled)):
        block = Block(rows, 0)
        assert sampling.sampled("a", block) is block


def test_block_of_which_nothing_is_kept_is_none() -> None:
    negatives = rows_where(numbered_rows(range(0, 8)), np.arange(8) % 2 == 0)

    assert NegativeSampling(1e-9).sampled("a", Block(negatives, 0)) is None


@pytest.mark.parametrize("kind", [numbered_rows, numbered_lists])
def test_rows_of_a_mask_are_those_rows(kind) -> None:
    rows: Batch = kind(range(30))
    is_wanted = np.arange(30) % 3 == 1

    assert_same_rows(kind(np.flatnonzero(is_wanted)), rows_where(rows, is_wanted))
    assert rows_where(rows, np.zeros(30, np.bool_)).size == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, float("nan")])
def test_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="the rate of negatives is"):
        NegativeSampling(rate)
