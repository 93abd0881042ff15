"""Optimizers that do not fit are refused before a run begins, with the line to change."""

from pathlib import Path

import pytest

from protos.errors import JobError
from ps_worker.job import load_job
from ps_worker.job.optimizer_checks import require_optimizers
from tests.support.training import small_model

JOB = """\
[optimizer]
sparse = {sparse}
dense = {dense}
"""


@pytest.mark.parametrize(
    ("sparse", "dense", "message"),
    [
        ('"sgd"', '"adam"', r":2: .*'sgd' needs learning_rate.*name = \"sgd\", learning_rate ="),
        ('"adam"', '{ name = "momentum" }', r":3: .*'momentum' needs learning_rate"),
        ('{ name = "adam", rate = 0.1 }', '"adam"', r":2: .*did you mean"),
        ('"sum"', '"adam"', r":2: .*'sum' adds gradients"),
        ('"adam"', '"adagrad_row"', r":3: .*'adagrad_row' is for rows only"),
        ('"adam"', '{ name = "ftrl", l1 = -1.0 }', r":3: .*l1 .* is -1\.0"),
    ],
)
def test_optimizer_that_does_not_fit_is_refused_with_its_line(
    tmp_path: Path, sparse: str, dense: str, message: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(sparse=sparse, dense=dense))

    with pytest.raises(JobError, match=message):
        require_optimizers(load_job(path), small_model())


def test_optimizer_that_would_lose_what_others_learnt_is_refused_in_geo(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[strategy]\nmode = "geo"\n[optimizer]\nsparse = "ftrl"\n')

    with pytest.raises(JobError, match=r":4: .*'ftrl' computes weights .* mode \"geo\""):
        require_optimizers(load_job(path), small_model())


def test_table_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[optimizer.tables]\nwide = "ftrl"\n')

    with pytest.raises(JobError, match=r":2: .*no table 'wide', only embedding"):
        require_optimizers(load_job(path), small_model())
