"""What a checkpoint carries besides parameters."""

from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.attachments import VALUES_ATTACHMENT, values_of_checkpoint


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"[]"], ids=["deep", "cut", "list"])
def test_values_of_slots_that_cannot_be_read_are_an_error_of_the_checkpoint(
    content: bytes, tmp_path: Path
) -> None:
    url = f"{tmp_path}/model"
    ParameterStore().save(SaveRequest(url=url, attachments={VALUES_ATTACHMENT: content}))

    with pytest.raises(CheckpointError, match=r"values\.json"):
        values_of_checkpoint(Checkpoint.open(url))
