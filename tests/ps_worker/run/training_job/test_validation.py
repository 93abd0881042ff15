"""Validation of runs on a store in this process, with one worker or two."""

import json
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import pytest

from ctr_ps.protos.store import Numbers
from ctr_ps.ps_server.checkpoint.publish import best_in
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.resume import RunState, Validation
from ctr_ps.ps_worker.checkpoints.retention import name_at_step
from ctr_ps.ps_worker.checkpoints.saver import Saver
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.run.plan import Plan, plan_of
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter
from ctr_ps.ps_worker.run.training_job import validation
from ctr_ps.ps_worker.run.training_job.train_job import Summary, train_job
from ctr_ps.ps_worker.run.training_job.training import Training
from ctr_ps.ps_worker.run.training_job.validation import Validator
from tests.support.cluster import Cluster, cluster
from tests.support.training import train_alone, train_together, worker_role, worker_run

LIMIT_S = 60.0
STEPS = 12  # of a worker of two in an epoch: 192 rows in batches of 8, by halves of the file

T = TypeVar("T")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows to train on, those of `test`, and `contrary` rows, which any training makes worse."""
    folder = tmp_path_factory.mktemp("data")
    generate(folder, rows=192, test_rows=100, files=1, test_files=1, seed=1)
    (train,) = (folder / "train").iterdir()
    (test,) = (folder / "test").iterdir()
    train.rename(folder / "rows.tsv")
    test.rename(folder / "test.tsv")
    lines = (folder / "rows.tsv").read_text().splitlines()
    others = [f"{1 - int(line[0])}{line[1:]}\n" for line in lines]
    (folder / "contrary.tsv").write_text("".join(others))
    return folder


def job_of(data: Path, *overrides: str) -> Job:
    own = [f"data.train={data}/rows.tsv", f"data.test={data}/test.tsv", "train.batch_size=8"]
    model = ["model.hidden=[4]", "model.dim=2", "data.bad_row_limit=2"]
    return override_job({}, [*own, *model, *overrides], source="test")


def validations(summary: Summary) -> list[tuple[object, object]]:
    return [(each["epoch"], each["step"]) for each in summary.validations]


@pytest.mark.parametrize("thread_num", [1, 2])
def test_validation_leaves_no_trace_in_a_synchronous_model(data: Path, thread_num: int) -> None:
    settings = ["strategy.mode=sync", "train.epochs=2", f"train.thread_num={thread_num}"]
    valid = f"data.valid={data}/test.tsv"
    without, *_ = train_together(job_of(data, *settings))

    between, *_ = train_together(job_of(data, *settings, valid))
    within, *_ = train_together(job_of(data, *settings, valid, "valid.every_steps=5"))

    assert between.model_digest == within.model_digest == without.model_digest
    assert len(between.validations) == 2
    assert len(within.validations) == 2 + 2 * ((STEPS - 1) // (5 if thread_num == 1 else 6))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo", "bounded_staleness"])
def test_last_validation_is_of_the_model_that_is_tested(
    data: Path, mode: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers are told of all validations but the last, after which they have nothing to do."""
    validators: list[Validator] = []
    init = Validator.__init__

    def noted(self: Validator, *settings) -> None:
        validators.append(self)
        init(self, *settings)

    monkeypatch.setattr(Validator, "__init__", noted)
    job = job_of(
        data,
        f"strategy.mode={mode}",
        f"data.valid={data}/test.tsv",
        "valid.every_steps=4",
        "train.thread_num=2",
    )

    first, *_ = train_together(job, num_workers)

    last = first.validations[-1]
    assert (last["auc"], last["log_loss"]) == (first.auc, first.log_loss)
    assert len(first.validations) > 1
    known = sorted(([asdict(each) for each in own.validations] for own in validators), key=len)
    assert known == [first.validations[:-1]] * (num_workers - 1) + [first.validations]


def test_validation_is_of_a_moment_at_which_nobody_trains(data: Path) -> None:
    """Batches that all workers have trained before a validation: 4 each, whatever the mode."""
    job = job_of(data, f"data.valid={data}/test.tsv", "valid.every_steps=4")
    seen = []

    class Watched(ParameterStore):
        def pull_sparse(self, keys, **settings):
            if settings["missing"].name == "ZEROS":
                seen.append(self.status().version)
            return super().pull_sparse(keys, **settings)

    store = Watched(num_workers=2, wait_limit_s=LIMIT_S)
    train_together(job, store=store)

    assert sorted(set(seen[:-12])) == sorted({8, 16, store.status().version})


def lines_of(rows: list[str]) -> list[str]:
    return [f"{row}\n" for row in rows]


def as_long_as(others: list[str], rows: list[str]) -> list[str]:
    """Returns 20 rows as lines that have as many bytes as others: files are divided by bytes."""
    missing = len("".join(lines_of(others))) - len("".join(lines_of(rows)))
    return lines_of([f"{row}{'0' * (missing // 20)}" for row in rows])


def test_worker_with_fewer_rows_waits_in_the_validations_of_the_others(
    data: Path, tmp_path: Path
) -> None:
    """Rows of 40 and of 20, which are as long together, as files are divided by bytes."""
    lines = (data / "rows.tsv").read_text().splitlines()
    rows = tmp_path / "rows.tsv"
    rows.write_text("".join([*lines_of(lines[:40]), *as_long_as(lines[:40], lines[40:60])]))
    settings = [f"data.train={rows}", f"data.valid={data}/test.tsv", "valid.every_steps=2"]

    first, second = train_together(job_of(data, "strategy.mode=sync", *settings))

    assert (first.examples, second.examples) == (60, 20)
    assert validations(first) == [(1, 2), (1, 4), (1, 5)]


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        ("every_epochs=2", [(2, 48), (3, 72)]),
        ("every_epochs=0", [(1, 20), (2, 44), (3, 68)]),
    ],
)
def test_passes_end_with_a_validation_by_their_period_and_the_last_always(
    period: str, expected: list[tuple[int, int]], data: Path
) -> None:
    within = ["valid.every_steps=20"] if period == "every_epochs=0" else []
    settings = [f"data.valid={data}/test.tsv", f"valid.{period}", *within, "train.epochs=3"]

    summary = train_alone(job_of(data, *settings))

    assert validations(summary) == expected


def test_all_workers_stop_when_validation_gets_no_better(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["strategy.mode=sync", f"checkpoint.dir={tmp_path}/model"]
    once, *_ = train_together(job_of(data, "strategy.mode=sync", "train.epochs=1"))

    with caplog.at_level(logging.INFO):
        first, second = train_together(
            job_of(
                data,
                *settings,
                f"data.valid={data}/contrary.tsv",
                "train.epochs=9",
                "valid.patience=2",
                "valid.final_model=best",
                "checkpoint.keep_last=1",
            )
        )

    assert validations(first) == [(1, STEPS), (2, 2 * STEPS), (3, 3 * STEPS)]
    assert first.examples == 3 * 192
    assert first.stopped_early
    assert second.stopped_early
    assert first.best is not None
    assert first.best["checkpoint"] == f"{tmp_path}/model/epoch-1"
    # The run ends with the first epoch's model, which stays although only the last one is kept.
    assert (first.model_digest, first.auc, first.log_loss) == (
        once.model_digest,
        once.auc,
        once.log_loss,
    )
    assert first.checkpoint == f"{tmp_path}/model/epoch-3"
    inferred = infer(f"{tmp_path}/model/BEST", [f"{data}/test.tsv"])
    assert inferred["model_digest"] == once.model_digest
    assert inferred["auc"] == first.auc
    assert (
        "stopped early, as validation no longer improves: best=epoch 1, step 12" in caplog.messages
    )
    lines = [line for line in caplog.messages if line.startswith("validation ")]
    assert len(lines) == 3
    base = infer(f"{tmp_path}/model", [f"{data}/contrary.tsv"])["base_log_loss"]
    assert all(f" base_log_loss={base:.5f} " in line for line in lines)


def test_run_that_stopped_within_an_epoch_can_resume_there(data: Path, tmp_path: Path) -> None:
    mode = ["strategy.mode=sync", "train.epochs=2"]
    undisturbed, *_ = train_together(job_of(data, *mode))
    settings = [
        *mode,
        f"checkpoint.dir={tmp_path}/model",
        "checkpoint.resume=true",
        f"data.valid={data}/contrary.tsv",
        "valid.every_steps=3",
    ]

    stopped, _ = train_together(job_of(data, *settings, "valid.patience=1"))
    again, _ = train_together(job_of(data, *settings, "valid.patience=1"))
    resumed, _ = train_together(job_of(data, *settings))

    assert validations(stopped) == [(1, 3), (1, 6)]
    assert stopped.stopped_early
    assert stopped.examples == 2 * 6 * 8
    assert stopped.checkpoint == f"{tmp_path}/model/step-6"
    assert again.stopped_early
    assert validations(again) == validations(stopped)
    assert not resumed.stopped_early
    assert validations(resumed) == [
        *((1, step) for step in (3, 6, 9, 12)),
        *((2, step) for step in (15, 18, 21, 24)),
    ]
    assert resumed.model_digest == undisturbed.model_digest
    assert best_in(f"{tmp_path}/model") == "step-3"


def test_best_model_stays_while_worker_0_has_no_data_left(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations at steps 2, 3 and 3 of worker 0; the second is the best, and the third ends the run."""
    lines = (data / "rows.tsv").read_text().splitlines()
    rows = tmp_path / "rows.tsv"
    rows.write_text("".join([*as_long_as(lines[20:120], lines[:20]), *lines_of(lines[20:120])]))
    seen: list[tuple[int, str]] = []

    def evaluate(validator: Validator, epoch: int) -> Validation:
        run = validator._run
        run.flush()
        seen.append((run.progress.steps, run.store.digest()))
        log_loss = (0.7, 0.5, 0.6)[len(seen) - 1]
        return Validation(epoch=epoch, step=run.progress.steps, auc=0.5, log_loss=log_loss)

    monkeypatch.setattr(Validator, "_evaluate", evaluate)
    stopping = ["valid.every_steps=2", "valid.patience=1", "valid.final_model=best"]
    settings = [f"data.train={rows}", f"data.valid={data}/test.tsv", *stopping]

    first, _ = train_together(
        job_of(data, "strategy.mode=sync", *settings, f"checkpoint.dir={tmp_path}/model")
    )

    assert [step for step, _ in seen] == [2, 3, 3]
    assert first.stopped_early
    assert first.model_digest == seen[1][1]
    assert Checkpoint.open(f"{tmp_path}/model/BEST").digest_of_files() == seen[1][1]
    assert Checkpoint.open(f"{tmp_path}/model/LATEST").digest_of_files() == seen[2][1]
    assert first.checkpoint == f"{tmp_path}/model/step-3-2"


class KilledError(Exception):
    """The process is gone."""


def ended_after(job: Job, servers: Cluster, name: str) -> None:
    """Trains, in a process that ends as soon as it can once its checkpoint of this name is there."""
    manifest = Path(job.checkpoint.dir, name, "MANIFEST.json")
    with pytest.raises(SystemExit):
        train_job(
            plan_of(job, worker_role(is_in_process=False)),
            servers.client(joins=False),
            is_told_to_end=manifest.exists,
        )


def saves_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has training wait for each checkpoint."""
    after_step, save = Saver.after_step, Saver.save

    def wait_after_step(self: Saver, *settings) -> None:
        after_step(self, *settings)
        self.wait()

    def wait_after_save(self: Saver, *settings, **named) -> None:
        save(self, *settings, **named)
        self.wait()

    monkeypatch.setattr(Saver, "after_step", wait_after_step)
    monkeypatch.setattr(Saver, "save", wait_after_save)


def test_best_model_stays_when_a_process_takes_the_place_of_worker_0(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves_wait(monkeypatch)
    settings = ["strategy.mode=sync", "train.epochs=4", "cluster.on_worker_loss=wait"]
    valid = [f"data.valid={data}/contrary.tsv", "valid.final_model=best"]
    folder = tmp_path / "model"
    saves = [f"checkpoint.dir={folder}", "checkpoint.resume=true", "checkpoint.keep_last=1"]
    more = ["checkpoint.every_epochs=1", f"run.dir={tmp_path}/run"]
    once = train_alone(job_of(data, "strategy.mode=sync"))
    job = job_of(data, *settings, *valid, *saves, *more)

    with cluster(num_servers=1, num_workers=1) as servers:
        ended_after(job, servers, "epoch-2")
        summary = train_job(
            plan_of(job, worker_role(is_in_process=False)), servers.client(joins=False)
        )

    assert best_in(folder) == "epoch-1"
    assert [each["epoch"] for each in summary.validations] == [1, 2, 3, 4]
    assert (summary.model_digest, summary.auc) == (once.model_digest, once.auc)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    passes = [each for each in lines if each["kind"] == "pass"]
    assert [each["epoch"] for each in passes] == [1, 2, 3, 4]
    assert [each["epoch"] for each in summary.passes] == [3, 4]
    _, start = (each for each in lines if each["kind"] == "start")
    assert (start["epoch"], start["is_replacement"]) == (1, True)
    seconds = sum(each["train_seconds"] for each in summary.passes)
    assert summary.examples_per_s == pytest.approx(2 * 192 / seconds)


def test_run_that_another_process_went_on_with_resumes_at_the_same_validations(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves_wait(monkeypatch)
    settings = ["strategy.mode=sync", f"data.valid={data}/test.tsv", "valid.every_steps=10"]
    folder = tmp_path / "model"
    job = job_of(
        data,
        *settings,
        f"checkpoint.dir={folder}",
        "checkpoint.every_steps=4",
        "cluster.on_worker_loss=wait",
    )
    with cluster(num_servers=1, num_workers=1) as servers:
        ended_after(job, servers, "step-4")
        ended_after(job, servers, "step-16")

    again = job_of(data, *settings, f"checkpoint.dir={folder}", "checkpoint.resume=true")
    resumed = train_alone(again)

    assert validations(resumed) == [(1, 10), (1, 20), (1, 24)]


def test_resumed_run_counts_on_from_the_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in an epoch of 24 steps, twice before one validation: they are at 5, 10, ... all the same."""
    settings = [f"data.valid={data}/contrary.tsv", "valid.every_steps=5", "train.epochs=2"]
    saves = [f"checkpoint.dir={tmp_path}/model", "checkpoint.every_steps=2"]
    whole = train_alone(job_of(data, *settings))
    plan = plan_of(job_of(data, *settings, *saves, "checkpoint.resume=true"))
    saves_wait(monkeypatch)
    for latest in ("step-6", "step-8", "step-12"):

        def kill(latest: str = latest) -> bool:
            if (tmp_path / "model" / latest).exists():
                raise KilledError
            return False

        with pytest.raises(KilledError):
            train_job(plan, ParameterStore(), is_told_to_end=kill)
        assert (tmp_path / "model/LATEST").read_text() == f"{latest}\n"
    resumed = train_job(plan, ParameterStore())

    assert [(each["step"], each["log_loss"]) for each in resumed.validations] == [
        (each["step"], each["log_loss"]) for each in whole.validations
    ]
    assert resumed.model_digest == whole.model_digest
    best = min(whole.validations, key=lambda each: each["log_loss"])
    assert best_in(f"{tmp_path}/model") == f"step-{best['step']}"


def test_best_model_replaces_a_delta_of_the_same_step(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    deltas = ["checkpoint.every_steps=5", "checkpoint.mode=delta", f"checkpoint.dir={folder}"]
    valid = [f"data.valid={data}/contrary.tsv", "valid.every_steps=10", "valid.final_model=best"]

    summary = train_alone(job_of(data, *deltas, *valid))

    assert best_in(folder) == "step-10"
    best = infer(f"{folder}/BEST", [f"{data}/contrary.tsv"])
    assert best["log_loss"] == summary.validations[0]["log_loss"]
    assert best["model_digest"] == summary.model_digest
    assert (
        infer(f"{folder}/LATEST", [f"{data}/contrary.tsv"])["log_loss"]
        == (summary.validations[-1]["log_loss"])
    )


def test_resumed_run_waits_on_where_it_was(data: Path, tmp_path: Path) -> None:
    settings = [
        f"data.valid={data}/contrary.tsv",
        "valid.patience=3",
        f"checkpoint.dir={tmp_path}/model",
        "checkpoint.resume=true",
    ]
    train_alone(job_of(data, *settings, "train.epochs=2"))

    summary = train_alone(job_of(data, *settings, "train.epochs=9"))

    assert [each["epoch"] for each in summary.validations] == [1, 2, 3, 4]
    assert summary.stopped_early
    assert best_in(f"{tmp_path}/model") == "epoch-1"


def test_fresh_run_forgets_which_model_of_an_earlier_one_was_the_best(
    data: Path, tmp_path: Path
) -> None:
    saves = f"checkpoint.dir={tmp_path}/model"
    train_alone(job_of(data, saves, f"data.valid={data}/test.tsv"))
    assert best_in(f"{tmp_path}/model") == "epoch-1"

    train_alone(job_of(data, saves, "checkpoint.overwrite=true"))

    assert best_in(f"{tmp_path}/model") is None


def test_best_checkpoint_that_was_removed_is_said(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = [f"checkpoint.dir={tmp_path}/model", f"data.valid={data}/contrary.tsv"]
    train_alone(job_of(data, *saves, "train.epochs=2"))
    (tmp_path / "model/epoch-1/MANIFEST.json").unlink()

    summary = train_alone(
        job_of(data, *saves, "train.epochs=3", "checkpoint.resume=true", "valid.final_model=best")
    )

    assert "the checkpoint of the best validation no longer exists" in caplog.text
    assert summary.best is not None
    assert summary.best["checkpoint"] is None
    assert summary.log_loss is not None


def test_malformed_rows_are_said_once(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.tsv"
    rows.write_text((data / "test.tsv").read_text() + "1\tshort\n")

    train_alone(job_of(data, f"data.valid={rows}", "train.epochs=3"))

    assert len([each for each in caplog.messages if f"file={rows}" in each]) == 1


def test_breakdown_of_the_summary_is_that_of_infer(data: Path, tmp_path: Path) -> None:
    settings = [
        "valid.group_by=C1",
        "valid.slices=['C2', 'C3']",
        f"checkpoint.dir={tmp_path}/model",
    ]

    summary = train_alone(job_of(data, *settings))
    inferred = infer(f"{tmp_path}/model", [f"{data}/test.tsv"])

    told = summary.as_json()
    for name in ("gauc", "groups", "slices", "calibration_error", "calibration_buckets"):
        assert told[name] == inferred[name]
        assert told[name] is not None
    json.dumps(told, allow_nan=False)


def test_rows_without_labels_are_said(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.tsv"
    lines = (data / "test.tsv").read_text().splitlines()
    rows.write_text("".join(line.partition("\t")[2] + "\n" for line in lines))

    summary = train_alone(job_of(data, f"data.valid={rows}"))

    assert "the files of data.valid have no rows with a label" in caplog.text
    assert [each["log_loss"] for each in summary.validations] == [None]
    assert summary.best is None
    assert not math.isnan(summary.train_loss or math.nan)


@pytest.mark.parametrize("label", [0, 1])
def test_training_goes_on_while_validations_have_no_auc(
    label: int, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.tsv"
    lines = (data / "test.tsv").read_text().splitlines(keepends=True)
    rows.write_text("".join(line for line in lines if line.startswith(str(label))))
    settings = [f"data.valid={rows}", "valid.metric=auc", "valid.patience=1", "train.epochs=3"]

    summary = train_alone(job_of(data, *settings))

    assert [each["epoch"] for each in summary.validations] == [1, 2, 3]
    assert not summary.stopped_early
    lacking = "without" if label else "with"
    assert 'so valid.metric = "auc" cannot compare it' in caplog.text
    assert f"data.valid have no rows {lacking} a click" in caplog.text


def on_two_workers(job: Job, work: Callable[[Run, Validator], T]) -> list[T]:
    """Returns what both workers of a run that has started return."""
    plan, store = plan_of(job), ParameterStore(num_workers=2, wait_limit_s=LIMIT_S)

    def started(worker: int) -> T:
        with worker_run(store, plan.model, job, worker=worker, num_workers=2) as run:
            run.start()
            result = work(run, Validator(plan, run, MetricsWriter(None, run)))
            run.leave()
            return result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(started, range(2)))


def test_best_model_is_named_by_its_step_in_every_process(data: Path) -> None:
    """As in a process in a lost worker 0's place, which is at the steps of its last push by then."""
    job = job_of(data, f"data.valid={data}/test.tsv", "valid.every_steps=5", "valid.patience=1")

    later = [
        Validation(epoch=1, step=10, auc=0.4, log_loss=9.0),
        Validation(epoch=1, step=15, auc=None, log_loss=None),
    ]

    def name_of(validation: Validation) -> str:
        return name_at_step(validation.step)

    def told(run: Run, validator: Validator) -> tuple[list[Validation], bool]:
        run.progress.resume(5 + run.worker)
        validator.tell("validated", validator.validate(epoch=1, name_of=name_of), name_of)
        for each in later:
            if run.is_first:
                validator.add(each)
            own = each if run.is_first else None
            validator.tell(f"validated-{each.step}", own, name_of)
        return validator.validations, validator.is_over

    first, second = on_two_workers(job, told)

    assert [each.checkpoint for each in first[0]] == ["step-5", "", ""]
    assert second == first
    assert first[1]


def resumed(plan: Plan, *known: list[Validation]) -> list[Validator]:
    """Returns workers that know these validations of a resumed run, and are told of the first one's."""
    told: list[Numbers] = []

    def all_reduce(own: Numbers, *_: object) -> Numbers:
        told.append(own)
        return told[0]

    run = cast("Run", SimpleNamespace(all_reduce=all_reduce))
    validators = [Validator(plan, run, MetricsWriter(None, run)) for _ in known]
    for validator, validations in zip(validators, known, strict=True):
        state = RunState(
            epochs_done=0,
            is_between_epochs=True,
            num_workers=2,
            files="",
            order={},
            validations=validations,
        )
        validator.resume(state)
    return validators


def test_replacement_counts_the_validations_that_were_told(data: Path) -> None:
    """A newer checkpoint than the one that the run was resumed from has later ones, which are told again."""
    plan = plan_of(job_of(data, f"data.valid={data}/test.tsv"))
    known = [Validation(epoch=1, step=step, auc=0.5, log_loss=0.7) for step in (5, 10)]
    _, replacement = resumed(plan, known[:1], known)

    assert replacement.validations == known[:1]


def validators_of_a_worker_and_its_replacement(plan: Plan) -> tuple[Validator, Validator]:
    told: list[Numbers] = []

    def all_reduce(own: Numbers, *_: object) -> Numbers:
        told.append(own)
        return np.maximum.reduce(told)

    run = cast("Run", SimpleNamespace(all_reduce=all_reduce, is_first=True))
    first, other = (Validator(plan, run, MetricsWriter(None, run)) for _ in range(2))
    return first, other


@pytest.mark.parametrize("stops", [True, False])
def test_a_process_that_begins_at_a_restart_knows_the_best_validation_and_those_since(
    data: Path, *, stops: bool
) -> None:
    plan = plan_of(job_of(data, f"data.valid={data}/test.tsv", "valid.patience=3"))
    losses = [0.9, 0.8, 0.6, 0.7, None, 0.65]
    seen = [
        Validation(epoch=n, step=10 * n, auc=None, log_loss=loss) for n, loss in enumerate(losses)
    ]
    first, other = validators_of_a_worker_and_its_replacement(plan)
    before = seen[2:4] + seen[5:]
    for each in seen:
        first.add(each)
    last = Validation(epoch=6, step=60, auc=0.5, log_loss=0.61 if stops else 0.5)
    first.add(last)
    first.tell_at_restart((7, math.inf), last, str)

    following = other.recall(lambda _: "epoch-of-BEST")

    assert following.tolist() == [7, math.inf]
    assert first.is_over == other.is_over == stops
    assert [replace(each, checkpoint="") for each in other.validations] == [*before, last]
    assert other.best == replace(first.best or last, checkpoint="epoch-of-BEST")


def test_without_early_stopping_the_best_validation_alone_is_told_at_a_restart(data: Path) -> None:
    """Else the next worse one is the best for the process in a lost one's place."""
    plan = plan_of(job_of(data, f"data.valid={data}/test.tsv", "valid.patience=0"))
    first, other = validators_of_a_worker_and_its_replacement(plan)
    for epoch, loss in enumerate([0.9, 0.6, 0.7, 0.8], 1):
        first.add(Validation(epoch=epoch, step=10 * epoch, auc=0.5, log_loss=loss))

    first.tell_at_restart((5, math.inf), None, str)
    other.recall(lambda _: "epoch-2")
    other.add(Validation(epoch=5, step=50, auc=0.5, log_loss=0.65))

    assert other.best == Validation(epoch=2, step=20, auc=0.5, log_loss=0.6, checkpoint="epoch-2")
    assert [each.epoch for each in other.validations] == [2, 5]


def test_run_without_end_remembers_the_best_validation_and_the_last(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MOST_KEPT", 4)
    plan = plan_of(job_of(data, f"data.valid={data}/test.tsv"))
    first, _ = validators_of_a_worker_and_its_replacement(plan)

    for epoch in range(1, 10):
        loss = 0.5 if epoch == 3 else 0.6
        first.add(Validation(epoch=epoch, step=epoch, auc=0.5, log_loss=loss))

    assert [each.epoch for each in first.validations] == [3, 7, 8, 9]
    assert first.best == first.validations[0]
    (passes,) = [each for each in fields(Training) if each.name == "passes"]
    assert passes.default_factory().maxlen == 1000  # type: ignore[misc]


def test_workers_that_are_told_of_a_resumed_run_stop_when_worker_0_does(data: Path) -> None:
    """They have none of its validations, but know which loss is to be beaten, and for how long it was not."""
    plan = plan_of(job_of(data, f"data.valid={data}/test.tsv", "valid.patience=3"))
    known = [
        Validation(epoch=each, step=each, auc=0.5, log_loss=0.6 + each / 100) for each in (1, 2)
    ]
    first, other = resumed(plan, known, [])

    for epoch in (3, 4):
        for each in (first, other):
            assert not each.is_over
            each.add(Validation(epoch=epoch, step=epoch, auc=0.5, log_loss=0.615))

    assert first.is_over
    assert other.is_over


def test_best_model_is_saved_where_no_checkpoint_is_due(data: Path, tmp_path: Path) -> None:
    settings = [f"data.valid={data}/contrary.tsv", "train.epochs=3"]
    saves = [f"checkpoint.dir={tmp_path}", "checkpoint.every_epochs=0"]

    summary = train_alone(job_of(data, *settings, *saves))

    assert best_in(tmp_path) == "epoch-1"
    assert summary.best is not None
    assert summary.best["checkpoint"] == f"{tmp_path}/epoch-1"
    assert sorted(each.name for each in tmp_path.glob("epoch-*")) == ["epoch-1", "epoch-3"]


def test_folder_means_the_best_model_if_that_is_the_final_one(data: Path, tmp_path: Path) -> None:
    """Infer and ps-serve take it; a resumed run goes on from the last one."""
    settings = [f"data.valid={data}/contrary.tsv", f"checkpoint.dir={tmp_path}"]
    best = job_of(data, *settings, "train.epochs=3", "valid.final_model=best")

    summary = train_alone(best)

    assert Checkpoint.open(tmp_path).url == f"{tmp_path}/epoch-1"
    assert infer(str(tmp_path), [f"{data}/test.tsv"])["log_loss"] == summary.log_loss
    resumed = job_of(data, *settings, "train.epochs=4", "checkpoint.resume=true")
    assert [each["epoch"] for each in train_alone(resumed).passes] == [4]
    assert Checkpoint.open(tmp_path).url == f"{tmp_path}/epoch-4"


@pytest.mark.parametrize(("seconds", "is_told"), [(29.0, False), (31.0, True)])
def test_validation_that_others_may_not_wait_for_is_warned_of(
    seconds: float,
    is_told: bool,
    data: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_of(data, f"data.valid={data}/test.tsv", "cluster.wait_timeout_s=60")
    clock = SimpleNamespace(monotonic=iter([0.0, seconds]).__next__)
    monkeypatch.setattr("ctr_ps.ps_worker.run.training_job.validation.time", clock)

    on_two_workers(
        job, lambda run, own: run.is_first and own.validate(epoch=1, name_of=lambda _: "")
    )

    assert (f"a validation took {seconds:.0f} s" in caplog.text) == is_told
