"""A run that was killed and goes on: it ends as one that was never stopped, or says why it cannot."""

import gzip
import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.errors import CheckpointError, JobError
from ctr_ps.protos.store import InferenceSettings, SaveRequest
from ctr_ps.ps_server.checkpoint.files.manifest import manifest_to_json
from ctr_ps.ps_server.checkpoint.publish import open_data
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.checkpoint.writer import write_share
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.resume import earlier_run
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import Summary, train_job
from tests.support.killed import KilledError, KilledStore, resumed_job, wait_for_saves
from tests.support.training import plan_as, worker_role

ROWS, BATCH = 200, 8
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of unequal length, for workers that end at different steps."""
    folder = tmp_path_factory.mktemp("clicks")
    generate(folder, rows=ROWS, test_rows=100, files=3, test_files=1, seed=1)
    return folder


def job_of(clicks: Path, folder: Path, *settings: str) -> Job:
    own = ["checkpoint.every_steps=3", f"train.batch_size={BATCH}", "strategy.mode=sync"]
    return resumed_job(clicks, folder, *own, *settings)


def run(job: Job, *, num_workers: int = 2, pushes: int | None = None) -> list[Summary]:
    """Runs a job on a new store, which dies after so many pushes; returns what the workers report."""
    plan = plan_of(job)
    whole = ParameterStore(num_workers=num_workers, wait_limit_s=LIMIT_S)
    store = whole if pushes is None else KilledStore(whole, pushes)
    works = [
        partial(
            train_job,
            plan_as(plan, worker, num_workers, is_in_process=num_workers == 1),
            store,
        )
        for worker in range(num_workers)
    ]
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            return list(pool.map(lambda work: work(), works))
    finally:
        wait_for_saves(LIMIT_S)


def run_first(job: Job, num_workers: int = 2) -> None:
    """Runs worker 0 alone, which ends before it meets another."""
    train_job(
        plan_of(job, worker_role(num_workers=num_workers)), ParameterStore(num_workers=num_workers)
    )


def kill(job: Job, *, pushes: int, num_workers: int = 2) -> None:
    with pytest.raises(KilledError):
        run(job, pushes=pushes, num_workers=num_workers)


BY_BATCH = [
    "optimizer.schedule={kind='linear', warmup_steps=5, total_steps=60}",
    "train.dropout=0.3",
]
"""What depends on the number of a batch."""

ORDERS = {
    "streamed": BY_BATCH,
    "files shuffled": ["data.shuffle_files=true"],
    "in memory": ["data.in_memory=true"],
    "shuffled": ["data.in_memory=true", "data.shuffle=local"],
    "in deltas": ["checkpoint.mode=delta", "checkpoint.full_every=3"],
    "global shuffle": ["data.in_memory=true", "data.shuffle=global"],
}


@pytest.mark.parametrize("thread_num", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_killed_run_ends_as_one_that_was_never_stopped(
    order: str, thread_num: int, clicks: Path, tmp_path: Path
) -> None:
    settings = [*ORDERS[order], f"train.thread_num={thread_num}"]
    expected = run(job_of(clicks, tmp_path / "whole", *settings))[0]
    job = job_of(clicks, tmp_path / "killed", *settings)

    for pushes in (5, 4):
        kill(job, pushes=pushes)
    reached = Checkpoint.open(tmp_path / "killed").manifest
    ended = run(job)[0]

    assert reached.version > 0
    assert ended.model_digest == expected.model_digest
    assert ended.examples < expected.examples


IN_PROCESS = ["strategy.mode=async", "checkpoint.every_steps=5", *BY_BATCH]


@pytest.fixture(scope="module")
def never_killed(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Summary:
    job = job_of(clicks, tmp_path_factory.mktemp("whole") / "model", *IN_PROCESS)
    return run(job, num_workers=1)[0]


@pytest.mark.parametrize("pushes", range(1, 45, 4))
def test_in_process_run_goes_on_from_wherever_it_was_killed(
    pushes: int, clicks: Path, never_killed: Summary, tmp_path: Path
) -> None:
    job = job_of(clicks, tmp_path / "killed", *IN_PROCESS)

    kill(job, pushes=pushes, num_workers=1)
    ended = run(job, num_workers=1)[0]

    assert ended.model_digest == never_killed.model_digest


@pytest.mark.usefixtures("past_the_first_steps")
@pytest.mark.parametrize("mode", ["half_async", "async", "bounded_staleness", "geo"])
def test_no_row_is_left_out_whatever_the_mode(mode: str, tmp_path: Path) -> None:
    """Every row has a key of its own, and so a row in the table once it was trained on."""
    folder = tmp_path / "train"
    folder.mkdir()
    fields = ["1"] * 13 + ["a"] * 25
    for name in "ab":
        lines = ["\t".join(["0", *fields, f"{name}{i}"]) for i in range(ROWS)]
        (folder / name).write_text("\n".join(lines) + "\n")
    settings = [f"strategy.mode={mode}", "train.thread_num=2", "train.epochs=1"]
    if mode in ("async", "bounded_staleness"):
        table = f"strategy.{mode}"
        settings += [f"{table}.max_merge_var_num=2", f"{table}.max_merge_dense_num=3"]
    if mode == "geo":
        settings += ["strategy.geo.k_steps=3"]
    job = job_of(tmp_path, tmp_path / "killed", *settings)

    for _ in range(2):
        kill(job, pushes=2 if mode == "geo" else 4)
    ended = run(job)[0]

    saved = Checkpoint.open(tmp_path / "killed")
    rows = sum(rows.keys.size for _, rows in saved.read_shards("embedding", range(64)))
    assert rows == 2 * ROWS + 25
    assert ended.examples < 2 * ROWS


@pytest.mark.parametrize("num_workers", [1, 3])
def test_run_goes_on_between_epochs_with_other_workers(
    num_workers: int, clicks: Path, tmp_path: Path
) -> None:
    settings = ["checkpoint.every_steps=0"]
    run(job_of(clicks, tmp_path, *settings, "train.epochs=1"))

    ended = run(job_of(clicks, tmp_path, *settings), num_workers=num_workers)

    assert ended[0].examples == ROWS
    assert Checkpoint.open(tmp_path).url.endswith("epoch-2")


@pytest.mark.parametrize(
    ("mode", "change"),
    [
        ("sync", "a step has 3 batches, not 2"),
        ("async", "gradients have the staleness of 3 workers: if the loss rises, lower the"),
    ],
)
def test_resuming_with_other_workers_says_what_changes(
    mode: str, change: str, clicks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["checkpoint.every_steps=0", f"strategy.mode={mode}"]
    told = f"{tmp_path}/epoch-1 was saved with 2 workers and is resumed with 3: {change}"
    run(job_of(clicks, tmp_path, *settings, "train.epochs=1"))
    run(job_of(clicks, tmp_path, *settings, "train.epochs=1"))
    assert "is resumed" not in caplog.text

    run(job_of(clicks, tmp_path, *settings), num_workers=3)

    assert told in caplog.text


def test_schedule_of_a_run_that_counted_its_batches_goes_on_without_a_word(
    clicks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["checkpoint.every_steps=0", "optimizer.schedule={kind='linear', total_steps=100}"]
    run(job_of(clicks, tmp_path, *settings, "train.epochs=1"))

    run(job_of(clicks, tmp_path, *settings))

    assert "does not say how many batches" not in caplog.text


def test_run_that_had_ended_ends_at_once(clicks: Path, tmp_path: Path) -> None:
    job = job_of(clicks, tmp_path)
    expected = run(job)[0]

    ended = run(job)[0]

    assert (ended.model_digest, ended.examples) == (expected.model_digest, 0)


def test_job_begins_where_there_is_nothing_to_go_on_from(clicks: Path, tmp_path: Path) -> None:
    model = run(job_of(clicks, tmp_path / "model", "train.epochs=1"))[0].checkpoint
    job = job_of(clicks, tmp_path / "new", f"checkpoint.load={model}")

    ended = run(job)[0]

    assert ended.examples == 2 * ROWS
    assert ended.model_digest != run(job_of(clicks, tmp_path / "other"))[0].model_digest


def killed_in_the_middle(clicks: Path, folder: Path, *settings: str) -> str:
    """Returns the checkpoint of a run that was killed in its first epoch."""
    kill(job_of(clicks, folder, *settings), pushes=5)
    checkpoint = Checkpoint.open(folder)
    assert not json.loads(checkpoint.attachment("run.json"))["is_between_epochs"]
    return checkpoint.url


@pytest.mark.parametrize(
    ("settings", "num_workers", "error", "fault"),
    [
        (["data.train={}/test/*"], 2, JobError, "data.train.*trained on other files"),
        (["train.seed=5"], 2, JobError, "train.seed.*is 5, but was 0 in the run"),
        (["data.in_memory=true"], 2, JobError, "data.in_memory.*is True, but was False"),
        ([], 3, JobError, "ended in epoch 1.*to 2 workers, but now the job has 3"),
        (["data.schema=criteo_min_max"], 2, JobError, "trained with another schema"),
        (["model.dim=3"], 2, CheckpointError, "saved with dim 2, but the job declares dim 3"),
    ],
    ids=["files", "seed", "memory", "workers", "schema", "model"],
)
def test_run_that_does_not_fit_is_refused(
    settings: list[str],
    num_workers: int,
    error: type[Exception],
    fault: str,
    clicks: Path,
    tmp_path: Path,
) -> None:
    killed_in_the_middle(clicks, tmp_path)
    job = job_of(clicks, tmp_path, *(setting.format(clicks) for setting in settings))

    with pytest.raises(error, match=fault):
        run_first(job, num_workers)


def test_run_of_another_model_of_the_same_shapes_is_refused(clicks: Path, tmp_path: Path) -> None:
    code = "from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn\n\n\nclass {}(CtrDnn):\n    pass\n"
    (tmp_path / "models.py").write_text(code.format("One") + code.format("Other"))
    folder = tmp_path / "model"
    killed_in_the_middle(clicks, folder, f"model.name={tmp_path}/models.py:One")

    with pytest.raises(
        JobError, match=r"model\.name: it is '.*:Other', but was '.*:One' in the run in"
    ):
        run_first(job_of(clicks, folder, f"model.name={tmp_path}/models.py:Other"))
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(tmp_path / "models.py", moved)
    assert run(job_of(clicks, folder, f"model.name={moved}/models.py:One"))


def test_other_settings_than_those_of_the_run_are_named_in_one_line(
    clicks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = killed_in_the_middle(clicks, tmp_path)
    caplog.clear()
    run(job_of(clicks, tmp_path, "train.log_every_s=3"))
    assert "with other settings" not in caplog.text

    changes = ["train.batch_size=16", "optimizer.sparse.learning_rate=0.01", "strategy.mode=async"]
    run(job_of(clicks, tmp_path, "train.epochs=3", *changes))

    (line,) = [message for message in caplog.messages if "with other settings" in message]
    assert line == (
        f"resuming {url.rpartition('/')[0]}/epoch-2 with other settings: train.batch_size = 16, was 8, "
        f'optimizer.sparse.learning_rate = 0.01, was not set, strategy.mode = "async", was "sync"'
    )


@pytest.mark.parametrize("only", [[], ["checkpoint.only=embedding"]], ids=["all", "rows"])
def test_other_options_of_a_model_whose_layers_are_loaded_are_named(
    only: list[str], clicks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    model = ["model.name=auto_int", "model.hidden=[4]", "model.heads=2", "model.head_dim=8"]
    url = killed_in_the_middle(clicks, tmp_path / "old", *model)
    caplog.clear()
    load = ["checkpoint.resume=false", f"checkpoint.load={url}", *only]
    other = ["model.heads=4", "model.head_dim=4", "train.batch_size=16"]
    run(job_of(clicks, tmp_path / "new", *model, *load, *other))

    found = [message for message in caplog.messages if "with other settings" in message]
    changes = "model.heads = 4, was 2, model.head_dim = 4, was 8"
    assert found == ([] if only else [f"starting from {url} with other settings: {changes}"])


def test_refusal_says_how_to_start_from_the_model_alone(clicks: Path, tmp_path: Path) -> None:
    url = killed_in_the_middle(clicks, tmp_path)
    job = job_of(clicks, tmp_path, "train.seed=5")
    advice = f"checkpoint.resume = false, checkpoint.load = {url!r} and another checkpoint.dir"

    with pytest.raises(JobError, match=re.escape(advice)):
        run_first(job)

    fresh = ["checkpoint.resume=false", f"checkpoint.load={url}"]
    assert run(job_of(clicks, tmp_path / "fresh", *fresh))


def test_run_whose_latest_is_lost_resumes_from_the_newest(
    clicks: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or was never written: it was killed right after its first checkpoint."""
    run(job_of(clicks, tmp_path), num_workers=1)
    (tmp_path / "LATEST").unlink()

    ended = run(job_of(clicks, tmp_path), num_workers=1)[0]

    assert ended.examples == 0
    assert "has no LATEST: resuming from the newest" in caplog.text
    assert "epoch-2" in caplog.text


def test_job_begins_beside_checkpoints_that_are_of_no_run(clicks: Path, tmp_path: Path) -> None:
    ParameterStore().save(SaveRequest(url=f"{tmp_path}/best"))
    ParameterStore().save(SaveRequest(url=f"{tmp_path}/epoch-9", inference=InferenceSettings()))

    ended = run(job_of(clicks, tmp_path))[0]

    assert ended.examples == 2 * ROWS


@pytest.mark.parametrize("change", ["size", "content"])
def test_files_that_have_changed_are_refused(change: str, clicks: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    file = tmp_path / "train/part.gz"
    text = "".join(part.read_text() for part in sorted((clicks / "train").iterdir()))
    file.write_bytes(gzip.compress(text.encode()))
    killed_in_the_middle(tmp_path, tmp_path / "model")
    was = file.stat().st_size
    if change == "size":
        file.write_bytes(gzip.compress(text.encode() * 2))
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"?")

    with pytest.raises(JobError, match="files have changed since the run") as refused:
        run_first(job_of(tmp_path, tmp_path / "model"))

    assert f": part.gz {file.stat().st_size} bytes " in str(refused.value)
    assert f", was part.gz {was} bytes " in str(refused.value)
    assert "Restore the files; or, to start a fresh run from" in str(refused.value)


def test_checkpoint_that_no_job_saved_is_refused(clicks: Path, tmp_path: Path) -> None:
    run(job_of(clicks, tmp_path))
    latest = tmp_path / "epoch-2"
    store = ParameterStore()
    store.load(str(latest))
    store.save(SaveRequest(url=str(latest)))

    with pytest.raises(CheckpointError, match="has no run progress"):
        run_first(job_of(clicks, tmp_path))


def test_checkpoint_that_does_not_say_how_many_batches_it_has_is_refused(
    clicks: Path, tmp_path: Path
) -> None:
    """The learning rate would start over, at trained weights."""
    run(job_of(clicks, tmp_path))
    latest = tmp_path / "epoch-2"
    manifest = Checkpoint.open(str(latest)).manifest
    (latest / "MANIFEST.json").write_text(manifest_to_json(replace(manifest, batches=0)))

    with pytest.raises(
        CheckpointError,
        match=rf"does not record the number of batches behind its {manifest.version} applied steps",
    ):
        run_first(job_of(clicks, tmp_path))


def test_rows_without_an_order_are_refused_before_anything_is_saved(
    clicks: Path, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=r"data\.reader_num is 2, but .* have an order"):
        plan_of(job_of(clicks, tmp_path, "data.reader_num=2"))

    run(job_of(clicks, tmp_path, "data.reader_num=2", "checkpoint.every_steps=0"))
    assert run(job_of(clicks, tmp_path, "data.reader_num=2", "checkpoint.every_steps=0"))


def test_run_of_several_readers_does_not_go_on_from_the_middle(
    clicks: Path, tmp_path: Path
) -> None:
    killed_in_the_middle(clicks, tmp_path, "data.reader_num=2", "checkpoint.resume=false")

    with pytest.raises(JobError, match=r"has no data positions of workers \[0, 1\]"):
        run_first(job_of(clicks, tmp_path))


def test_worker_that_had_ended_no_batch_needs_no_position(clicks: Path, tmp_path: Path) -> None:
    """As one that had sent a part of its first batch when the checkpoint was taken."""
    checkpoint = Checkpoint.open(killed_in_the_middle(clicks, tmp_path))
    manifest = checkpoint.manifest
    first = replace(manifest.workers[1], step=0, position="")
    changed = replace(manifest, workers={**manifest.workers, 1: first})
    Path(checkpoint.url, "MANIFEST.json").write_text(manifest_to_json(changed))
    files = json.loads(checkpoint.attachment("run.json"))["files"]

    run_before = earlier_run(job_of(clicks, tmp_path), num_workers=2, files=files)

    assert run_before is not None
    assert run_before.progress[1] == first


def test_what_a_killed_save_left_goes_at_the_next_start(clicks: Path, tmp_path: Path) -> None:
    job = job_of(clicks, tmp_path)
    open_data(
        LocalFolder(tmp_path / "step-4")
    )  # in asynchronous training no later run may save step 4

    run(job)

    assert not (tmp_path / "step-4").exists()


def test_pass_ends_when_the_checkpoint_before_is_written(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: the servers let a shrink wait for their limit only."""

    def write_slowly(*arguments: Any, **named: Any) -> Any:
        threading.Event().wait(0.2)
        return write_share(*arguments, **named)

    monkeypatch.setattr("ctr_ps.ps_server.engine.engine.write_share", write_slowly)
    settings = ["checkpoint.every_steps=1", "life.statistics=true", "strategy.mode=async"]
    plan = plan_of(job_of(clicks, tmp_path, *settings))

    train_job(plan, ParameterStore(wait_limit_s=0.0))

    assert Checkpoint.open(tmp_path).name == "epoch-2"
