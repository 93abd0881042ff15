"""The section [valid]: nothing is validated without rows."""

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job


@pytest.mark.parametrize(
    "setting",
    ["every_epochs=2", "every_steps=1", "metric=auc", "patience=1", "final_model=best"],
)
def test_setting_without_rows_names_both_keys(setting: str) -> None:
    with pytest.raises(JobError, match=r"no rows to validate on: set data\.valid") as refusal:
        override_job({}, [f"valid.{setting}"], source="test")

    assert str(refusal.value).startswith(f"--set valid.{setting}: valid.")


def test_default_without_rows_is_no_error() -> None:
    job = override_job({}, ["valid.every_epochs=1", "valid.metric=log_loss"], source="test")

    assert not list(job.valid.settings())


def test_rows_that_would_never_be_read_are_refused() -> None:
    with pytest.raises(JobError, match=r"valid\.every_epochs is 0, and so is valid\.every_steps"):
        override_job({}, ["data.valid=rows", "valid.every_epochs=0"], source="test")


def test_best_model_needs_a_folder() -> None:
    with pytest.raises(JobError, match=r"valid\.final_model is 'best', .*set checkpoint\.dir"):
        override_job({}, ["data.valid=rows", "valid.final_model=best"], source="test")
