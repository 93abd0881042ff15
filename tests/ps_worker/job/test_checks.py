"""Settings that no server would take are refused before a run begins, with the place to change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.protos.role import Members
from ctr_ps.protos.spec import ScheduleSpec
from ctr_ps.ps_worker.job import load_job, override_job
from ctr_ps.ps_worker.job.checks import (
    require_base_rate,
    require_deal,
    require_device,
    require_life,
    require_one_worker,
    require_optimizers,
)
from ctr_ps.ps_worker.job.model import dense_spec, specs_of, table_specs, with_rates_of_tables
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
            r'job\.toml: life\.max_rows: workers in mode "geo"',
        ),
        (
            "[strategy]\nmode = 'geo'\n[life]\nstatistics = true",
            r"job\.toml: life\.statistics: workers in mode",
        ),
        (
            "[strategy]\nmode = 'geo'\n[life.tables.embedding]\nttl_s = 1",
            r"job\.toml: life\.tables\.embedding\.ttl_s: workers in mode",
        ),
        ("[life.tables.wide]\nttl_s = 1", r"job\.toml: .* no table 'wide', only embedding"),
        (
            "[train]\nrow_dtype = { wide = 'bfloat16' }",
            r"job\.toml: train\.row_dtype\.wide: .* no table 'wide', only embedding",
        ),
        ("[life]\nmax_bytes = 1", r"job\.toml: .*max_bytes 1"),
        (
            "[strategy]\nmode = 'geo'\n[life]\nadmission = { policy = 'count' }",
            r"job\.toml: life\.admission: workers in mode",
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
        "no-table-of-a-dtype",
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
        require_life(specs_of(small_model(), load_job(path)))


def test_life_that_can_be_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[life]\nmax_unseen = 3\n[life.tables.embedding]\nmax_rows = 1000")

    require_life(specs_of(small_model(), load_job(path)))


@pytest.mark.parametrize(
    ("sparse", "dense", "message"),
    [
        (
            '"sgd"',
            '"adam"',
            r"job\.toml: .*'sgd' needs learning_rate.*name = \"sgd\", learning_rate =",
        ),
        ('"adam"', '{ name = "momentum" }', r"job\.toml: .*'momentum' needs learning_rate"),
        (
            '{ name = "adam", rate = 0.1 }',
            '"adam"',
            r"job\.toml: optimizer\.sparse\.rate: .*did you",
        ),
        ('"adgrad"', '"adam"', r"job\.toml: optimizer\.sparse: unknown optimizer 'adgrad'"),
        ('"sum"', '"adam"', r"job\.toml: .*'sum' adds gradients"),
        ('"adam"', '"adagrad_row"', r"job\.toml: optimizer\.dense: 'adagrad_row' is for rows only"),
        ('"adam"', '{ name = "ftrl", l1 = -1.0 }', r"job\.toml: optimizer\.dense\.l1: .* is -1\.0"),
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


@pytest.mark.parametrize("mode", ["geo", "async"])
def test_optimizer_that_the_model_asks_for_is_refused_as_the_models(mode: str) -> None:
    model, asked = OfTorch(), {"name": "adam", "rate": 0.1}
    model.tables = tuple(replace(each, optimizer=asked) for each in model.tables)
    overrides = [f"strategy.mode={mode}"]
    name = model.tables[0].name

    with pytest.raises(
        JobError,
        match=f"^net.toml: model.name: the optimizer that the model requests .* '{name}' .*did you mean.*"
        rf"\(optimizer\.tables\.{name} overrides it\)",
    ):
        require_optimizers(override_job({}, overrides, source="net.toml"), model)

    set_here = [*overrides, f"optimizer.tables.{name}=adagrad"]
    require_optimizers(override_job({}, set_here, source="net.toml"), model)


def test_table_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[optimizer.tables]\nwide = "ftrl"\n')

    with pytest.raises(
        JobError, match=r"job\.toml: optimizer\.tables\.wide: .*no table 'wide', only embedding"
    ):
        require_optimizers(load_job(path), small_model())


LINEAR = "optimizer.schedule={kind='linear', total_steps=%d, warmup_steps=5}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [LINEAR % 5],
            r"optimizer\.schedule\.total_steps: .* is 5, expected more than warmup_steps = 5",
        ),
        (
            ["optimizer.dense.schedule={kind='step', gamma=0.5}"],
            r"optimizer\.dense\.schedule\.step_size: .* is 0, expected at least 1",
        ),
        (
            ["optimizer.tables.embedding={name='adam', schedule={kind='step'}}"],
            r"optimizer\.tables\.embedding\.schedule\.step_size",
        ),
        (
            ["train.weight_decay=1000"],
            r"--set train\.weight_decay=1000: train\.weight_decay: .*is 1000.0",
        ),
        (
            ["optimizer.dense={name='adam', weight_decay=1e9}"],
            r"optimizer\.dense\.weight_decay: .*'adam' is 1000000000.0",
        ),
        (
            ["optimizer.sparse={name='ftrl', weight_decay=0.1}"],
            r"optimizer\.sparse\.weight_decay: .*'ftrl' has no weight_decay: use its own penalties",
        ),
        (
            ["optimizer.sparse=ftrl", "optimizer.dense=ftrl", "train.weight_decay=0.1"],
            r"train\.weight_decay: has no effect, as all optimizers are 'ftrl'",
        ),
    ],
)
def test_wrong_schedule_or_decay_is_refused_with_the_key_to_change(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        require_optimizers(override_job({}, overrides, source="job.toml"), small_model())


@pytest.mark.parametrize("key", ["sparse", "tables.embedding"])
def test_adagrad_of_rows_starts_by_the_examples_of_a_batch(key: str) -> None:
    def start(*settings: str) -> float | None:
        job = override_job({}, ["train.batch_size=10", *settings], source="job.toml")
        (table,), dense = table_specs(small_model(), job), dense_spec(small_model(), job)
        assert "initial_accumulator" not in dense.optimizer.params
        return table.optimizer.params.get("initial_accumulator")

    assert start() == pytest.approx(2.0 / 10**2)
    assert start(f"optimizer.{key}=adagrad", "optimizer.dense=adagrad") == pytest.approx(0.02)
    assert start(f"optimizer.{key}={{name='adagrad', initial_accumulator=0.0}}") == 0.0
    assert start(f"optimizer.{key}=adam") is None


def test_decay_and_schedule_of_a_job_are_those_of_all_that_have_none_of_their_own() -> None:
    job = override_job(
        {},
        [
            "train.weight_decay=0.5",
            LINEAR % 9,
            "optimizer.dense={name='adam', schedule={kind='constant'}, weight_decay=0.25}",
        ],
        source="job.toml",
    )

    (table,), dense = table_specs(small_model(), job), dense_spec(small_model(), job)

    linear = ScheduleSpec(kind="linear", warmup_steps=5, total_steps=9)
    assert table.optimizer.schedule == linear
    assert table.optimizer.params["weight_decay"] == 0.5
    assert dense.optimizer.schedule is None
    assert dense.optimizer.params == {"weight_decay": 0.25}
    assert override_job(json.loads(job.to_json()), [], source="checkpoint") == job


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "{kind='step', total_steps=9}",
            r"total_steps is 9, but kind is \"step\", which does not use it: set kind = \"linear",
        ),
        (
            "{gamma=0.5}",
            r"gamma is 0.5, but kind is \"constant\", which does not use it: set kind = \"step\", or remove",
        ),
        ("{kind='cosin'}", r"kind is 'cosin', did you mean 'cosine'"),
        ("{kind='step', gamma=1.5}", r"optimizer\.schedule\.gamma is 1\.5"),
    ],
)
def test_setting_of_another_kind_of_schedule_is_refused(override: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        override_job({}, [f"optimizer.schedule={override}"], source="job.toml")


class OfTorch:
    """What a job sees of a module of PyTorch."""

    tables, segments = small_model().tables, small_model().segments
    module_class = object


PASS = ["device.tables=pass", "device.kind=cpu", "data.in_memory=true", "strategy.mode=sync"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.in_memory=false"], r"data\.in_memory.*but a pass needs its rows in memory"),
        (["train.thread_num=2"], r"train\.thread_num.*is 2, but a device trains in one thread"),
        (["strategy.mode=geo"], r"strategy\.mode.*is 'geo'"),
        (["strategy.mode=bounded_staleness"], r"strategy\.mode.*is 'bounded_staleness'"),
        (["cluster.on_worker_loss=wait"], r"cluster\.on_worker_loss.*is 'wait'"),
        (["device.pass_rows=100"], r"device\.pass_rows.*is 100, but a batch has 128 rows"),
        (["life.ttl_s=10"], r"life\.ttl_s.*keep no statistics"),
        (["life.statistics=true"], r"life\.statistics.*keep no statistics"),
        (
            ["life.admission={policy='count', threshold=3}"],
            r"life\.admission.*keep no statistics",
        ),
    ],
)
def test_settings_that_passes_on_a_device_cannot_honour_are_refused(
    overrides: list[str], message: str
) -> None:
    job = override_job({}, [*PASS, *overrides], source="test")

    with pytest.raises(JobError, match=message):
        require_device(specs_of(OfTorch(), job))


def test_device_of_one_worker_is_taken() -> None:
    job = override_job({}, [*PASS, "device.pass_rows=512"], source="test")

    require_device(specs_of(OfTorch(), job))
    require_one_worker(job, 1)
    with pytest.raises(JobError, match=r"the job has 2: start one"):
        require_one_worker(job, 2)
    with pytest.raises(JobError, match=r"the job has 1 heter trainers: start none"):
        require_one_worker(job, 1, 1)


def test_model_of_numpy_stays_on_the_host() -> None:
    job = override_job({}, PASS, source="test")

    with pytest.raises(JobError, match=r"model\.name: 'ctr_dnn' is not a PyTorch module"):
        require_device(specs_of(small_model(), job))


def test_gpu_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    job = override_job({}, [*PASS, "device.kind=cuda"], source="test")

    with pytest.raises(JobError, match=r"device\.kind.*PyTorch finds no GPU on this machine"):
        require_device(specs_of(OfTorch(), job))


def test_rates_to_start_at_are_as_many_as_the_model_has_logits() -> None:
    def require(rates: str) -> None:
        job = override_job({}, [f"train.base_rate={rates}"], source="job.toml")
        require_base_rate(job, small_model())

    require("0.03")
    require("[0.03]")
    with pytest.raises(JobError, match=r"train.base_rate has 2 rates, but the model has 1 logits"):
        require("[0.03, 0.1]")


def test_model_that_names_no_bias_cannot_start_at_a_rate() -> None:
    unnamed: Any = small_model()
    unnamed.initial_biases = None

    with pytest.raises(JobError, match=r"train.base_rate: .*does not declare the biases"):
        require_base_rate(override_job({}, ["train.base_rate=0.03"], source="job.toml"), unnamed)


@pytest.mark.parametrize("rate", ["0", "1", "true", "nan", "[]", "[0.5, 1.5]", "mean"])
def test_rate_to_start_at_is_between_0_and_1(rate: str) -> None:
    with pytest.raises(JobError) as raised:
        override_job({}, [f"train.base_rate={rate}"], source="job.toml")

    [line] = str(raised.value).splitlines()
    assert "train.base_rate is " in line
    assert line.endswith('expected "data", or one number or several, above 0 and below 1')


def test_rate_of_a_table_counts_where_the_job_does_not_choose_an_optimizer() -> None:
    model = build_model("lr", Schema.numbered(3, 4), {})

    def rate(*settings: str) -> float | None:
        job = with_rates_of_tables(override_job({}, settings, source="job.toml"), model)
        again = override_job(json.loads(job.to_json()), [], source="job.json")
        (table,), (same,) = table_specs(model, job), table_specs(model, again)
        assert table == same
        return table.optimizer.params.get("learning_rate")

    assert rate() == rate("optimizer.dense=adagrad", "train.batch_size=64") == 0.1
    assert rate("optimizer.sparse.learning_rate=0.3") == 0.3
    assert rate("optimizer.sparse=adam") is None
    assert rate("optimizer.tables.linear={name='adagrad'}") is None


def test_rate_of_a_table_with_an_optimizer_of_its_own_does_not_replace_it() -> None:
    model: Any = build_model("lr", Schema.numbered(3, 4), {})
    ftrl = {"name": "ftrl", "learning_rate": 0.2}
    model.tables = [replace(table, optimizer=ftrl) for table in model.tables]

    (spec,) = table_specs(model, with_rates_of_tables(override_job({}, [], source="job"), model))

    assert (spec.optimizer.name, spec.optimizer.params) == ("ftrl", {"learning_rate": 0.2})


def test_workers_come_and_go_only_where_files_are_queued() -> None:
    fixed = override_job({}, ["data.train=rows"], source="test")
    queued = override_job({}, ["data.train=rows", "data.deal=queue"], source="test")

    with pytest.raises(JobError, match=r"data.deal: is \"fixed\", .* allows 2 to 4 workers"):
        require_deal(fixed, Members(4, num_at_start=2))
    with pytest.raises(JobError, match="heter trainers"):
        require_deal(queued, Members(4, num_heter=1))
    require_deal(queued, Members(4, num_at_start=2))
    require_deal(fixed, Members(4, num_heter=1))
