"""Settings that no server would take are refused before a run begins, with the place to change."""

from pathlib import Path

import pytest

from protos.errors import JobError
from ps_worker.job import load_job
from ps_worker.job.checks import require_life, require_optimizers
from tests.support.training import small_model

JOB = """\
[optimizer]
sparse = {sparse}
dense = {dense}
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "[life]\nmax_rows = 9\n[strategy]\nmode = 'geo'",
            r'job\.toml: life\.max_rows: in mode "geo"',
        ),
        (
            "[strategy]\nmode = 'geo'\n[life]\nstatistics = true",
            r"job\.toml: life\.statistics: in mode",
        ),
        (
            "[strategy]\nmode = 'geo'\n[life.tables.embedding]\nttl_s = 1",
            r"job\.toml: life\.tables\.embedding\.ttl_s: in mode",
        ),
        ("[life.tables.wide]\nttl_s = 1", r"job\.toml: .* no table 'wide', only embedding"),
        ("[life]\nmax_bytes = 1", r"job\.toml: .*max_bytes 1"),
        (
            "[strategy]\nmode = 'geo'\n[life]\nadmission = { policy = 'count' }",
            r"job\.toml: life\.admission: in mode",
        ),
        ("[life]\nadmission = { policy = 'count', threshold = 0 }", r"job\.toml: .*threshold 0\.0"),
        (
            "[life]\nadmission = { policy = 'score', table = 'wide' }",
            r"job\.toml: .*'wide', which is not declared",
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
def test_life_that_cannot_be_is_refused_with_its_place(
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


@pytest.mark.parametrize(
    ("sparse", "dense", "message"),
    [
        (
            '"sgd"',
            '"adam"',
            r"job\.toml: .*'sgd' needs learning_rate.*name = \"sgd\", learning_rate =",
        ),
        ('"adam"', '{ name = "momentum" }', r"job\.toml: .*'momentum' needs learning_rate"),
        ('{ name = "adam", rate = 0.1 }', '"adam"', r"job\.toml: .*did you mean"),
        ('"sum"', '"adam"', r"job\.toml: .*'sum' adds gradients"),
        ('"adam"', '"adagrad_row"', r"job\.toml: .*'adagrad_row' is for rows only"),
        ('"adam"', '{ name = "ftrl", l1 = -1.0 }', r"job\.toml: .*l1 .* is -1\.0"),
    ],
)
def test_optimizer_that_does_not_fit_is_refused_with_its_place(
    tmp_path: Path, sparse: str, dense: str, message: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(sparse=sparse, dense=dense))

    with pytest.raises(JobError, match=message):
        require_optimizers(load_job(path), small_model())


def test_optimizer_that_would_lose_what_others_learnt_is_refused_in_geo(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[strategy]\nmode = "geo"\n[optimizer]\nsparse = "ftrl"\n')

    with pytest.raises(JobError, match=r"job\.toml: .*'ftrl' computes weights .* mode \"geo\""):
        require_optimizers(load_job(path), small_model())


def test_table_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[optimizer.tables]\nwide = "ftrl"\n')

    with pytest.raises(JobError, match=r"job\.toml: .*no table 'wide', only embedding"):
        require_optimizers(load_job(path), small_model())
