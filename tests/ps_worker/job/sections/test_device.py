"""The section [device]: nothing of it counts where tables are on the servers."""

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job


@pytest.mark.parametrize("setting", ["kind=cpu", "memory_gb=2", "pass_rows=1000"])
def test_setting_without_a_use_is_refused_where_it_stands(setting: str) -> None:
    with pytest.raises(JobError, match=r'set device\.tables = "pass", or remove it') as refusal:
        override_job({}, [f"device.{setting}"], source="test")

    assert str(refusal.value).startswith(f"--set device.{setting}: device.")


def test_memory_is_in_gib_and_0_is_no_limit() -> None:
    limited = override_job({}, ["device.tables=pass", "device.memory_gb=1.5"], source="test")

    assert limited.device.memory_bytes == 3 * 2**29
    assert override_job({}, [], source="test").device.memory_bytes is None
