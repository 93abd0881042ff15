"""One worker's part of a job, on a store in this process."""

import gzip
import json
import logging
import shutil
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CheckpointError, DataError, JobError
from ctr_ps.protos.store import InferenceSettings, Missing, SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.claim import claimed
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, load_job, override_job
from ctr_ps.ps_worker.job.checks import require_optimizers
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, model_of, table_specs
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.run.plan import Plan, plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from tests.support.cluster import cluster
from tests.support.killed import wait_for_saves
from tests.support.statistics import counted_on
from tests.support.training import job_of, train_alone, train_together, worker_role


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of 50 rows, two of them malformed."""
    generate(tmp_path, rows=48, test_rows=100, files=1, test_files=1, seed=1)
    (path,) = (tmp_path / "train").iterdir()
    path.write_text(path.read_text() + "1\tshort\n0\tshort\n")
    return path


def test_limit_of_bad_rows_is_of_an_epoch(rows: Path) -> None:
    job = job_of(
        f"data.train={rows}",
        "data.bad_row_limit=2",
        "train.epochs=3",
        "train.batch_size=16",
        "model.hidden=[4]",
    )

    summary = train_alone(job)

    assert summary.bad_rows == 2
    assert summary.examples == 3 * 48


def test_more_workers_than_files_share_a_file(rows: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(f"data.train={rows}", "model.hidden=[4]", "train.batch_size=8")

    with caplog.at_level(logging.INFO):
        first, second = train_together(job)

    assert first.examples == 48
    assert 0 < second.examples < 48
    assert first.bad_rows + second.bad_rows == 2
    middle = rows.stat().st_size // 2
    assert f"worker 0 trains on 1 file: {rows}[0:{middle}]" in caplog.messages
    assert f"worker 1 trains on 1 file: {rows}[{middle}:]" in caplog.messages


@pytest.mark.parametrize(
    ("differing", "told"),
    [
        (
            "data.train=FEWER",
            r"data\.train = 1 file, .* has data\.train = 2 files, .* with part-1 ",
        ),
        (
            "data.train=OTHER",
            r"data\.train = 2 files, .* with part-1 .* has data\.train = 2 files, ",
        ),
        ("data.test=OTHER", r"data\.test = 2 files, "),
        ("data.valid=OTHER", r"data\.valid = 2 files, .* has data\.valid = no files\)"),
        ("train.batch_size=9", r"train\.batch_size = 9 \(worker 0 has train\.batch_size = 8\)"),
        ("train.thread_num=2", r"train\.thread_num = 2 \(worker 0 has train\.thread_num = 1\)"),
        ("data.reader_num=2", r"data\.reader_num = 2 "),
        ("data.in_memory=true", r"data\.in_memory = True "),
        ("data.shuffle_files=true", r"data\.shuffle_files = True "),
        ("data.format=csv", r"data\.format = csv \(worker 0 has data\.format = nothing\)"),
        ("data.pipe_command=cat", r"data\.pipe_command = cat "),
        ("data.bad_row_limit=7", r"data\.bad_row_limit = 7 "),
        ("data.in_memory=true data.shuffle=global", r"data\.shuffle = global "),
        ("data.valid=SAME valid.every_steps=3", r"valid\.every_steps = 3 "),
        ("checkpoint.dir=model checkpoint.resume=true", r"checkpoint\.resume = True "),
    ],
)
def test_workers_with_other_rows_or_settings_are_refused(
    differing: str, told: str, rows: Path, tmp_path: Path
) -> None:
    """Files are the same by name, size and both ends, in whatever folder."""
    content = rows.read_bytes()
    folders = {name: tmp_path / name for name in ("SAME", "COPY", "FEWER", "OTHER")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "part-0").write_bytes(content)
        if name != "FEWER":
            other = content[:-2] + b"x\n" if name == "OTHER" else content
            (folder / "part-1").write_bytes(other)
    for name, folder in folders.items():
        differing = differing.replace(f"={name}", f"={folder}/part-*")

    def plan_in(folder: Path, worker: int, *settings: str) -> Plan:
        sets = [f"data.train={folder}/part-*", "train.batch_size=8", "model.hidden=[4]", *settings]
        role = worker_role(worker, 3, is_in_process=False)
        return plan_of(job_of(*sets), role)

    store = ParameterStore(num_workers=3, wait_limit_s=1.0)
    for worker, files in enumerate(["SAME", "COPY"]):
        store.join(worker, 1 + worker, terms=plan_in(folders[files], worker).terms).result()

    plan = plan_in(folders["SAME"], 2, *differing.split())
    with pytest.raises(JobError, match=told):
        train_job(plan, store)


def dense_of(store: ParameterStore, job: Job) -> NDArray[np.float32]:
    model = model_of(job, Schema.load(job.data.schema_source))
    dense = np.empty(model.num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: dense}).result()
    return dense


@pytest.fixture
def undivided(rows: Path) -> Path:
    """The rows in a file that one worker reads."""
    path = rows.with_suffix(".txt.gz")
    path.write_bytes(gzip.compress(rows.read_bytes()))
    return path


def test_workers_without_rows_are_named_in_a_warning(
    undivided: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(f"data.train={undivided}", "model.hidden=[4]")

    train_together(job, num_workers=3)

    warnings = [each for each in caplog.messages if "no rows to train on" in each]
    assert len(warnings) == 3  # in the logs of worker 0 and of these two
    assert warnings[0].startswith(
        "2 of 3 workers have no rows to train on: workers 1, 2. data.train has only 1 part: "
    )
    assert warnings[0].endswith("Start fewer workers, or write more files or smaller row groups")


def test_rows_shuffled_globally_leave_no_worker_without(
    undivided: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [f"data.train={undivided}", "model.hidden=[4]", "data.shuffle=global"]

    train_together(job_of(*settings, "data.in_memory=true"), 2)

    assert not any("no rows to train on" in message for message in caplog.messages)


def test_geo_learns_as_much_beside_a_worker_without_rows(undivided: Path) -> None:
    job = job_of(
        f"data.train={undivided}",
        "model.hidden=[4]",
        "train.batch_size=8",
        "strategy.mode=geo",
        "optimizer.sparse=adagrad",
    )

    stores = [ParameterStore(num_workers=number, wait_limit_s=60.0) for number in (1, 2)]
    for store in stores:
        train_together(job, store.engine.members.num_workers, store=store)
    alone, together = (dense_of(store, job) for store in stores)

    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)


def test_model_that_learnt_its_rows_by_heart_is_told(
    rows: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [
        f"data.train={rows}",
        f"data.test={rows.parent.parent}/test/*",
        "train.epochs=30",
        "train.batch_size=16",
        "optimizer.dense.learning_rate=0.02",
        "optimizer.sparse.learning_rate=0.2",
    ]

    summary = train_alone(job_of(*settings))

    assert summary.log_loss is not None
    assert summary.base_log_loss is not None
    assert summary.log_loss > summary.base_log_loss
    assert any("probably overfits" in message for message in caplog.messages)


@pytest.mark.parametrize("shuffle", ["none", "local", "global"])
def test_rows_in_memory_are_trained_on_once_in_each_epoch(
    rows: Path, shuffle: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(
        f"data.train={rows}",
        "data.in_memory=true",
        f"data.shuffle={shuffle}",
        "model.hidden=[4]",
        "train.batch_size=8",
        "train.epochs=2",
    )

    with caplog.at_level(logging.INFO):
        first, second = train_together(job)

    assert first.examples == 2 * 48
    assert first.bad_rows + second.bad_rows == 2
    loadings = [message for message in caplog.messages if message.startswith("loaded into memory")]
    deals = [message for message in caplog.messages if message.startswith("shuffled globally")]
    assert len(loadings) == 2  # each worker, not each epoch
    assert len(deals) == (4 if shuffle == "global" else 0)


def test_command_of_the_job_reads_the_files(tmp_path: Path) -> None:
    schema = tmp_path / "words.toml"
    schema.write_text('hash_version = 1\nslots = ["words"]\ndense = [{ name = "age" }]\n')
    (tmp_path / "rows").write_text("1 30 a b\n0 40 c\n")
    words = """for (i = 3; i <= NF; i++) printf " %s", $i"""
    command = f"""awk '{{printf "1 %s 1 %s %d", $1, $2, NF - 2; {words}; print ""}}'"""
    data = {
        "train": str(tmp_path / "rows"),
        "schema": str(schema),
        "pipe_command": command,
        "columns": ["click", "age", "words"],
        "values": "text",
    }
    job = override_job({"data": data, "model": {"hidden": [4], "dim": 2}}, [], source="test")
    store = ParameterStore()

    summary = train_job(plan_of(job), store)

    assert summary.examples == 2
    keys = np.array([key_of(1, word) for word in "abc"], np.uint64)
    assert store.status().tables["embedding"].rows == 3
    zeros = store.pull_sparse({"embedding": keys}, missing=Missing.ZEROS).result().rows["embedding"]
    assert zeros.any(axis=1).all()  # these are the rows


def test_several_readers_and_shuffled_files_train_on_the_same_rows(tmp_path: Path) -> None:
    generate(tmp_path, rows=60, test_rows=100, files=5, test_files=1, seed=1)
    job = job_of(
        f"data.train={tmp_path}/train/*",
        "data.reader_num=3",
        "data.shuffle_files=true",
        "data.format=criteo",
        "model.hidden=[4]",
        "train.epochs=2",
    )

    summary = train_alone(job)

    assert summary.examples == 2 * 60


def test_error_of_training_ends_the_readers(tmp_path: Path) -> None:
    row = "\t".join([*("1" for _ in range(13)), *("a" for _ in range(26))])
    for name in "ab":
        (tmp_path / name).write_text(f"{row}\n" * 100)  # without labels
    job = job_of(
        f"data.train={tmp_path}/*", "data.reader_num=2", "train.batch_size=1", "model.hidden=[4]"
    )

    with pytest.raises(DataError, match="rows without labels") as caught:
        train_alone(job)

    assert caught.tb is not None  # it holds on to all that was under way
    assert not [each for each in threading.enumerate() if each.name.startswith("reader-")]


JOB = """\
[model]
name = "ctr_dnn"
dim = 4
[data]
schema = "criteo"
test = "none-*"


"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"criteo"', '"criteos"', ": data.schema: no schema 'criteos'"),
        (
            '"criteo"',
            '"criteo"\nformat = "critio"',
            ": data.format: unknown format 'critio', did you mean 'criteo'",
        ),
        (
            "dim = 4",
            "dims = 4",
            ": model.dims: unknown option of model 'ctr_dnn': 'dims', did you mean 'dim'",
        ),
        ("ctr_dnn", "ctr_dn", ": model.name: unknown model 'ctr_dn', did you mean 'ctr_dnn'"),
    ],
)
def test_job_that_does_not_fit_names_file_and_key(
    old: str, new: str, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace(old, new, 1))

    with pytest.raises(JobError) as caught:
        plan_of(load_job(path))

    assert str(caught.value).startswith(f"{path}{fault}")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ([], "job.toml: data.test: no file matches 'none-*'"),
        (["data.train=other-*"], "--set data.train=other-*: data.train: no file matches 'other-*'"),
    ],
)
def test_pattern_without_a_file_names_its_key(
    overrides: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)

    with pytest.raises(DataError) as caught:
        plan_of(load_job(Path("job.toml"), overrides))

    assert str(caught.value) == fault


@pytest.mark.parametrize("key", ["data.test", "data.valid"])
def test_files_to_evaluate_of_another_schema_are_refused_before_training(
    rows: Path, tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other.tsv"
    other.write_text("1\tshort\n" * 50)
    job = override_job({}, [f"data.train={rows}", f"{key}={other}"], source="job.toml")

    with pytest.raises(DataError, match="the schema or the format is probably") as refused:
        plan_of(job)

    assert str(refused.value).startswith(f"--set {key}={other}: {key}: no rows in 1 file: {other}")
    assert not any("skipped a malformed row" in message for message in caplog.messages)


@pytest.mark.parametrize(("mode", "optimizer"), [("sync", "ftrl"), ("geo", "adagrad")])
def test_optimizer_that_a_model_asks_for_gives_way_where_replicas_cannot_have_it(
    mode: str, optimizer: str
) -> None:
    job = job_of("model=wide_deep", f"strategy.mode={mode}")
    model = model_of(job, Schema.load("criteo"))

    require_optimizers(job, model)

    specs = {spec.name: spec.optimizer.name for spec in table_specs(model, job)}
    assert specs == {"wide": optimizer, "embedding": "adagrad"}


def test_checkpoint_of_another_feature_hash_is_refused_by_name(rows: Path, tmp_path: Path) -> None:
    job = override_job({}, [f"data.train={rows}", f"checkpoint.load={tmp_path}/model"], source="t")
    schema = {**Schema.load("criteo").to_dict(), "hash_version": 99}
    attachments = {"job.json": job.to_json().encode(), "schema.json": json.dumps(schema).encode()}
    ParameterStore().save(SaveRequest(url=f"{tmp_path}/model", attachments=attachments))

    with pytest.raises(
        CheckpointError,
        match=r"model/data-\w+/attachments/schema\.json: .*feature hash version 99, .*version 1",
    ):
        train_alone(job)
    with pytest.raises(CheckpointError, match=r"feature hash version 99"):
        infer(job.checkpoint.load, [str(rows)])


def test_job_keeps_its_checkpoints_behind_a_url(rows: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/model"
    settings = [f"data.train={rows}", "data.bad_row_limit=2", "model.hidden=[4]"]
    saving = job_of(*settings, f"checkpoint.dir={url}")
    store = ParameterStore()

    saved = train_job(plan_of(saving), store)

    assert saved.checkpoint == f"{url}/epoch-1"
    loaded = ParameterStore()
    loaded.load(url)
    assert loaded.digest() == store.digest()
    assert infer(url, [str(rows)])["rows"] > 0


def job_of_life(rows: Path, *overrides: str) -> Job:
    return job_of(
        f"data.train={rows}",
        "data.bad_row_limit=2",
        "train.batch_size=16",
        "train.epochs=3",
        "model.hidden=[4]",
        *overrides,
    )


def job_in(folder: Path, rows: Path, *settings: str) -> Job:
    own = [f"data.train={rows}", "data.bad_row_limit=2", "model.hidden=[4]", "model.dim=2"]
    return job_of(*own, f"checkpoint.dir={folder}", *settings)


def run_in(folder: Path, rows: Path, *settings: str) -> None:
    train_alone(job_in(folder, rows, *settings))


def digest_in(folder: Path) -> str:
    store = ParameterStore()
    store.load(str(folder))
    return store.digest()


def checkpoints_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/MANIFEST.json")}


def test_fresh_run_is_refused_where_an_earlier_one_has_saved(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run_in(folder, rows, "train.epochs=2")
    before = digest_in(folder)

    with pytest.raises(JobError) as refusal:
        run_in(folder, rows, "model.name=fm", "model={name='fm', dim=2}")

    assert str(refusal.value) == (
        f"--set checkpoint.dir={folder}: checkpoint.dir: {folder} has checkpoints of an earlier run (model "
        f"'ctr_dnn', 2 epochs done: epoch-1, epoch-2), and this run, of model 'fm', would add its own: set "
        f"checkpoint.resume = true to resume the earlier run, checkpoint.overwrite = true to "
        f"replace its checkpoints, or another checkpoint.dir"
    )
    assert checkpoints_in(folder) == {"epoch-1", "epoch-2"}
    assert digest_in(folder) == before


@pytest.mark.parametrize("setting", ["resume", "overwrite"])
def test_run_is_refused_where_another_one_is_saving(
    setting: str, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    run_in(folder, rows)
    before = digest_in(folder)
    other = job_of(f"checkpoint.dir={folder}")

    with (
        claimed(other, is_of_this_run=False),
        pytest.raises(JobError, match="is in use by another"),
    ):
        run_in(folder, rows, f"checkpoint.{setting}=true", "train.epochs=2")

    assert digest_in(folder) == before
    run_in(folder, rows, f"checkpoint.{setting}=true", "train.epochs=2")
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"LATEST"}


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_run_that_overwrites_leaves_its_own_checkpoints_alone(
    mode: str, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    settings = [f"checkpoint.mode={mode}"]
    run_in(folder, rows, "train.epochs=4", *settings)
    shutil.copytree(folder / "epoch-1", folder / "best")

    run_in(folder, rows, "train.epochs=2", "train.seed=5", "checkpoint.overwrite=true", *settings)

    assert checkpoints_in(folder) == {"best", "epoch-1", "epoch-2"}
    job = json.loads(Checkpoint.open(folder).attachment("job.json"))
    assert (Checkpoint.open(folder).name, job["train"]["seed"]) == ("epoch-2", 5)


def test_run_that_overwrites_keeps_the_earlier_checkpoints_until_it_has_one(
    rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    run_in(folder, rows, "train.epochs=3")
    before = digest_in(folder)
    ends = job_in(folder, rows, "checkpoint.overwrite=true", "train.batch_size=8")

    with pytest.raises(SystemExit):
        train_job(plan_of(ends), ParameterStore(), is_told_to_end=lambda: True)

    assert checkpoints_in(folder) == {"epoch-1", "epoch-2", "epoch-3"}
    assert digest_in(folder) == before


def test_model_that_an_overwriting_run_starts_from_stays(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run_in(folder, rows, "train.epochs=3")

    settings = ["checkpoint.overwrite=true", f"checkpoint.load={folder}/epoch-2"]
    run_in(folder, rows, *settings)

    assert checkpoints_in(folder) == {"epoch-1", "epoch-2"}


@pytest.mark.parametrize("start", ["overwrite=true", "load={0}/warm/epoch-1"])
def test_process_in_the_place_of_worker_0_goes_on_in_the_folder_of_its_run(
    start: str, rows: Path, tmp_path: Path
) -> None:
    """It is lost after one of the two steps of 2 threads that come before a validation."""
    folder, metrics = tmp_path / "model", tmp_path / "run/metrics.jsonl"
    settings = ["cluster.on_worker_loss=wait", "checkpoint.every_steps=2"]
    figures = [f"run.dir={metrics.parent}", f"data.valid={rows}", "valid.every_steps=4"]
    run_in(tmp_path / "warm", rows)
    begins = f"checkpoint.{start.format(tmp_path)}"
    threads = ["strategy.mode=sync", "train.thread_num=2", "train.batch_size=8"]
    undisturbed = train_alone(job_in(tmp_path / "other", rows, *threads, begins))
    job = job_in(folder, rows, *threads, *settings, *figures, begins)
    plan = plan_of(job, worker_role(is_in_process=False))

    def has_saved() -> bool:
        wait_for_saves(60.0)
        return "step-2" in checkpoints_in(folder)

    with cluster(num_servers=1, num_workers=1) as servers:
        with pytest.raises(SystemExit):
            train_job(plan, servers.client(joins=False), is_told_to_end=has_saved)
        saved = checkpoints_in(folder)
        ended = train_job(plan, servers.client(joins=False))

    assert saved == {"step-2"}
    assert {"step-2", "epoch-1"} <= checkpoints_in(folder)
    assert ended.examples == 48
    kinds = [json.loads(line)["kind"] for line in metrics.read_text().splitlines()]
    assert [kind for kind in kinds if kind != "train"] == [
        *("start", "start", "valid", "pass", "valid", "end")
    ]
    assert [each["step"] for each in ended.validations] == [4, 6]
    assert ended.model_digest == undisturbed.model_digest
    with pytest.raises(JobError, match="1 epoch done: step-2, "):
        run_in(folder, rows)


@pytest.mark.parametrize("settings", [["checkpoint.resume=true"], []], ids=["goes on", "first"])
def test_run_with_a_folder_of_its_own_is_not_refused(
    settings: list[str], rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    ParameterStore().save(SaveRequest(url=f"{folder}/best"))
    if settings:
        run_in(folder, rows)

    run_in(folder, rows, "train.epochs=2", *settings)

    assert "epoch-2" in checkpoints_in(folder)


def test_run_that_goes_on_removes_its_old_checkpoints_and_no_others(
    rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    run_in(folder, rows, "train.epochs=3")
    for name in ("best", "epoch-best"):
        shutil.copytree(folder / "epoch-1", folder / name)
    store = ParameterStore()
    store.load(str(folder))
    store.save(SaveRequest(url=f"{folder}/step-1", inference=InferenceSettings()))

    settings = ["checkpoint.keep_last=1", f"checkpoint.load={folder}/epoch-2"]
    run_in(folder, rows, "train.epochs=4", "checkpoint.resume=true", *settings)

    assert checkpoints_in(folder) == {"best", "epoch-best", "step-1", "epoch-2", "epoch-4"}


@pytest.mark.parametrize("load", ["{0}", "{0}/", "{0}/epoch-1", "file://{0}/best"])
def test_deltas_do_not_replace_what_their_run_starts_from(
    load: str, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    settings = [f"checkpoint.load={load.format(folder)}", "checkpoint.mode=delta"]

    with pytest.raises(JobError, match=r"--set checkpoint\.load.*another checkpoint\.dir"):
        plan_of(job_in(folder, rows, *settings))

    assert plan_of(job_in(folder, rows, *settings, "checkpoint.resume=true"))
    assert plan_of(job_in(folder, rows, settings[0]))
    assert plan_of(job_in(tmp_path / "mod", rows, *settings))


@pytest.mark.parametrize(
    ("every", "shows", "unseen"),
    [(0, 3, 0), (1, 0.875, 1), (2, 2, 0), (3, 1.5, 1), (4, 3, 0)],
)
def test_passes_end_every_so_many_epochs(rows: Path, every: int, shows: float, unseen: int) -> None:
    """Of three epochs, in each of which a key is shown as often; a pass halves what came before its end."""
    once, store = ParameterStore(), ParameterStore()
    settings = ["life.statistics=true", "life.decay=0.5"]
    first = job_of_life(rows, *settings, "train.epochs=1", "life.shrink_every_epochs=0")
    train_job(plan_of(first), once)

    job = job_of_life(rows, *settings, f"life.shrink_every_epochs={every}")
    train_job(plan_of(job), store)

    expected = {key: row.show * shows for key, row in counted_on([once], "embedding").items()}
    counted = counted_on([store], "embedding")
    assert {key: row.show for key, row in counted.items()} == expected
    assert {row.unseen for row in counted.values()} == {unseen}


def job_of_slots(folder: Path, data: str, slots: str, *settings: str, dense: str = "age") -> Job:
    """Returns a job on a CSV file of one number and the slots."""
    schema, rows = folder / "schema.toml", folder / "rows.csv"
    names = [f'"{name}"' for name in slots.split()]
    schema.write_text(
        f'hash_version = 1\nlabel = "click"\nslots = [{", ".join(names)}]\n'
        f'dense = [{{ name = "{dense}" }}]\n'
    )
    rows.write_text(data)
    given = [f"data.train={rows}", f"data.schema={schema}", *settings]
    return job_of(*given)


USERS = "click,age,user,ad,city\n" + "".join(
    f"{i % 2},{i},u{i % 5},a{i % 3},c{i % 4}\n" for i in range(20)
)
ONE_USER = "click,age,user,ad,city\n1,30,u99,a99,c0\n"


@pytest.mark.parametrize(
    ("model", "only", "taken"),
    [("lr", [], ["dense", "linear"]), ("ctr_dnn", ["embedding"], ["embedding"])],
)
def test_model_with_a_new_slot_begins_with_the_rows_of_the_old_ones(
    model: str, only: list[str], taken: list[str], tmp_path: Path
) -> None:
    named = f"model.name={model}"
    train_alone(job_of_slots(tmp_path, USERS, "user ad", named, f"checkpoint.dir={tmp_path}/old"))
    load = [f"checkpoint.load={tmp_path}/old", *([f"checkpoint.only={only}"] if only else [])]
    old, store = ParameterStore(), ParameterStore()
    old.load(f"{tmp_path}/old")

    summary = train_job(
        plan_of(job_of_slots(tmp_path, ONE_USER, "user ad city", named, *load)), store
    )

    assert summary.warm_start is not None
    assert summary.warm_start["taken"] == taken
    known = [key_of(1, f"u{i}") for i in range(5)] + [key_of(2, f"a{i}") for i in range(3)]
    table, keys = taken[-1], np.array(known, np.uint64)
    before, after = (
        each.pull_sparse({table: keys}, missing=Missing.ZEROS).result().rows[table]
        for each in (old, store)
    )
    np.testing.assert_array_equal(after, before)
    assert before.any()
    assert store.status().tables[table].rows == 8 + 3  # u99, a99, and c0 of the new slot


@pytest.mark.parametrize(
    ("slots", "dense", "settings", "message"),
    [
        ("city user ad", "age", [], "slot 1 was 'user' and is 'city' .new slots come last."),
        ("user city", "age", [], "slot 2 was 'ad' and is 'city'"),
        ("user", "age", ["checkpoint.only=['linear']"], "slot 'ad' is missing"),
        ("user ad city", "city", [], "another schema: numbers missing: age; new: city"),
        (
            "user ad city",
            "age",
            ["model.name=ctr_dnn", "checkpoint.load={}/deep"],
            r"new slots city change the layers .* set checkpoint.only = \['embedding'\]",
        ),
    ],
)
def test_other_change_of_slots_is_refused_by_name(
    slots: str, dense: str, settings: list[str], message: str, tmp_path: Path
) -> None:
    for name, model in (("old", "lr"), ("deep", "ctr_dnn")):
        folder = f"checkpoint.dir={tmp_path}/{name}"
        job = job_of_slots(tmp_path, USERS, "user ad", f"model.name={model}", folder)
        train_alone(job)
    given = ["model.name=lr", f"checkpoint.load={tmp_path}/old"]
    given += [each.format(tmp_path) for each in settings]

    with pytest.raises(JobError, match=message):
        train_alone(job_of_slots(tmp_path, USERS, slots, *given, dense=dense))


def test_other_layers_begin_with_the_embeddings_of_an_old_model(
    rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_alone(job_of_life(rows, f"checkpoint.dir={tmp_path}/old"))
    load, only = f"checkpoint.load={tmp_path}/old", "checkpoint.only=embedding"
    other = job_of_life(rows, load, "model.hidden=[5]", "data.schema=criteo_min_max")

    with pytest.raises(CheckpointError, match="does not fit: 'dense'"):
        train_alone(job_of_life(rows, load, "model.hidden=[5]"))
    with pytest.raises(JobError, match="another schema"):
        train_alone(other)
    with caplog.at_level(logging.INFO):
        store = ParameterStore()
        settings = (load, only, "model.hidden=[5]", "data.schema=criteo_min_max")
        summary = train_job(plan_of(job_of_life(rows, *settings)), store)

    assert summary.warm_start == {
        "checkpoint": f"{tmp_path}/old",
        "taken": ["embedding"],
        "fresh": ["dense"],
    }
    assert f"loaded {tmp_path}/old taken=embedding fresh=dense" in caplog.messages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["checkpoint.only=embedding"], "no model is loaded: set checkpoint.load"),
        (["checkpoint.load=m", "checkpoint.only=wide"], "has wide, but .* only dense, embedding"),
    ],
)
def test_parts_that_the_model_does_not_have_are_refused(
    rows: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        plan_of(job_of_life(rows, *settings))


def test_expired_rows_are_in_no_checkpoint_and_in_the_summary(
    rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what was shown more than once in an epoch is worth 0.15 after it."""
    job = job_of_life(rows, "life.delete_threshold=0.15", f"checkpoint.dir={tmp_path / 'saved'}")
    store, loaded = ParameterStore(), ParameterStore()

    summary = train_job(plan_of(job), store)

    assert summary.tables is not None
    figures = summary.tables["embedding"]
    assert figures == asdict(store.status().tables["embedding"])
    assert figures["expired"] > figures["rows"] > 0
    (*_, last) = (text for text in caplog.messages if text.startswith("shrunk table=embedding"))
    assert f" left_rows={figures['rows']} removed_mb=" in last
    loaded.load(str(tmp_path / "saved"))
    assert loaded.digest() == summary.model_digest
    assert counted_on([loaded], "embedding") == counted_on([store], "embedding")


def test_table_of_a_job_keeps_to_its_limit(rows: Path) -> None:
    summary = train_alone(job_of_life(rows, "life.max_rows=256"))

    assert summary.tables is not None
    assert summary.tables["embedding"]["rows"] <= 256
    assert summary.tables["embedding"]["evicted"] > 0


def test_job_without_rules_ages_nothing(rows: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train_alone(job_of_life(rows))

    assert not [message for message in caplog.messages if message.startswith("shrunk")]


def test_precision_is_in_the_summary_and_may_change_when_a_run_resumes(
    rows: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    settings = [
        f"data.train={rows}",
        f"data.test={rows}",
        "data.bad_row_limit=4",
        "train.batch_size=16",
        "model.hidden=[16]",
        f"checkpoint.dir={tmp_path / 'model'}",
        "checkpoint.resume=true",
    ]

    summaries = []
    for epochs, compute in enumerate(("float32", "bfloat16"), start=1):
        more = [f"train.epochs={epochs}", f"train.compute={compute}"]
        job = job_of(*settings, *more)
        summaries.append(train_alone(job))

    assert [summary.compute for summary in summaries] == ["float32", "bfloat16"]
    assert [summary.examples for summary in summaries] == [48, 48]  # the second epoch alone
    inferred = infer(str(tmp_path / "model"), [str(rows)])
    assert inferred["model_digest"] == summaries[1].model_digest
    assert inferred["auc"] == summaries[1].auc


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_workers_that_share_a_queue_train_each_row_once(mode: str, tmp_path: Path) -> None:
    """One of them is given no file: the others do not wait for its first batches."""
    generate(tmp_path, rows=300, test_rows=10, files=3, test_files=1, seed=1)
    for path in (tmp_path / "train").iterdir():  # that cannot be split
        with gzip.open(f"{path}.gz", "wb") as packed:
            packed.write(path.read_bytes())
        path.unlink()
    job = job_of(
        f"data.train={tmp_path}/train/*",
        "data.deal=queue",
        "train.epochs=2",
        "train.batch_size=16",
        "train.log_every_s=100",
        "model.hidden=[4]",
        "life.statistics=true",
        "life.shrink_every_epochs=0",
        f"strategy.mode={mode}",
    )
    store = ParameterStore(num_workers=4, wait_limit_s=20.0)

    summaries = train_together(job, 4, store=store)

    dataset = QueueDataset(Schema.load("criteo"), 100)
    dataset.set_filelist(sorted((tmp_path / "train").iterdir()))
    expected = Counter(key for batch in dataset for key in batch.keys.tolist())
    counted = counted_on([store], "embedding")
    assert summaries[0].examples == 2 * 300
    assert {key: row.show for key, row in counted.items()} == {
        key: 2 * number for key, number in expected.items()
    }
