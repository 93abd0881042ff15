"""A dry run: one step, as the run would take it, and nothing written."""

import gzip
from pathlib import Path

import pytest

from ctr_ps.protos.errors import BadRowError, CheckpointError, CtrPsError, DataError, JobError
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.dry_run import dry_run
from ctr_ps.ps_worker.run.plan import plan_of
from tests.support.training import job_of, train_alone, worker_role

B = 32
OTHER = 'model={ name = "wide_deep" }'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate(tmp_path / "clicks", rows=200, test_rows=100, files=2, test_files=1, seed=1)
    return tmp_path


def job(folder: Path, *settings: str) -> Job:
    return job_of(
        f"data.train={folder}/clicks/train/*",
        f"data.test={folder}/clicks/test/*",
        "model.name=deepfm",
        "model.hidden=[4]",
        f"train.batch_size={B}",
        *settings,
    )


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_loss_is_that_of_the_first_step_of_the_run(folder: Path) -> None:
    settings = ("valid.slices=C1", "valid.group_by=C2")

    found = dry_run(plan_of(job(folder, *settings)))

    # A file of the first batch alone, but the rate at which a model starts is that of all rows.
    train = sorted((folder / "clicks/train").iterdir())
    rows = [line for path in train for line in path.read_text().splitlines(keepends=True)]
    rate = (sum(row.startswith("1") for row in rows) + 0.5) / (len(rows) + 1)
    (folder / "first.tsv").write_text("".join(rows[:B]))
    first = train_alone(job(folder, f"data.train={folder}/first.tsv", f"train.base_rate={rate}"))
    assert found["loss"] == pytest.approx(first.train_loss, abs=1e-6)
    assert found["rows_of_batch"] == B
    assert found["columns"] == "26 slots, 13 numbers"
    assert {name: (each["files"], each["rows_read"]) for name, each in found["data"].items()} == {
        "train criteo": (2, B),
        "test criteo": (1, B),
    }
    assert found["data"]["train criteo"]["clicks"] == sum(row.startswith("1") for row in rows[:B])
    values = {(k, value) for row in rows[:B] for k, value in enumerate(row.split("\t")[14:])}
    assert found["rows_of_tables"] == dict.fromkeys(("linear", "embedding"), len(values))
    assert found["optimizers"] == {"linear": "adagrad", "embedding": "adagrad", "dense": "adam"}


def test_nothing_is_written(folder: Path) -> None:
    before = content(folder)

    dry_run(plan_of(job(folder, f"checkpoint.dir={folder}/model", f"run.dir={folder}/run")))

    assert content(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == ["clicks"]


def test_files_of_each_format_are_read(folder: Path) -> None:
    (folder / "clicks/train/other.libffm").write_text("1 1:1\n")

    with pytest.raises(CtrPsError, match=r"other\.libffm"):
        dry_run(plan_of(job(folder)))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (["data.test=nowhere/*"], DataError, "no file matches 'nowhere/*'"),
        (["data.train=FOLDER/short.tsv.gz", "data.bad_row_limit=3"], BadRowError, "short.tsv"),
        (["checkpoint.dir=FOLDER/model"], JobError, "has checkpoints of an earlier run"),
        (["run.dir=FOLDER/run"], JobError, "has the metrics of an earlier run"),
        (["checkpoint.load=FOLDER/model", "model.dim=3"], CheckpointError, "dim"),
        (["checkpoint.load=FOLDER/model", OTHER], CheckpointError, "another model"),
        (
            ["checkpoint.dir=FOLDER/model", "checkpoint.resume=true", "train.seed=9"],
            JobError,
            "so it cannot be resumed",
        ),
    ],
)
def test_errors_are_those_of_the_run(
    settings: list[str], error: type[Exception], message: str, folder: Path
) -> None:
    train_alone(job(folder, f"checkpoint.dir={folder}/model", f"run.dir={folder}/run"))
    with gzip.open(folder / "short.tsv.gz", "wt") as file:
        file.write("1\tshort\n" * 9)
    own = job(folder, *(each.replace("FOLDER", str(folder)) for each in settings))

    for run in (lambda: train_alone(own), lambda: dry_run(plan_of(own))):
        with pytest.raises(error, match=message.replace("*", r"\*")):
            run()


def test_model_of_a_run_to_resume_is_loaded(folder: Path) -> None:
    saved = job(folder, f"checkpoint.dir={folder}/model", "train.epochs=3")
    trained = train_alone(saved)

    found = dry_run(
        plan_of(job(folder, f"checkpoint.dir={folder}/model", "checkpoint.resume=true"))
    )

    assert trained.passes[0]["log_loss"] > found["loss"]


def test_worker_of_a_cluster_needs_no_servers(folder: Path) -> None:
    train_alone(job(folder, f"checkpoint.dir={folder}/model"))
    role = worker_role(1, 3, is_in_process=False)
    mode = "strategy.mode=sync"

    found = dry_run(plan_of(job(folder, f"checkpoint.load={folder}/model", mode), role))
    for other, message in ((OTHER, "another model"), ("model.dim=3", "dim")):
        with pytest.raises(CheckpointError, match=message):
            dry_run(plan_of(job(folder, f"checkpoint.load={folder}/model", other), role))

    assert found["loss"] < dry_run(plan_of(job(folder, mode)))["loss"]
