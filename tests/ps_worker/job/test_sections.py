"""Settings of the sections that would have no effect are refused where they stand."""

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job

NO_FOLDER = r"no folder for checkpoints: set checkpoint\.dir"
NO_ROWS = r"no rows to validate on: set data\.valid"
ON_SERVERS = r'set device\.tables = "pass", or remove it'


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["data.shuffle=local"], "data.shuffle is 'local', but rows are not in memory"),
        (["data.shuffle=global"], "data.shuffle is 'global', but rows are not in memory"),
        (
            ["data.shuffle_files=true", "data.in_memory=true"],
            "data.shuffle_files is True, but rows are in memory",
        ),
        (
            ["data.format=csv", "data.pipe_command=cat"],
            "data.format is 'csv', but data.pipe_command prints",
        ),
        (
            ["data.columns=['click']"],
            r"data.columns is \('click',\), but files are not multi-slot text",
        ),
        (["data.deal=queue"], "data.deal is 'queue', but only files are dealt by a queue"),
        (
            ["data.deal=queue", "data.train=rows", "data.reader_num=2"],
            "but files of a queue are streamed in order",
        ),
        (
            ["data.deal=queue", "data.train=rows", "strategy.mode=sync"],
            'but files are dealt by a queue: set strategy.mode = "async" or "half_async"',
        ),
        (["data.values=text"], "data.values is 'text', but files are not multi-slot text"),
        (
            ["data.negative_correction=weight"],
            "negative_correction is 'weight', but no rows are left out of training",
        ),
        (["data.negative_rate=0"], "data.negative_rate is 0: .* greater than 0"),
        (["data.negative_rate=10"], "data.negative_rate is 10: .* equal to 1"),
        (["data.shuffle=globl"], "data.shuffle is 'globl', did you mean 'global'"),
        (["checkpoint.every_epochs=2"], NO_FOLDER),
        (["checkpoint.every_steps=1"], NO_FOLDER),
        (["checkpoint.every_s=1"], NO_FOLDER),
        (["checkpoint.keep_last=1"], NO_FOLDER),
        (["checkpoint.resume=true"], NO_FOLDER),
        (["device.kind=cpu"], ON_SERVERS),
        (["device.memory_gb=2"], ON_SERVERS),
        (["device.pass_rows=1000"], ON_SERVERS),
        (
            ["device.cuda_graph=true", "device.tables=pass", "device.kind=cpu"],
            "device.cuda_graph is True, but the device is the CPU",
        ),
        (["valid.every_epochs=2"], NO_ROWS),
        (["valid.every_steps=1"], NO_ROWS),
        (["valid.metric=auc"], NO_ROWS),
        (["valid.patience=1"], NO_ROWS),
        (["valid.final_model=best"], NO_ROWS),
        (
            ["valid.every_epochs=0", "data.valid=rows"],
            r"valid\.every_epochs is 0, but valid\.every_steps is also 0",
        ),
        (
            ["valid.final_model=best", "data.valid=rows"],
            r"valid\.final_model is 'best', .*set checkpoint\.dir",
        ),
    ],
)
def test_setting_without_use_is_refused_where_it_stands(settings: list[str], fault: str) -> None:
    with pytest.raises(JobError, match=fault) as refusal:
        override_job({}, settings, source="test")

    key = settings[0].partition("=")[0]
    assert str(refusal.value).startswith(f"--set {settings[0]}: {key}")


def test_default_without_use_is_no_error() -> None:
    defaults = ["checkpoint.resume=false", "checkpoint.every_epochs=1", "valid.metric=log_loss"]
    job = override_job({}, defaults, source="test")

    assert not job.checkpoint.is_within_epochs
    assert not list(job.valid.settings())


@pytest.mark.parametrize("setting", ["every_steps=3", "every_s=0.5"])
def test_steps_and_seconds_are_within_epochs(setting: str) -> None:
    job = override_job({}, ["checkpoint.dir=model", f"checkpoint.{setting}"], source="test")

    assert job.checkpoint.is_within_epochs


@pytest.mark.parametrize("format", ["pipe_command=cat", "format=multislot"])
def test_columns_and_values_are_for_multi_slot_text(format: str) -> None:
    settings = [f"data.{format}", "data.columns=['C1', 'click']", "data.values=text"]

    assert override_job({}, settings, source="test").data.columns == ("C1", "click")


def test_memory_is_in_gib_and_0_is_no_limit() -> None:
    limited = override_job({}, ["device.tables=pass", "device.memory_gb=1.5"], source="test")

    assert limited.device.memory_bytes == 3 * 2**29
    assert override_job({}, [], source="test").device.memory_bytes is None


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (["data.stream=redis://host/clicks", "checkpoint.dir=model"], 5),
        (["data.stream=redis://host/clicks", "checkpoint.dir=model", "checkpoint.keep_last=0"], 0),
        (["data.stream=redis://host/clicks", "checkpoint.dir=model", "checkpoint.keep_last=9"], 9),
        (["data.stream=redis://host/clicks"], 0),
        (["checkpoint.dir=model"], 0),
        (["data.stream=", "checkpoint.dir=model"], 0),
    ],
)
def test_job_of_a_stream_keeps_few_checkpoints_unless_it_says_how_many(
    settings: list[str], number: int
) -> None:
    job = override_job({}, settings, source="test")

    assert job.checkpoint.keep_last == number
    assert f'"keep_last": {number}' in job.to_json()
