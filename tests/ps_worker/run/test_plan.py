"""What a job is told before anything runs."""

from pathlib import Path

import pytest

from ps_worker.data.tools.generate import generate
from ps_worker.job import override_job
from ps_worker.run.plan import plan_of


def test_rows_that_are_trained_on_and_tested_on_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(tmp_path, rows=100, test_rows=100, files=2, test_files=1, seed=1)
    train, test = f"{tmp_path}/train/*", f"{tmp_path}/test/*"

    for patterns, told in (([train], []), ([train, test], ["1 file of data.test is trained on"])):
        caplog.clear()
        settings = ["model.name=lr", f"data.train={patterns}", f"data.test={test}"]
        plan_of(override_job({}, settings, source="test"))
        assert [each.split(" as well")[0] for each in caplog.messages] == told
