"""What a checkpoint carries besides parameters."""

from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.attachments import (
    JOB_ATTACHMENT,
    VALUES_ATTACHMENT,
    job_of_checkpoint,
    values_of_checkpoint,
)

FLAT_STRATEGY = Path("tests/ps_worker/job/files/job.flat_strategy.json")


def test_job_that_an_older_release_saved_is_read(tmp_path: Path) -> None:
    """Its strategy has the settings of its mode beside the mode, without a table."""
    url = f"{tmp_path}/model"
    saved = {JOB_ATTACHMENT: FLAT_STRATEGY.read_bytes()}
    ParameterStore().save(SaveRequest(url=url, attachments=saved))

    job = job_of_checkpoint(Checkpoint.open(url), ["strategy.bounded_staleness.max_delay_ms=7"])

    settings = job.strategy.bounded_staleness
    assert job.strategy.mode == "bounded_staleness"
    assert (settings.max_staleness, settings.max_merge_dense_num) == (2, 4)
    assert settings.max_delay_ms == 7
    assert job.train.batch_size == 512


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"[]"], ids=["deep", "cut", "list"])
def test_values_of_slots_that_cannot_be_read_are_an_error_of_the_checkpoint(
    content: bytes, tmp_path: Path
) -> None:
    url = f"{tmp_path}/model"
    ParameterStore().save(SaveRequest(url=url, attachments={VALUES_ATTACHMENT: content}))

    with pytest.raises(CheckpointError, match=r"values\.json"):
        values_of_checkpoint(Checkpoint.open(url))
