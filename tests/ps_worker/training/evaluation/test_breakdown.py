"""The breakdown of an evaluation: the examples of each slot value, whatever the batches."""

import itertools
import math
import tracemalloc
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.data import distinct_values
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.training.evaluation import breakdown
from ctr_ps.ps_worker.training.evaluation.breakdown import (
    Breakdown,
    Calibration,
    ValueTexts,
    breakdown_of,
    calibration_error,
)
from tests.reference import features as reference

SCHEMA = Schema.numbered(0, 3)
Rows = list[tuple[float, list[list[int]], float]]


def random_rows(seed: int, number: int) -> Rows:
    """Returns labels, keys of three slots, of which the second has any number, and predictions."""
    rng = np.random.default_rng(seed)
    return [
        (
            float(rng.random() < 0.4),
            [[1], rng.integers(10, 16, rng.integers(0, 4)).tolist(), [int(rng.integers(20, 23))]],
            float(np.float32(rng.integers(1, 9) / 10)),
        )
        for _ in range(number)
    ]


def batch_of(rows: Rows) -> Batch:
    slots = [keys for _, of_slots, _ in rows for keys in of_slots]
    return Batch(
        labels=np.array([label for label, _, _ in rows], np.float32),
        dense=np.zeros((len(rows), 0), np.float32),
        keys=np.array([key for keys in slots for key in keys], np.uint64),
        offsets=np.cumsum([0, *map(len, slots)]).astype(np.int32),
        num_slots=3,
    )


def broken_down(rows: Rows, size: int, **settings) -> dict:
    """Returns the figures of batches of a size, whose predictions are in memory that is reused."""
    breakdown = Breakdown(SCHEMA, **settings)
    reused = np.empty(size, np.float32)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        reused[: len(part)] = [p for _, _, p in part]
        breakdown.add(batch_of(part), reused[: len(part)])
    return breakdown.figures()


@pytest.mark.parametrize("size", [1, 7, 200])
def test_groups_are_those_of_the_first_value(size: int) -> None:
    rows = random_rows(1, 200)
    groups = defaultdict(list)
    for label, slots, p in rows:
        if slots[1]:
            groups[slots[1][0]].append((label, p))
    aucs = {key: roc_auc_score(*zip(*of, strict=True)) for key, of in groups.items()}

    figures = broken_down(rows, size, group_by="C2")

    sizes = [len(groups[key]) for key in aucs]
    assert figures["gauc"] == pytest.approx(np.average(list(aucs.values()), weights=sizes))
    assert figures["groups"] == {
        "group_by": "C2",
        "groups": len(groups),
        "one_class_groups": 0,
        "one_class_examples": 0,
        "examples_without_value": sum(not slots[1] for _, slots, _ in rows),
    }


@pytest.mark.parametrize("size", [1, 7, 200])
def test_slices_have_each_example_once_for_each_of_its_values(size: int) -> None:
    rows = random_rows(2, 200)

    figures = broken_down(rows, size, slices=("C3", "C2"), group_by="C3", buckets=4)

    assert list(figures["slices"]) == ["C3", "C2"]
    for slot, index in (("C3", 2), ("C2", 1)):
        told = figures["slices"][slot]
        keys = {str(key) for _, slots, _ in rows for key in slots[index]}
        assert {each["key"] for each in told} == keys
        for each in told:
            labels, predictions = zip(
                *(
                    (label, p)
                    for label, slots, p in rows
                    for key in slots[index]
                    if str(key) == each["key"]
                ),
                strict=True,
            )
            assert each["examples"] == len(labels)
            assert each["auc"] == pytest.approx(roc_auc_score(labels, predictions))
            assert each["calibration"] == pytest.approx(sum(predictions) / sum(labels))
    assert len(figures["calibration_buckets"]) == 4


def test_groups_of_one_class_are_left_out_and_counted() -> None:
    rows = [
        (1.0, [[1], [], [5]], 0.5),
        (1.0, [[1], [], [5]], 0.6),
        (0.0, [[1], [], [6]], 0.1),
        (1.0, [[1], [], [7]], 0.7),
        (0.0, [[1], [], [7]], 0.8),
    ]

    figures = broken_down(rows, 2, group_by="C3")

    assert figures["gauc"] == 0.0
    assert figures["groups"]["one_class_groups"] == 2
    assert figures["groups"]["one_class_examples"] == 3
    assert math.isnan(broken_down(rows[:3], 2, group_by="C3")["gauc"])


def test_groups_count_examples_whatever_they_weigh() -> None:
    rows = [(1.0, [[1], [], [5]], 0.5), (1.0, [[1], [], [5]], 0.6), (0.0, [[1], [], [7]], 0.8)]
    breakdown = Breakdown(SCHEMA, group_by="C3")

    weights = np.float32([0.25, 3, 7])
    breakdown.add(replace(batch_of(rows), weights=weights), np.float32([0.5, 0.6, 0.8]))

    assert breakdown.figures()["groups"] == broken_down(rows, 3, group_by="C3")["groups"]


def test_missing_value_is_no_group() -> None:
    missing = reference.key_of(3, b"")
    rows = random_rows(5, 40)
    without = [(label, [[1], [], [missing]], p) for label, _, p in random_rows(6, 20)]

    figures = broken_down(rows + without, 7, group_by="C3")

    expected = broken_down(rows, 7, group_by="C3")
    assert figures["gauc"] == expected["gauc"]
    assert figures["groups"] == {**expected["groups"], "examples_without_value": 20}


def test_example_of_weight_3_is_three_examples() -> None:
    rows = random_rows(4, 60)
    settings = {"slices": ("C3",), "group_by": "C2", "buckets": 1}
    weighted, plain = (Breakdown(SCHEMA, **settings) for _ in range(2))
    weights = np.where(np.arange(60) % 4, 1, 3)
    predictions = np.array([p for _, _, p in rows], np.float32)
    weighted.add(replace(batch_of(rows), weights=weights.astype(np.float32)), predictions)
    copies = np.repeat(np.arange(60), weights)
    plain.add(batch_of([rows[row] for row in copies]), predictions[copies])

    found, expected = weighted.figures(), plain.figures()

    for name in ("gauc", "calibration_error"):
        assert found[name] == pytest.approx(expected[name])
    (bucket,), (of_copies,) = found["calibration_buckets"], expected["calibration_buckets"]
    assert bucket == pytest.approx({**of_copies, "examples": 60})
    by_key = {each["key"]: each for each in expected["slices"]["C3"]}
    assert len(found["slices"]["C3"]) == len(by_key) == 3
    for each in found["slices"]["C3"]:
        for name in ("click_rate", "auc", "calibration"):
            assert each[name] == pytest.approx(by_key[each["key"]][name])


@pytest.mark.parametrize(
    ("settings", "values", "kept_bytes", "sorted_bytes"),
    [
        ({"group_by": "user"}, 1000, 17, 65),
        ({"group_by": "user"}, 2**63, 17, 110),
        ({"slices": ("user",)}, 1000, 21, 75),
        ({"slices": ("user",)}, 2**63, 21, 110),
    ],
)
def test_memory_is_what_the_documentation_says(
    settings: dict[str, Any], values: int, kept_bytes: int, sorted_bytes: int
) -> None:
    """Bytes an example, of 65,536 that have one of so many values."""
    size, random = 1 << 16, np.random.default_rng(1)
    examples = Breakdown(Schema(dense=(), slots=("user",)), buckets=0, **settings)
    tracemalloc.start()
    try:
        for _ in range(16):
            batch = Batch(
                labels=random.integers(0, 2, size // 16).astype(np.float32),
                dense=np.zeros((size // 16, 0), np.float32),
                keys=random.integers(0, values, size // 16).astype(np.uint64),
                offsets=np.arange(size // 16 + 1, dtype=np.int32),
                num_slots=1,
            )
            examples.add(batch, random.random(size // 16).astype(np.float32))
        del batch
        kept, _ = tracemalloc.get_traced_memory()
        examples.figures()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept / size == pytest.approx(kept_bytes, abs=1)
    assert (peak - kept) / size < sorted_bytes


def test_nothing_is_kept_that_nobody_asked_for() -> None:
    assert broken_down(random_rows(3, 10), 5, buckets=0) == {}
    assert Breakdown(SCHEMA, group_by="C1").figures() == {}


def test_unknown_slot_names_the_key_and_the_nearest() -> None:
    job = override_job({}, ["valid.slices=C33"], source="test")

    with pytest.raises(
        JobError, match=r"--set valid\.slices=C33: valid\.slices: .*did you mean 'C3'"
    ):
        breakdown_of(job, SCHEMA)


# Few distinct predictions, with the smallest and the largest that there are.
PREDICTIONS = [
    -0.0,
    0.0,
    float(np.float32(1e-45)),
    1e-7,
    0.1,
    0.25,
    float(np.float32(1 - 2**-24)),
    1.0,
]
EXAMPLES = st.lists(
    st.tuples(st.booleans(), st.sampled_from(PREDICTIONS), st.sampled_from([0.5, 1.0, 3.0])),
    max_size=60,
)


def buckets_of(clicked, probabilities, weights, number: int, batch: int = 7) -> list[dict]:
    calibration = Calibration()
    arrays = np.array(clicked, bool), np.float32(probabilities), np.float32(weights)
    for start in range(0, len(arrays[0]), batch):
        calibration.add(*(array[start : start + batch] for array in arrays))
    return calibration.buckets(number)


@pytest.mark.parametrize("number", [1, 3, 10, 99, 100, 200])
def test_buckets_are_those_of_sorted_predictions_that_differ(number: int) -> None:
    rng = np.random.default_rng(1)
    probabilities = rng.permutation(np.geomspace(1e-6, 1.0, 100).astype(np.float32))
    clicked, weights = rng.random(100) < 0.4, rng.choice(np.float32([0, 0.5, 3]), 100)
    order = np.argsort(probabilities)
    places = np.floor((np.arange(100) + 0.5) * number / 100)

    found = buckets_of(clicked, probabilities, weights, number)

    assert len(found) == min(number, 100)
    for bucket, place in zip(found, np.unique(places), strict=True):
        rows = order[places == place]
        weight, of_clicks = weights[rows].sum(), weights[rows] @ clicked[rows]
        predicted = weights[rows] @ probabilities[rows]
        assert bucket["examples"] == len(rows)
        assert abs(len(rows) - 100 / number) < 1
        assert bucket["weight"] == weight
        assert (bucket["lowest"], bucket["highest"]) == tuple(probabilities[rows[[0, -1]]])
        for name, value, total in (
            ("predicted", predicted, weight),
            ("click_rate", of_clicks, weight),
            ("calibration", predicted, of_clicks),
        ):
            expected = float(value / total) if total else math.nan
            assert bucket[name] == pytest.approx(expected, nan_ok=True)


@given(EXAMPLES, st.integers(1, 12))
def test_each_prediction_is_in_one_bucket(rows, number: int) -> None:
    clicked, probabilities, weights = zip(*rows, strict=True) if rows else ((), (), ())

    buckets = buckets_of(clicked, probabilities, weights, number)

    assert sum(each["examples"] for each in buckets) == len(rows)
    assert len(buckets) <= number
    assert all(each["lowest"] <= each["highest"] for each in buckets)
    assert all(one["highest"] < other["lowest"] for one, other in itertools.pairwise(buckets))
    clicks = sum(each["click_rate"] * each["weight"] for each in buckets)
    assert clicks == pytest.approx(float(np.dot(clicked, weights)) if rows else 0.0)


def test_buckets_of_close_predictions_are_of_about_one_size() -> None:
    """As of a model of rare clicks, all within a tenth of their rate."""
    rng = np.random.default_rng(3)
    probabilities = rng.uniform(0.001, 0.0011, 100_000)

    buckets = buckets_of(np.zeros(100_000), probabilities, np.ones(100_000), 10, batch=5000)

    assert [each["examples"] for each in buckets] == pytest.approx([10_000] * 10, rel=0.03)


def test_calibrated_predictions_have_a_small_error_and_others_their_distance() -> None:
    rng = np.random.default_rng(2)
    rates = rng.random(200_000).astype(np.float32)
    clicked, ones = rng.random(rates.size) < rates, np.ones(rates.size)

    right = calibration_error(buckets_of(clicked, rates, ones, 10, batch=5000))
    wrong = calibration_error(buckets_of(clicked, rates / 2, ones, 10, batch=5000))

    assert right < 0.005
    assert wrong == pytest.approx(0.25, abs=0.005)
    assert math.isnan(calibration_error([]))


def test_bucket_of_examples_without_weight_has_no_part_in_the_error() -> None:
    clicked, probabilities, weights = [1, 0, 1], [0.2, 0.5, 0.9], [1.0, 0.0, 3.0]

    buckets = buckets_of(clicked, probabilities, weights, 3)

    assert [each["weight"] for each in buckets] == weights
    assert calibration_error(buckets) == pytest.approx((1 * 0.8 + 3 * 0.1) / 4)


OF_TEXTS = Schema(dense=(), slots=("user", "site"), label="click")
SITES = ["a", "größe", "", "c"]
ROWS = {"click": [0, 1, 0, 1], "user": [1, 2, 3, 4], "site": SITES}


@pytest.fixture
def file(tmp_path: Path) -> str:
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    return f"{tmp_path}/rows.parquet"


def test_texts_are_found_by_their_keys_and_read_once(file: str) -> None:
    texts = ValueTexts([file], OF_TEXTS, None)
    keys = {key_of(2, site): site for site in SITES}

    found = texts.find("site", keys)
    Path(file).unlink()

    assert found == keys
    assert texts.find("site", list(keys)[:2]) == dict(list(keys.items())[:2])


def test_a_slot_has_its_own_keys_and_unknown_ones_have_no_text(file: str) -> None:
    texts = ValueTexts([file], OF_TEXTS, None)

    assert texts.find("user", [key_of(1, "3"), key_of(2, "a")]) == {key_of(1, "3"): "3"}


def test_text_that_is_not_there_is_sought_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ValueTexts([file], OF_TEXTS, None)
    keys = [key_of(2, "a"), key_of(2, "unknown")]
    expected = texts.find("site", keys)

    monkeypatch.setattr(distinct_values, "DistinctValues", None)

    assert texts.find("site", keys) == expected == {keys[0]: "a"}


def test_values_of_criteos_layout_have_texts(tmp_path: Path) -> None:
    values = [f"{number:08x}" for number in range(26)]
    (tmp_path / "rows.tsv").write_text("\t".join(["1", *map(str, range(13)), *values]) + "\n")
    texts = ValueTexts([f"{tmp_path}/rows.tsv"], criteo_schema(), None)

    assert texts.find("C3", [key_of(3, values[2])]) == {key_of(3, values[2]): values[2]}


def test_files_without_values_have_no_texts(file: str, tmp_path: Path) -> None:
    assert convert([file], tmp_path / "keys", OF_TEXTS, keys=True).rows == 4
    (tmp_path / "rows.svm").write_text("1 1:1\n")
    keys = [key_of(2, "a")]

    for path in (*(tmp_path / "keys").glob("part-*"), tmp_path / "rows.svm"):
        assert ValueTexts([str(path)], OF_TEXTS, None).find("site", keys) == {}
    assert ValueTexts([], OF_TEXTS, None).find("site", keys) == {}


def test_reading_ends_where_all_are_found_or_enough_was_read(
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({**ROWS, "site": ["later"] * 4}), other)
    key = key_of(2, "later")

    assert ValueTexts([file, str(other)], OF_TEXTS, None).find("site", [key]) == {key: "later"}
    missing = f"{tmp_path}/none.parquet"
    assert ValueTexts([file, missing], OF_TEXTS, None).find("site", [key_of(2, "a")])
    assert missing not in caplog.text
    monkeypatch.setattr(breakdown, "MAX_ROWS", 3)
    assert ValueTexts([file, str(other)], OF_TEXTS, None).find("site", [key]) == {}
