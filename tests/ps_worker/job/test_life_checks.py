"""What a job says of the life of rows is refused before a run begins where it cannot be."""

from pathlib import Path

import pytest

from protos.errors import JobError
from ps_worker.job import load_job
from ps_worker.job.life_checks import require_life
from tests.support.training import small_model


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[life]\nmax_rows = 9\n[strategy]\nmode = 'geo'", r':2: life\.max_rows: in mode "geo"'),
        ("[strategy]\nmode = 'geo'\n[life]\nstatistics = true", r":4: life\.statistics: in mode"),
        (
            "[strategy]\nmode = 'geo'\n[life.tables.embedding]\nttl_s = 1",
            r":4: life\.tables\.embedding\.ttl_s: in mode",
        ),
        ("[life.tables.wide]\nttl_s = 1", r":1: .* no table 'wide', only embedding"),
        ("[life]\nmax_bytes = 1", r":2: .*max_bytes 1"),
        (
            "[strategy]\nmode = 'geo'\n[life]\nadmission = { policy = 'count' }",
            r":4: life\.admission: in mode",
        ),
        ("[life]\nadmission = { policy = 'count', threshold = 0 }", r":2: .*threshold 0\.0"),
        (
            "[life]\nadmission = { policy = 'score', table = 'wide' }",
            r":2: .*'wide', which is not declared",
        ),
    ],
    ids=[
        "geo-rule",
        "geo-statistics",
        "geo-table",
        "no-table",
        "no-room",
        "geo-admission",
        "no-count",
        "no-scoring-table",
    ],
)
def test_life_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, lines: str, message: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(lines)

    with pytest.raises(JobError, match=message):
        require_life(load_job(path), small_model())


def test_life_that_can_be_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[life]\nmax_unseen = 3\n[life.tables.embedding]\nmax_rows = 1000")

    require_life(load_job(path), small_model())
