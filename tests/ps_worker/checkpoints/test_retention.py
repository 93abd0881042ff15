"""Which checkpoints of a folder are those of runs."""

from pathlib import Path

import pytest

from protos.errors import JobError
from protos.store import SaveRequest
from ps_server.store import ParameterStore
from ps_worker.checkpoints.folder import require_free_folder
from ps_worker.checkpoints.retention import checkpoints_of_runs
from ps_worker.job import override_job


def save(folder: Path, *names: str) -> None:
    for name in names:
        ParameterStore().save(SaveRequest(url=f"{folder}/{name}"))


def test_names_of_runs_come_by_age(tmp_path: Path) -> None:
    save(tmp_path, "step-8", "epoch-1", "epoch-1-copy", "my-epoch-1", "epoch-x", "step-12")

    assert checkpoints_of_runs(str(tmp_path)) == ["step-8", "epoch-1", "step-12"]


def test_of_many_checkpoints_the_last_are_named(tmp_path: Path) -> None:
    """They are of no job, so nothing more is known of them."""
    save(tmp_path, *(f"step-{step}" for step in range(1, 13)))
    job = override_job({}, [f"checkpoint.dir={tmp_path}"], source="test")

    with pytest.raises(JobError) as refusal:
        require_free_folder(job)

    assert "earlier run (2 older ones, step-3, step-4, step-5," in str(refusal.value)
    assert "step-12), and this run" in str(refusal.value)
