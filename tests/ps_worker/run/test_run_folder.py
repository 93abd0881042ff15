"""The folder of a run: what is in it, and whose it may be."""

import errno
import json
import logging
import os
import struct
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from ctr_ps.protos.errors import JobError, UsageError
from ctr_ps.ps_server.checkpoint.publish import open_data
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.run.run_folder import RunFolder
from tests.support.commands import printed_by
from tests.support.training import train_alone, train_together


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder, rows=160, test_rows=100, files=2, test_files=1, seed=1)
    return folder


def job_of(data: Path, folder: Path, *overrides: str) -> Job:
    own = [f"data.train={data}/train/*", f"data.test={data}/test/*", "train.batch_size=16"]
    small = ["model.hidden=[4]", "model.dim=2", f"run.dir={folder}", "train.log_every_s=0.000001"]
    return override_job({}, [*own, *small, *overrides], source="test")


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Returns the values in all events, by tag and step."""
    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def test_lines_are_what_the_run_has_measured(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/one"
    job = job_of(
        data,
        folder,
        f"data.valid={data}/test/*",
        "valid.group_by=C1",
        "train.epochs=2",
        "train.thread_num=2",
    )

    summary = train_together(job)[0].as_json()

    found = lines(folder)
    kinds = [line["kind"] for line in found if line["kind"] != "train"]
    assert kinds == ["start", "pass", "valid", "pass", "valid", "test", "end"]
    of = {kind: [line for line in found if line["kind"] == kind] for kind in set(kinds) | {"train"}}
    assert of["start"][0]["workers"] == 2
    assert {**of["pass"][1], **summary["passes"][1]} == of["pass"][1]
    assert of["pass"][1]["tables"] == summary["tables"]
    assert set(of["pass"][0]["seconds"]) == {"read", "pull", "compute", "push", "wait"}
    assert all(value > 0 for value in of["pass"][0]["seconds"].values())
    assert [line["log_loss"] for line in of["valid"]] == [
        each["log_loss"] for each in summary["validations"]
    ]
    assert of["valid"][-1]["gauc"] == of["test"][0]["gauc"] == summary["gauc"]
    assert of["test"][0]["auc"] == summary["auc"]
    assert of["end"][0]["model_digest"] == summary["model_digest"]
    assert of["train"][-1]["examples"] <= 160
    steps = [(line["epoch"], line["step"]) for line in found]
    assert steps == sorted(steps)
    assert override_job(json.loads((folder / "job.json").read_text()), [], source="x") == job
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("in_memory", ["true", "false"])
def test_lines_of_a_pass_say_how_much_of_it_is_done(
    data: Path, tmp_path: Path, in_memory: str
) -> None:
    train_alone(job_of(data, tmp_path, f"data.in_memory={in_memory}", "train.epochs=2"))

    for epoch in (1, 2):
        of = [line for line in lines(tmp_path) if (line["kind"], line["epoch"]) == ("train", epoch)]
        done = [line["pass_done"] for line in of]
        assert done == sorted(done)
        assert 0.0 <= done[0] < 1.0
        assert len(set(done)) > 1
        assert done[-1] == 1.0 or in_memory == "false"  # in text the position is that of a block


def test_events_have_the_numbers_of_the_lines(data: Path, tmp_path: Path) -> None:
    train_alone(job_of(data, tmp_path, f"data.valid={data}/test/*"))

    found = scalars(tmp_path)

    for line in lines(tmp_path):
        if line["kind"] in ("train", "valid", "pass", "test"):
            name = "loss" if line["kind"] == "train" else "log_loss"
            assert found[f"{line['kind']}/{name}", line["step"]] == pytest.approx(line[name])
    rows = lines(tmp_path)[-4]["tables"]["embedding"]["rows"]
    assert found["pass/tables/embedding/rows", 10] == rows


def test_events_are_numbers_of_what_was_trained_and_evaluated(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = {"wide": {"rows": 3}, "deep": {"rows": 4}}
    figures = {"loss": 0.5, "auc": float("nan"), "is_whole": True, "tables": tables}

    with RunFolder(job_of(data, tmp_path), is_continued=False) as folder:
        for kind in ("start", "valid", "end"):
            folder.write(kind, epoch=1, step=7, figures=figures)

    assert scalars(tmp_path) == {
        ("valid/loss", 7): 0.5,
        ("valid/tables/wide/rows", 7): 3.0,
        ("valid/tables/deep/rows", 7): 4.0,
    }
    assert caplog.messages == []


def test_events_are_written_without_pytorch(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from ctr_ps.ps_worker.run import run_folder

print(run_folder._events_in(Path(sys.argv[1])) is not None, "torch" in sys.modules)
"""

    assert printed_by(program, tmp_path).split() == ["True", "False"]


def test_missing_extra_is_said_and_is_no_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)

    with caplog.at_level(logging.INFO):
        train_alone(job_of(data, tmp_path, "train.epochs=2"))

    said = [each for each in caplog.messages if "pip install 'ctr-ps[tensorboard]'" in each]
    assert len(said) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "job.json"}


def test_metrics_of_another_run_are_left_alone(data: Path, tmp_path: Path) -> None:
    train_alone(job_of(data, tmp_path))
    before = (tmp_path / "metrics.jsonl").read_bytes()

    with pytest.raises(JobError, match=r"--set run\.dir=.*: run\.dir: .*run\.overwrite = true"):
        train_alone(job_of(data, tmp_path))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before

    train_alone(job_of(data, tmp_path, "run.overwrite=true"))
    assert [line["kind"] for line in lines(tmp_path)].count("start") == 1
    assert len(list(tmp_path.glob("events.*"))) == 1


@pytest.mark.parametrize("left", ["", '{"kind": "sta'])
def test_folder_of_a_process_that_ended_before_its_start_is_free(
    data: Path, tmp_path: Path, left: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(left)

    train_alone(job_of(data, tmp_path))

    assert [line["kind"] for line in lines(tmp_path)].count("start") == 1


def test_metrics_that_cannot_be_read_are_of_another_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()

    with pytest.raises(JobError, match="has the metrics of an earlier run"):
        RunFolder(job_of(data, tmp_path), is_continued=False)


def test_metrics_are_replaced_by_runs_that_start_alone(data: Path, tmp_path: Path) -> None:
    folder, saved = tmp_path / "run", f"checkpoint.dir={tmp_path}/model"
    train_alone(job_of(data, folder, saved))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(JobError, match="has checkpoints of an earlier run"):
        train_alone(job_of(data, folder, saved, "run.overwrite=true"))
    with pytest.raises(JobError, match="has checkpoints of an earlier run"):
        train_alone(job_of(data, tmp_path / "other", saved))

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "other").exists()


def test_resumed_run_appends_behind_the_last_whole_line(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [f"checkpoint.dir={tmp_path}/model", "checkpoint.resume=true"]
    train_alone(job_of(data, folder, *settings, "train.epochs=1"))
    before = lines(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "ste')  # as a killed process leaves it

    train_alone(job_of(data, folder, *settings, "train.epochs=2", "run.overwrite=true"))

    after = lines(folder)
    assert after[: len(before)] == before
    [first, second] = [line for line in after if line["kind"] == "start"]
    assert (first["is_resumed"], second["is_resumed"]) == (False, True)
    assert (second["epoch"], second["step"]) == (1, 10)
    assert [line["epoch"] for line in after if line["kind"] == "pass"] == [1, 2]


def test_first_line_that_is_torn_is_removed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "sta')

    with RunFolder(job_of(data, tmp_path), is_continued=True) as folder:
        folder.write("start", epoch=0, step=0, figures={})

    assert [line["kind"] for line in lines(tmp_path)] == ["start"]


def test_folder_that_cannot_be_written_to_is_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match=r"run\.dir: cannot write to .*/file/run"):
        train_alone(job_of(data, tmp_path / "file/run"))


def test_run_that_is_refused_leaves_the_earlier_runs_checkpoints_as_they_are(
    data: Path, tmp_path: Path
) -> None:
    """With `BEST`, and with the files of a save that was killed."""
    model = tmp_path / "model"
    saved = [f"checkpoint.dir={model}", f"data.valid={data}/test/*", "checkpoint.overwrite=true"]
    train_alone(job_of(data, tmp_path / "run", *saved))
    open_data(LocalFolder(model / "step-7"))
    (tmp_path / "file").touch()
    before = sorted(model.rglob("*"))
    assert model / "BEST" in before

    with pytest.raises(UsageError, match=r"run\.dir: cannot write to .*/file/run"):
        train_alone(job_of(data, tmp_path / "file/run", *saved))

    assert sorted(model.rglob("*")) == before
    train_alone(job_of(data, tmp_path / "other", *saved[::2]))
    assert not (model / "BEST").exists()
    assert not (model / "step-7").exists()


def test_full_disk_does_not_end_training(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder(job_of(data, tmp_path), is_continued=False) as folder:
        full, kept = folder._file, open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115
        folder._file = kept.fileno()
        folder.write("train", epoch=1, step=7, figures={"loss": float("nan")})
        folder._file = full
        kept.close()

    assert "figures of train step=7 are not written: " in caplog.text


def test_line_that_the_system_takes_in_parts_is_whole(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    with (
        RunFolder(job_of(data, tmp_path), is_continued=False) as folder,
        monkeypatch.context() as of,
    ):
        of.setattr(os, "write", lambda file, content: write(file, content[:5]))
        for step in (1, 2):
            folder.write("train", epoch=1, step=step, figures={"loss": 0.5})

    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_line_that_does_not_fit_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a disk that is full for a while; the lines before and after are whole."""
    write = os.write

    def fill(file: int, content: bytes) -> int:
        if content.startswith(b"{"):
            return write(file, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunFolder(job_of(data, tmp_path), is_continued=False) as folder:
        folder.write("train", epoch=1, step=1, figures={})
        with monkeypatch.context() as full:
            full.setattr(os, "write", fill)
            folder.write("train", epoch=1, step=2, figures={})
        folder.write("train", epoch=1, step=3, figures={})

    assert [line["step"] for line in lines(tmp_path)] == [1, 3]
    assert "figures of train step=2 are not written: " in caplog.text


@pytest.mark.parametrize("place", ["s3://bucket/run", "memory://run"])
def test_urls_are_refused(place: str) -> None:
    with pytest.raises(JobError, match=r"run\.dir"):
        override_job({}, [f"run.dir={place}"], source="test")


def test_overwriting_needs_a_folder() -> None:
    with pytest.raises(JobError, match=r"run\.overwrite is True, but .*set run\.dir"):
        override_job({}, ["run.overwrite=true"], source="test")
