"""Settings that no server would take are refused before a run begins, with the place to change."""

from dataclasses import replace
from pathlib import Path

import pytest

from protos.errors import JobError
from ps_worker.job import load_job, override_job
from ps_worker.job.checks import (
    require_device,
    require_life,
    require_one_worker,
    require_optimizers,
)
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


@pytest.mark.parametrize(
    ("asked", "mode", "fault"),
    [
        ({"name": "ftrl"}, "geo", "'ftrl' computes weights"),
        ({"name": "adam", "rate": 0.1}, "async", "did you mean"),
    ],
)
def test_optimizer_that_the_model_asks_for_is_refused_as_the_models(
    asked: dict[str, object], mode: str, fault: str
) -> None:
    model = OfTorch()
    model.tables = tuple(replace(each, optimizer=asked) for each in model.tables)
    overrides = [f"strategy.mode={mode}"]
    name = model.tables[0].name

    with pytest.raises(
        JobError,
        match=f"^net.toml: model.name: the model asks .* table '{name}', .*{fault}.*"
        rf"\(optimizer\.tables\.{name} overrides it\)",
    ):
        require_optimizers(override_job({}, overrides, source="net.toml"), model)

    set_here = [*overrides, f"optimizer.tables.{name}=adagrad"]
    require_optimizers(override_job({}, set_here, source="net.toml"), model)


def test_table_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[optimizer.tables]\nwide = "ftrl"\n')

    with pytest.raises(JobError, match=r"job\.toml: .*no table 'wide', only embedding"):
        require_optimizers(load_job(path), small_model())


class OfTorch:
    """What a job sees of a module of PyTorch."""

    tables = small_model().tables
    module_class = object


PASS = ["device.tables=pass", "device.kind=cpu", "data.in_memory=true", "strategy.mode=sync"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.in_memory=false"], r"data\.in_memory.*but a pass is of rows in memory"),
        (["train.thread_num=2"], r"train\.thread_num.*is 2, but a device trains in one thread"),
        (["strategy.mode=geo"], r"strategy\.mode.*is 'geo'"),
        (["strategy.mode=bounded_staleness"], r"strategy\.mode.*is 'bounded_staleness'"),
        (
            ["strategy.mode=async", "strategy.send_queue_size=2"],
            r"strategy\.send_queue_size.*has no use",
        ),
        (["cluster.on_worker_loss=wait"], r"cluster\.on_worker_loss.*is 'wait'"),
        (["device.pass_rows=100"], r"device\.pass_rows.*is 100, less than the 512 of a batch"),
        (["life.ttl_s=10"], r"life\.ttl_s.*nothing counts shows and clicks"),
        (["life.statistics=true"], r"life\.statistics.*nothing counts shows and clicks"),
        (
            ["life.admission={policy='count', threshold=3}"],
            r"life\.admission.*nothing counts shows and clicks",
        ),
    ],
)
def test_settings_that_passes_on_a_device_cannot_honour_are_refused(
    overrides: list[str], message: str
) -> None:
    job = override_job({}, [*PASS, *overrides], source="test")

    with pytest.raises(JobError, match=message):
        require_device(job, OfTorch())


def test_device_of_one_worker_is_taken() -> None:
    job = override_job({}, [*PASS, "device.pass_rows=512"], source="test")

    require_device(job, OfTorch())
    require_one_worker(job, 1)
    with pytest.raises(JobError, match=r"the job has 2: start one"):
        require_one_worker(job, 2)
    with pytest.raises(JobError, match=r"the job has heter trainers \(1\): start none"):
        require_one_worker(job, 1, 1)


def test_model_of_numpy_stays_on_the_host() -> None:
    job = override_job({}, PASS, source="test")

    with pytest.raises(JobError, match=r"model\.name: 'ctr_dnn' is not a module of PyTorch"):
        require_device(job, small_model())


def test_gpu_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    job = override_job({}, [*PASS, "device.kind=cuda"], source="test")

    with pytest.raises(JobError, match=r"device\.kind.*PyTorch finds no GPU here"):
        require_device(job, OfTorch())
