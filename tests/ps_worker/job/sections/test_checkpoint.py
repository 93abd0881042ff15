"""The section [checkpoint]: nothing is saved without a folder."""

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job


@pytest.mark.parametrize(
    "setting", ["every_epochs=2", "every_steps=1", "every_s=1", "keep_last=1", "resume=true"]
)
def test_setting_without_a_folder_is_refused_where_it_stands(setting: str) -> None:
    with pytest.raises(
        JobError, match=r"no folder for checkpoints: set checkpoint\.dir"
    ) as refusal:
        override_job({}, [f"checkpoint.{setting}"], source="test")

    assert str(refusal.value).startswith(f"--set checkpoint.{setting}: checkpoint.")


def test_default_without_a_folder_is_no_error() -> None:
    job = override_job({}, ["checkpoint.resume=false", "checkpoint.every_epochs=1"], source="test")

    assert not job.checkpoint.is_within_epochs


@pytest.mark.parametrize("setting", ["every_steps=3", "every_s=0.5"])
def test_steps_and_seconds_are_within_epochs(setting: str) -> None:
    job = override_job({}, ["checkpoint.dir=model", f"checkpoint.{setting}"], source="test")

    assert job.checkpoint.is_within_epochs
