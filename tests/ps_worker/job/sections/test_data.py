"""The section [data]: settings that would have no effect are refused where they stand."""

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["shuffle=local"], "data.shuffle is 'local', but rows are not in memory"),
        (["shuffle=global"], "data.shuffle is 'global', but rows are not in memory"),
        (
            ["in_memory=true", "shuffle_files=true"],
            "data.shuffle_files is True, but rows are in memory",
        ),
        (["pipe_command=cat", "format=csv"], "data.format is 'csv', but data.pipe_command prints"),
        (["columns=['click']"], r"data.columns is \('click',\), but files are not multi-slot text"),
        (["values=text"], "data.values is 'text', but files are not multi-slot text"),
        (
            ["negative_correction=weight"],
            "negative_correction is 'weight', but all rows are trained on",
        ),
        (["negative_rate=0"], "data.negative_rate is 0: .* greater than 0"),
        (["negative_rate=10"], "data.negative_rate is 10: .* equal to 1"),
        (["shuffle=globl"], "data.shuffle is 'globl', did you mean 'global'"),
    ],
)
def test_setting_without_use_is_refused_where_it_stands(settings: list[str], fault: str) -> None:
    overrides = [f"data.{setting}" for setting in settings]

    with pytest.raises(JobError, match=fault) as refusal:
        override_job({}, overrides, source="test")

    assert str(refusal.value).startswith("--set data.")


def test_columns_and_values_are_for_multi_slot_text() -> None:
    for format in ("pipe_command=cat", "format=multislot"):
        job = override_job(
            {},
            [f"data.{format}", "data.columns=['C1', 'click']", "data.values=text"],
            source="test",
        )

        assert job.data.columns == ("C1", "click")
