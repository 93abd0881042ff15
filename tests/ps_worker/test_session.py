"""One worker's part of a job, on a store in this process."""

from pathlib import Path

import pytest

from ps_server.store import ParameterStore
from ps_worker.data.generate import generate
from ps_worker.job import override_job
from ps_worker.session import Session, plan_of


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of 50 rows, two of them malformed."""
    generate(tmp_path, rows=48, test_rows=100, files=1, test_files=1, seed=1)
    (path,) = (tmp_path / "train").iterdir()
    path.write_text(path.read_text() + "1\tshort\n0\tshort\n")
    return path


def test_limit_of_bad_rows_is_of_an_epoch(rows: Path) -> None:
    job = override_job(
        {},
        [
            f"data.train={rows}",
            "data.bad_row_limit=2",
            "train.epochs=3",
            "train.batch_size=16",
            "model.hidden=[4]",
        ],
        source="test",
    )

    summary = Session(plan_of(job), ParameterStore()).run()

    assert summary.bad_rows == 2
    assert summary.examples == 3 * 48
