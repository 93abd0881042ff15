"""What the log says of a shrink."""

import logging

import pytest

from ctr_ps.protos.store import Shrunk
from ctr_ps.ps_worker.run.run import log_shrunk


def logged(caplog: pytest.LogCaptureFixture, shrunk: Shrunk) -> tuple[int, str]:
    with caplog.at_level(logging.INFO):
        log_shrunk({"embedding": shrunk})
    (record,) = caplog.records
    return record.levelno, record.getMessage()


def test_what_went_and_what_is_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    shrunk = Shrunk(rows=7, size_bytes=734_003, left_rows=7, candidates=9)

    assert logged(caplog, shrunk) == (
        logging.INFO,
        "shrunk table=embedding removed_rows=7 left_rows=7 removed_mb=0.7 removed_candidates=9",
    )


def test_that_most_rows_went_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, Shrunk(rows=8, left_rows=7)) == (
        logging.WARNING,
        "shrunk table=embedding removed_rows=8 left_rows=7 removed_mb=0.0",
    )


def test_table_without_rows_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, Shrunk())[0] == logging.INFO
