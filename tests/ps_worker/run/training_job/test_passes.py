"""Passes of a worker: what a process in a lost one's place cannot go on with."""

from types import SimpleNamespace

import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.ps_worker.run.training_job.passes import epochs


def test_rows_that_other_workers_sent_are_gone_with_a_process() -> None:
    data = SimpleNamespace(is_shuffled_globally=True)
    run = SimpleNamespace(worker=1, num_workers=2, is_replacement=True)

    with pytest.raises(
        ProtocolError, match=r"worker 1 cannot take .* data\.shuffle = 'global'.*'local'"
    ):
        next(epochs(data, run, first=1, last=2))  # type: ignore[arg-type]
