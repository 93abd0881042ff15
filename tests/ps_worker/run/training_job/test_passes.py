"""Figures of passes: predictions before training, over all workers."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.datasets import streamed
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.passes import Pass, Stretches, epochs, figures_of_pass
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from tests.support.training import train_together, worker_run

ROWS = 320


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    generate(folder, rows=ROWS, test_rows=100, files=1, test_files=1, seed=3)
    (path,) = (folder / "train").iterdir()
    return path


def job_of(rows: Path, *overrides: str) -> Job:
    own = [f"data.train={rows}", "train.batch_size=16", "model.hidden=[4]", "model.dim=2"]
    return override_job({}, [*own, *overrides], source="test")


def test_figures_are_those_of_predictions_before_training(rows: Path) -> None:
    plan = plan_of(job_of(rows))
    dataset = streamed(plan.job, plan.schema)
    dataset.set_filelist(plan.train_files)
    batches = list(dataset)
    labels = np.concatenate([batch.labels for batch in batches if batch.labels is not None])
    with worker_run(ParameterStore(), plan.model, plan.job) as run:
        run.start(batches)
        predicted = [step.probabilities.copy() for step in run.steps(batches)]
    predictions = np.concatenate(predicted).astype(np.float64)

    [figures] = train_job(plan, ParameterStore()).passes

    assert figures["examples"] == ROWS
    assert figures["log_loss"] == pytest.approx(log_loss(labels, predictions), rel=1e-9)
    # The histogram takes predictions of a bucket for ties.
    assert figures["auc"] == pytest.approx(roc_auc_score(labels, predictions), abs=1e-3)
    assert figures["calibration"] == pytest.approx(predictions.sum() / labels.sum(), rel=1e-6)
    rate = np.full(ROWS, labels.mean(), np.float64)
    assert figures["base_log_loss"] == pytest.approx(log_loss(labels, rate), rel=1e-6)
    entropy = log_loss(labels, predictions) / log_loss(labels, rate)
    assert figures["normalized_entropy"] == pytest.approx(entropy, rel=1e-6)


def test_figures_are_of_all_workers_and_of_their_own_pass(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first, second = train_together(job_of(rows, "train.epochs=2", "strategy.mode=sync"))

    assert len([each for each in caplog.messages if each.startswith("pass epoch=")]) == 2
    assert [each["examples"] for each in first.passes] == [ROWS, ROWS]
    figures = ("examples", "auc", "log_loss", "base_log_loss", "calibration")
    for ours, theirs in zip(first.passes, second.passes, strict=True):
        assert [ours[name] for name in figures] == [theirs[name] for name in figures]
    mean = np.mean([each["log_loss"] for each in first.passes])
    own = [first.examples - second.examples, second.examples]
    assert all(own)
    assert mean == pytest.approx(np.average([first.train_loss, second.train_loss], weights=own))


def test_speed_is_that_of_all_workers_and_a_pass_without_examples_has_no_line(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, of_all = plan_of(job_of(rows)), ClickMetrics()
    of_all.add(np.ones(120, np.float32), np.full(120, 0.5, np.float32))
    each = Pass(name="epoch-1", number=1, batches=(_ for _ in ()), ends=lambda: True)

    with worker_run(ParameterStore(), plan.model, plan.job) as run, caplog.at_level(logging.INFO):
        found = [
            figures_of_pass(run, each, metrics, seconds).examples_per_s
            for metrics, seconds in ((of_all, 4.0), (ClickMetrics(), 0.0))
        ]

    assert found == [30.0, 0.0]
    [line] = [each for each in caplog.messages if each.startswith("pass epoch=")]
    assert "examples=120 examples/s=30 " in line


def test_pass_that_knows_less_than_the_click_rate_is_warned_of(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(
        rows,
        "train.epochs=3",
        "strategy.mode=sync",
        "train.base_rate=0.5",
        "optimizer.sparse={name='adagrad', learning_rate=2, initial_accumulator=0.0}",
        "optimizer.dense={name='sgd', learning_rate=2}",
    )

    with caplog.at_level(logging.WARNING):
        summary = train_job(plan_of(job), ParameterStore())

    warned = [each for each in caplog.messages if each.startswith("the pass of epoch")]
    assert all(each["log_loss"] > each["base_log_loss"] for each in summary.passes)
    assert len(warned) == 3
    assert "optimizer.sparse.learning_rate below 2, or the optimizer's default" in warned[0]


def test_rows_that_other_workers_sent_are_gone_with_a_process() -> None:
    data = SimpleNamespace(is_shuffled_globally=True)
    run = SimpleNamespace(worker=1, num_workers=2, is_replacement=True)

    with pytest.raises(
        ProtocolError, match=r"worker 1 cannot replace .* data\.shuffle = 'global'.*'local'"
    ):
        next(epochs(data, run, first=1, last=2))  # type: ignore[arg-type]


@given(st.integers(0, 12), st.lists(st.integers(0, 5), max_size=8), st.booleans())
def test_stretches_are_the_batches_in_their_order(number, sizes, looks) -> None:
    stretches = Stretches(iter(range(number)))
    expected, taken = list(range(number)), []

    for size in sizes:
        if looks:
            assert stretches.has_more == (len(taken) < number)
        stretch = list(stretches.take(size))
        assert stretch == expected[len(taken) : len(taken) + size]
        taken += stretch

    assert stretches.has_more == (len(taken) < number)
    assert list(stretches.take(number)) == expected[len(taken) :]
