"""Generated files: the same bytes again, a report that fits, and rows that can be learnt from."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from ctr_ps.ctr_model.schema import Schema, criteo_schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.extras.data_tools.generate import (
    CLICK_RATE,
    LOGIT_DEVIATION,
    PlantedModel,
    PlantedReport,
    PlantedRows,
    criteo_text,
    generate,
)


def small(folder: Path, **changes: int) -> PlantedReport:
    arguments = {"rows": 500, "test_rows": 200, "files": 3, "test_files": 1, "seed": 5} | changes
    return generate(folder, **arguments)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def read(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.uint64]]:
    """Returns labels [R] and keys [R, S]."""
    dataset = QueueDataset(criteo_schema(), batch_size=100_000)
    dataset.set_filelist(sorted(folder.glob("*.tsv")))
    (batch,) = dataset
    assert batch.labels is not None
    return batch.labels, batch.keys.reshape(batch.size, batch.num_slots)


def test_rows_are_dealt_evenly_over_the_files(tmp_path: Path) -> None:
    small(tmp_path)

    lines = {name: text.count(b"\n") for name, text in contents(tmp_path).items()}
    del lines["planted.json"], lines["schema.toml"]
    assert lines == {
        "train/part-000.tsv": 166,
        "train/part-001.tsv": 167,
        "train/part-002.tsv": 167,
        "test/part-000.tsv": 200,
    }


def test_files_differ_from_each_other(tmp_path: Path) -> None:
    small(tmp_path, rows=400, files=2, test_rows=200)

    first, second, test = (
        (tmp_path / name).read_bytes()
        for name in ("train/part-000.tsv", "train/part-001.tsv", "test/part-000.tsv")
    )
    assert len({first, second, test}) == 3


def test_second_call_replaces_what_the_first_wrote(tmp_path: Path) -> None:
    small(tmp_path / "twice", files=5)
    small(tmp_path / "twice")
    small(tmp_path / "once")

    assert contents(tmp_path / "twice") == contents(tmp_path / "once")


@pytest.mark.parametrize(
    ("name", "is_generated_before"),
    [("train/part-000.tsv", False), ("test/part-mine.tsv", True), ("train/part-001.tsv.gz", True)],
)
def test_data_of_others_is_neither_replaced_nor_mixed_in(
    name: str, is_generated_before: bool, tmp_path: Path
) -> None:
    if is_generated_before:
        small(tmp_path)
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    before = sorted(tmp_path.glob("**/*"))

    with pytest.raises(UsageError, match=f"{mine.name}.* was not written by this command"):
        small(tmp_path)

    assert sorted(tmp_path.glob("**/*")) == before
    assert mine.read_text() == "mine"


def test_report_is_stored(tmp_path: Path) -> None:
    report = small(tmp_path)

    stored = json.loads((tmp_path / "planted.json").read_text())
    assert PlantedReport(**stored) == report
    assert (report.rows, report.test_rows, report.seed) == (500, 200, 5)
    assert report.click_rate == read(tmp_path / "test")[0].mean()


def test_default_bytes_are_pinned(tmp_path: Path) -> None:
    """Numbers in the documents were measured on them."""
    small(tmp_path)

    digest = hashlib.sha256((tmp_path / "train" / "part-000.tsv").read_bytes()).hexdigest()
    assert digest == ("1fab52db52f8f06b6d84cf502a5e0c77de7058f32c2c3bba24c37c9896eb91e5")


def test_schema_of_the_rows_is_written(tmp_path: Path) -> None:
    small(tmp_path / "default")
    small(tmp_path / "three", num_slots=3)

    three = Schema.load(tmp_path / "three" / "schema.toml")
    line = (tmp_path / "three" / "train" / "part-000.tsv").read_text().split("\n")[0]
    assert Schema.load(tmp_path / "default" / "schema.toml") == criteo_schema()
    assert (three.dense, three.slots) == (criteo_schema().dense, ("C1", "C2", "C3"))
    assert line.count("\t") == 13 + 3


def test_larger_exponent_makes_frequent_values_more_frequent(tmp_path: Path) -> None:
    def largest_share(zipf_exponent: float) -> float:
        generate(
            tmp_path,
            rows=4000,
            test_rows=100,
            files=1,
            test_files=1,
            seed=5,
            zipf_exponent=zipf_exponent,
        )
        lines = (tmp_path / "train" / "part-000.tsv").read_text().splitlines()
        ((_, count),) = Counter(line.split("\t")[-1] for line in lines).most_common(1)
        return count / len(lines)

    assert largest_share(0.0) < 0.01 < largest_share(1.1) < 0.3 < largest_share(2.0)


def test_reported_best_is_that_of_the_true_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[PlantedRows] = []

    class Recorder(PlantedModel):
        def draw(self, rng: np.random.Generator, num_rows: int) -> PlantedRows:
            drawn.append(super().draw(rng, num_rows))
            return drawn[-1]

    monkeypatch.setattr("ctr_ps.ps_worker.extras.data_tools.generate.PlantedModel", Recorder)
    report = small(tmp_path, files=1)

    _, test = drawn
    assert report.best_auc == pytest.approx(roc_auc_score(test.clicks, test.probabilities))
    assert report.best_log_loss == pytest.approx(log_loss(test.clicks, test.probabilities))
    np.testing.assert_array_equal(read(tmp_path / "test")[0], test.clicks)


def test_truth_can_be_learnt_but_not_beaten(tmp_path: Path) -> None:
    """Naive Bayes over the keys alone, in one pass, comes near the best."""
    report = generate(tmp_path, rows=40_000, test_rows=10_000, files=1, test_files=1, seed=1)
    labels, keys = read(tmp_path / "train")
    test_labels, test_keys = read(tmp_path / "test")

    unique, inverse = np.unique(keys, return_inverse=True)
    shows = np.bincount(inverse.ravel())
    clicks = np.bincount(inverse.ravel(), np.repeat(labels, keys.shape[1]))
    rate = labels.mean()
    log_odds = np.log((clicks + 10 * rate) / (shows - clicks + 10 * (1 - rate)))
    found = np.minimum(np.searchsorted(unique, test_keys), len(unique) - 1)
    scores = np.where(unique[found] == test_keys, log_odds[found], np.log(rate)).sum(axis=1)

    auc = roc_auc_score(test_labels, scores)
    assert 0.8 < report.best_auc < 0.84
    assert report.best_auc - 0.08 < auc < report.best_auc


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": 501}, "every file needs at least one row"),
        ({"files": 0}, "every file needs at least one row"),
        ({"test_files": 201}, "every file needs at least one row"),
        ({"zipf_exponent": -1}, "zipf is -1"),
    ],
)
def test_impossible_numbers_of_rows_are_refused(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    small(tmp_path)
    before = contents(tmp_path)

    with pytest.raises(UsageError, match=message):
        small(tmp_path, **changes)

    assert contents(tmp_path) == before


def test_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(DataError, match=r"cannot write to .*file"):
        small(tmp_path / "file")


def test_row_is_label_numbers_and_values_with_tabs_between() -> None:
    clicks = np.array([True, False])
    numbers = np.array([[0.0, np.nan, 10.0], [np.nan, 7.0, 2.0**62]])
    values = np.array([[0x68FD1E64, -1], [-1, 0x0A]])

    text = criteo_text(clicks, numbers, values)

    assert text == b"1\t0\t\t10\t68fd1e64\t\n0\t\t7\t4611686018427387904\t\t0000000a\n"


def test_widest_row_fits() -> None:
    clicks, numbers = np.ones(2, bool), np.full((2, 2), 9e18)
    values = np.full((2, 2), 2**32 - 1)

    text = criteo_text(clicks, numbers, values)

    assert text == b"1\t9000000000000000000\t9000000000000000000\tffffffff\tffffffff\n" * 2


def draw(seed: int, num_rows: int = 20_000, stream: int = 7) -> PlantedRows:
    return PlantedModel(seed).draw(np.random.default_rng(stream), num_rows)


def test_another_seed_is_another_truth() -> None:
    """The same draws meet other values, and other weights."""
    first, second = draw(3, 1000), draw(4, 1000)

    assert not np.isin(first.values[first.values >= 0], second.values).any()
    assert abs(np.corrcoef(first.probabilities, second.probabilities)[0, 1]) < 0.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_click_rate_and_deviation_of_the_logit_do_not_depend_on_the_seed(seed: int) -> None:
    rows = draw(seed)

    logits = np.log(rows.probabilities / (1 - rows.probabilities))
    assert abs(rows.clicks.mean() - CLICK_RATE) < 0.02
    assert abs(logits.std() - LOGIT_DEVIATION) < 0.1


def test_clicks_come_at_their_probabilities() -> None:
    rows = draw(1)
    tenths = np.array_split(np.argsort(rows.probabilities), 10)

    for tenth in tenths:
        expected = rows.probabilities[tenth].mean()
        deviation = np.sqrt(expected * (1 - expected) / len(tenth))
        assert abs(rows.clicks[tenth].mean() - expected) < 4 * deviation


def test_logit_is_a_sum_over_values_and_scaled_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least squares over one-hot values and numbers leaves nothing over."""
    monkeypatch.setattr("ctr_ps.ps_worker.extras.data_tools.generate._LARGEST_VOCABULARY", 8)
    rows = draw(2, 1000)
    one_hot = [np.equal.outer(values, np.unique(values)) for values in rows.values.T]
    features = np.hstack([*one_hot, criteo_schema().scale_dense(rows.numbers)])
    logits = np.log(rows.probabilities / (1 - rows.probabilities))

    weights, *_ = np.linalg.lstsq(features, logits, rcond=None)

    assert features.shape[1] < 250
    np.testing.assert_allclose(features @ weights, logits, atol=1e-5)
