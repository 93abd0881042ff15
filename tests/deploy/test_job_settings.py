"""Settings of a job as its workers read them."""

from pathlib import Path

import pytest

from ctr_ps.deploy.launch import JobSettings
from ctr_ps.ps_worker.job import load_job

JOB = """
[data]
schema = "criteo"
[checkpoint]
dir = "output/model"
resume = true
"""


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["checkpoint.dir=other"],
        ["checkpoint.dir='other'", 'checkpoint.dir = "last"'],
        ["checkpoint.resume=false"],
        ["checkpoint={dir = 'whole'}"],
    ],
    ids=["file", "bare-word", "last-of-two", "not-text", "section"],
)
def test_settings_are_those_of_the_worker(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    words = ["ps-worker", "train", str(path), *(w for o in overrides for w in ("--set", o))]

    ours, checkpoint = JobSettings(path, words), load_job(path, overrides).checkpoint

    assert (ours.get("checkpoint", "dir") or "") == checkpoint.dir
    assert (ours.get("checkpoint", "resume") or False) == checkpoint.resume


@pytest.mark.parametrize("text", ["[checkpoint", "checkpoint = 3", ""])
def test_a_file_that_is_no_job_has_no_settings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)

    assert JobSettings(path, ["--set", "checkpoint.dir"]).get("checkpoint", "resume") is None
