"""Permutation importance: a feature that says much is worth much, one that says nothing is worth nothing."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError, JobError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.checkpoints.attachments import (
    job_of_checkpoint,
    model_of_checkpoint,
    schema_of_checkpoint,
)
from ctr_ps.ps_worker.data.blocks import joined, rows_where
from ctr_ps.ps_worker.extras.report import importance, sections
from ctr_ps.ps_worker.extras.report.importance import (
    SEED,
    FeatureImportance,
    Importance,
    importance_of_checkpoint,
    importance_of_features,
)
from ctr_ps.ps_worker.job.datasets import streamed
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.training.evaluation.evaluator import SavedStore


def batches_of(root: Path) -> list[Batch]:
    checkpoint = Checkpoint.open(root / "model")
    dataset = streamed(job_of_checkpoint(checkpoint), schema_of_checkpoint(checkpoint))
    dataset.set_filelist([f"{root}/test.csv"])
    return list(dataset)


def measured(root: Path, batches: list[Batch], rows: int = 600, size: int = 32) -> Importance:
    checkpoint = Checkpoint.open(root / "model")
    job, schema = job_of_checkpoint(checkpoint), schema_of_checkpoint(checkpoint)
    return importance_of_features(
        SavedStore(SavedModel(checkpoint)),
        model_of_checkpoint(checkpoint, job, schema),
        schema,
        batches,
        rows=rows,
        batch_size=size,
    )


def test_planted_slot_matters_and_noise_does_not(runs: tuple[Path, Path]) -> None:
    found = measured(runs[0].parent, batches_of(runs[0].parent))
    by_name = {each.name: each for each in found.features}

    assert found.features[0].name == "site"
    assert by_name.keys() == {"site", "<i>noise</i>", "price"}
    assert by_name["site"].auc_lost > 0.2
    assert by_name["site"].log_loss_gained > 0.1
    for name in ("<i>noise</i>", "price"):
        assert abs(by_name[name].auc_lost) < 0.03
        assert abs(by_name[name].log_loss_gained) < 0.02


def test_log_says_how_many_predictions_there_are_and_how_far_it_is(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(importance, "LOG_EVERY_S", 0.0)

    measured(runs[0].parent, batches_of(runs[0].parent), rows=100, size=50)

    first, *lines = [each for each in caplog.messages if "feature importance" in each]
    assert "predicting 100 rows 4 times" in first
    assert len(lines) == 4 * 2
    assert [lines[0], lines[-1]] == [
        "feature importance: 12 % of 400 predictions",
        "feature importance: 100 % of 400 predictions",
    ]


def test_it_is_what_a_prediction_of_permuted_examples_loses(runs: tuple[Path, Path]) -> None:
    """By another way: keys and numbers of the examples permuted by hand, and scikit-learn's metrics."""
    root = runs[0].parent
    batches = batches_of(root)
    found = measured(root, batches)
    examples, predictor = joined(batches), Predictor.load(root / "model")
    order = np.random.default_rng(SEED).permutation(examples.size)

    def permuted(**columns: np.ndarray) -> Batch:
        arrays = {"keys": examples.keys, "dense": examples.dense, **columns}
        return Batch(labels=examples.labels, offsets=examples.offsets, num_slots=2, **arrays)

    keys, dense = examples.keys.reshape(-1, 2).copy(), examples.dense.copy()
    keys[:, 0] = keys[order, 0]
    dense[:] = dense[order]  # the number, and whether it is missing
    plain = predictor.predict(examples)
    for name, batch in {
        "site": permuted(keys=keys.reshape(-1)),
        "price": permuted(dense=dense),
    }.items():
        (of_feature,) = [each for each in found.features if each.name == name]
        without = predictor.predict(batch)
        auc = roc_auc_score(examples.labels, plain) - roc_auc_score(examples.labels, without)
        gained = log_loss(examples.labels, without) - log_loss(examples.labels, plain)
        assert of_feature.auc_lost == pytest.approx(auc, abs=2e-3)  # AUC of histograms
        assert of_feature.log_loss_gained == pytest.approx(gained, abs=1e-6)


def test_without_an_auc_the_log_loss_says_what_matters_most(runs: tuple[Path, Path]) -> None:
    root = runs[0].parent
    clicked = [rows_where(each, each.labels > 0.5) for each in batches_of(root)]

    found = measured(root, clicked).features

    gained = [each.log_loss_gained for each in found]
    assert all(np.isnan(each.auc_lost) for each in found)
    assert gained == sorted(gained, reverse=True)


def test_only_as_many_rows_as_asked_for_are_read(runs: tuple[Path, Path]) -> None:
    root = runs[0].parent
    batches = batches_of(root)
    read = []

    def reading():
        for batch in batches:
            read.append(batch.size)
            yield batch

    assert measured(root, reading(), rows=50).examples == 50
    assert read == [32, 32]


def test_size_of_batches_does_not_matter(runs: tuple[Path, Path]) -> None:
    root = runs[0].parent
    batches = batches_of(root)
    small, large = measured(root, batches, size=7), measured(root, batches, size=1000)

    assert [each.name for each in small.features] == [each.name for each in large.features]
    assert small.log_loss == pytest.approx(large.log_loss, rel=1e-6)


def test_rows_without_labels_cannot_be_measured(runs: tuple[Path, Path]) -> None:
    root = runs[0].parent
    unlabelled = [
        Batch(dense=each.dense, keys=each.keys, offsets=each.offsets, num_slots=each.num_slots)
        for each in batches_of(root)
    ]

    with pytest.raises(DataError, match="0 rows with a label"):
        measured(root, unlabelled)


def test_run_of_one_class_does_not_change_the_order_of_features():
    """Its AUC is nan, which is larger than nothing and smaller than nothing."""
    names = [f"feature-{number}" for number in range(4)]
    measured = Importance(
        features=tuple(
            FeatureImportance(name=name, auc_lost=lost, log_loss_gained=0.0)
            for name, lost in zip(names, (0.1, 0.3, 0.0, 0.2), strict=True)
        ),
        examples=9,
        auc=0.7,
        log_loss=0.5,
    )
    of_one_class = replace(
        measured,
        features=tuple(
            FeatureImportance(name=name, auc_lost=math.nan, log_loss_gained=0.0)
            for name in names[:3]
        ),
        auc=math.nan,
    )
    runs = [SimpleNamespace(name="one class"), SimpleNamespace(name="measured")]

    section = sections.importance(runs, [of_one_class, measured])

    (card,) = section.cards
    shown = list(dict.fromkeys(row[0] for row in card.cells))
    assert shown == ["feature-1", "feature-3", "feature-0", "feature-2"]


def test_saved_model_is_measured_on_given_rows_or_those_of_its_job(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    root = runs[0].parent
    checkpoint = Checkpoint.open(root / "model")
    expected = measured(root, batches_of(root))

    assert importance_of_checkpoint(checkpoint, rows=600) == expected
    # A slot with one value for all rows cannot matter.
    head, *lines = (root / "test.csv").read_text().splitlines()
    lines = [",".join((line.split(",")[0], "site1", *line.split(",")[2:])) for line in lines]
    (tmp_path / "one.csv").write_text("\n".join([head, *lines]) + "\n")
    found = importance_of_checkpoint(checkpoint, [f"{tmp_path}/*.csv"], rows=500)
    assert found.examples == 500
    assert {each.name: each.auc_lost for each in found.features}["site"] == 0


def test_job_without_rows_to_predict_says_how_to_give_them(runs: tuple[Path, Path]) -> None:
    checkpoint = Checkpoint.open(runs[0].parent / "model")
    without = ["data.test=[]", "data.valid=[]", "valid={}"]

    with pytest.raises(JobError, match=r"no rows to predict: give --data"):
        importance_of_checkpoint(checkpoint, rows=100, overrides=without)
