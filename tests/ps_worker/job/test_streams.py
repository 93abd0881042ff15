"""Streams in jobs: what cannot work is refused before anything is opened."""

import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.streams import TrainingStream

STREAM = "kafka://broker:9092/clicks"
SCHEMA = Schema(slots=("user",), dense=(), label="click")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["strategy.mode=bounded_staleness"], "would hold back all others"),
        (["data.in_memory=true"], "data.in_memory.*there are no files to read"),
        (["data.shuffle_files=true"], "data.shuffle_files.*there are no files to read"),
        (["data.reader_num=2"], "data.reader_num.*there are no files to read"),
        (["data.pipe_command=cat"], "data.pipe_command.*which no command reads"),
        (["data.valid=x", "valid.every_steps=5"], "valid.every_steps.*validated between passes"),
    ],
)
def test_settings_that_do_not_go_with_a_stream_are_refused(settings: list[str], fault: str) -> None:
    with pytest.raises(JobError, match=fault):
        override_job({}, [f"data.stream={STREAM}", *settings], source="test")


def test_a_length_of_passes_needs_a_stream() -> None:
    with pytest.raises(JobError, match=r"data.pass_every.*set data.stream"):
        override_job({}, ["data.pass_every=5 min"], source="test")


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["data.stream=amqp://host/x"], "data.stream.*is not a stream"),
        (["data.pass_every=soon"], "data.pass_every.*no duration"),
        (["data.format=parquet"], "data.format.*messages cannot be 'parquet'"),
        (["data.format=csv"], "data.format.*set data.columns"),
        (
            [f"data.stream={STREAM}?late=1 h", "strategy.mode=sync"],
            "data.stream.*late.*another mode than",
        ),
    ],
)
def test_wrong_streams_are_refused_before_they_are_opened(settings: list[str], fault: str) -> None:
    job = override_job({}, [f"data.stream={STREAM}", *settings], source="test")

    with pytest.raises(JobError, match=fault):
        TrainingStream(job, SCHEMA, worker=0, num_workers=2)
