"""Which checkpoints of a folder are those of runs."""

import shutil
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError, JobError
from ctr_ps.protos.store import InferenceSettings, SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.resume import earlier_run, require_free_folder
from ctr_ps.ps_worker.checkpoints.retention import Keeper, checkpoints_of_runs, name_at_step
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.sections import CheckpointSection


def save(folder: Path, *names: str) -> None:
    for name in names:
        ParameterStore().save(SaveRequest(url=f"{folder}/{name}"))


def test_names_of_runs_come_by_age(tmp_path: Path) -> None:
    others = ("epoch-1-copy", "my-epoch-1", "epoch-x", "step-8-x")
    own = ["step-8", "epoch-1", name_at_step(12), name_at_step(12, 2)]
    save(tmp_path, *own[:2], *others, *own[2:])

    assert checkpoints_of_runs(str(tmp_path)) == own


def test_pass_that_is_saved_again_is_the_newest(tmp_path: Path) -> None:
    """Of a run that goes on from an earlier checkpoint: what it has held can still be published."""
    later = [f"epoch-{number}" for number in range(1, 5)]
    save(tmp_path, *later)
    keeper = Keeper(CheckpointSection(dir=str(tmp_path), keep_last=1), own=later, passes=2)

    for name in ("epoch-2", "epoch-3", "epoch-5"):
        save(tmp_path, name)
        keeper.saved(name)

    assert {*checkpoints_of_runs(str(tmp_path))} == {"epoch-2", "epoch-3", "epoch-5"}


def of_another_release(checkpoint: Path) -> None:
    """Gives a checkpoint a format version that this release does not read."""
    manifest = checkpoint / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 3', '"format_version": 4'))


def job_into(folder: Path, *overrides: str) -> Job:
    return override_job({}, [f"checkpoint.dir={folder}", *overrides], source="test")


def test_folder_with_checkpoints_that_cannot_be_read_is_not_free(tmp_path: Path) -> None:
    save(tmp_path, "epoch-1", "epoch-2", "step-7", "notes")
    of_another_release(tmp_path / "epoch-2")
    of_another_release(tmp_path / "notes")
    (tmp_path / "step-7/MANIFEST.json").write_text("{")
    with pytest.raises(JobError, match=r"run \(epoch-1; epoch-2, step-7 cannot be read\), and"):
        require_free_folder(job_into(tmp_path))

    shutil.rmtree(tmp_path / "epoch-1")

    with pytest.raises(JobError, match=r"run \(epoch-2, step-7 cannot be read\), and this run"):
        require_free_folder(job_into(tmp_path))


def test_run_that_overwrites_is_refused_before_it_meets_what_it_cannot_replace(
    tmp_path: Path,
) -> None:
    save(tmp_path, "epoch-1", "epoch-2")
    (tmp_path / "epoch-1/MANIFEST.json").write_text("{")
    overwriting = job_into(tmp_path, "checkpoint.overwrite=true")
    require_free_folder(overwriting)

    of_another_release(tmp_path / "epoch-2")

    with pytest.raises(CheckpointError, match=r"epoch-2 cannot be read, so it is not replaced"):
        require_free_folder(overwriting)


def test_run_that_finds_nothing_it_can_resume_does_not_start_fresh_over_it(tmp_path: Path) -> None:
    save(tmp_path, "epoch-1")
    of_another_release(tmp_path / "epoch-1")

    with pytest.raises(CheckpointError, match=r"only unreadable checkpoints, epoch-1: remove"):
        earlier_run(job_into(tmp_path, "checkpoint.resume=true"), num_workers=1, files="")


def test_checkpoint_for_inference_leaves_a_folder_free(tmp_path: Path) -> None:
    request = SaveRequest(url=f"{tmp_path}/epoch-1", inference=InferenceSettings())
    ParameterStore().save(request)

    require_free_folder(job_into(tmp_path))


@pytest.mark.parametrize(
    ("number", "named"),
    [(10, "step-1, step-2, .*, step-10"), (12, "2 older ones, step-3, step-4, .*, step-12")],
)
def test_of_many_checkpoints_the_last_ten_are_named(
    number: int, named: str, tmp_path: Path
) -> None:
    """They are of no job, so nothing more is known of them."""
    save(tmp_path, *(f"step-{step}" for step in range(1, number + 1)))

    with pytest.raises(JobError, match=rf"earlier run \({named}\), and this run"):
        require_free_folder(job_into(tmp_path))
