"""`[optimizer]`: names, hyper-parameters, and which table gets which."""

import json
from pathlib import Path

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.protos.spec import OptimizerSpec, ScheduleSpec
from ctr_ps.ps_worker.job import load_job, override_job


def test_optimizer_may_be_a_name_or_a_table() -> None:
    by_name = override_job({"optimizer": {"sparse": "sgd"}}, [], source="job")
    by_table = override_job(
        {"optimizer": {"sparse": {"name": "sgd", "learning_rate": 1}}}, [], source="job"
    )

    assert by_name.optimizer.sparse.spec().params == {}
    assert by_table.optimizer.sparse.spec().params == {"learning_rate": 1.0}


def test_parameter_can_be_set_on_an_optimizer_given_by_name() -> None:
    job = override_job(
        {"optimizer": {"dense": "adam"}}, ["optimizer.dense.learning_rate=0.01"], source="job"
    )

    assert job.optimizer.dense.spec().name == "adam"
    assert job.optimizer.dense.spec().params == {"learning_rate": 0.01}


def test_override_of_an_optimizer_replaces_its_parameters() -> None:
    job = load_job(Path("examples/ctr_dnn.toml"), ["optimizer.sparse=sgd"])

    assert job.optimizer.sparse.spec().params == {}


def test_parameter_without_a_name_is_of_the_default_optimizer() -> None:
    job = override_job({}, ["optimizer.sparse.learning_rate=0.5"], source="job")

    assert job.optimizer.sparse.spec().name == "adagrad"


@pytest.mark.parametrize("value", ["fast", "'1'", "true", "nan", "inf", "[1]"])
def test_hyper_parameter_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(JobError, match=r"optimizer\.sparse\.learning_rate is .*number"):
        override_job({}, [f"optimizer.sparse.learning_rate={value}"], source="job")


def test_table_has_the_parameters_that_were_given_for_it() -> None:
    job = override_job(
        {"optimizer": {"tables": {"wide": {"name": "ftrl", "learning_rate": 1}}}},
        ["optimizer.tables.wide.l1=0.5", "optimizer.tables.deep=adam"],
        source="job",
    )

    assert job.optimizer.of_table("wide", None).params == {"l1": 0.5, "learning_rate": 1.0}
    assert job.optimizer.of_table("deep", None) == OptimizerSpec(name="adam")
    assert override_job(json.loads(job.to_json()), [], source="checkpoint") == job


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.tables.wide.l1=1", r"optimizer\.tables\.wide\.name is missing"),
        ("optimizer.tables.wide=3", r"optimizer\.tables\.wide is 3"),
        ("optimizer.tables=ftrl", r"optimizer\.tables is 'ftrl'"),
        ("optimizer.tables.wide={name='ftrl', l1='x'}", r"optimizer\.tables\.wide\.l1 is 'x'"),
    ],
)
def test_wrong_optimizer_of_a_table_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(JobError, match=f"^--set {override}: ".replace("{", r"\{") + message):
        override_job({}, [override], source="job")


def test_key_of_a_table_is_the_one_that_changes_it() -> None:
    optimizers = override_job({}, ["optimizer.tables.wide=ftrl"], source="job").optimizer

    assert optimizers.key_of_table("wide", None) == "optimizer.tables.wide"
    assert optimizers.key_of_table("deep", None) == "optimizer.sparse"
    assert optimizers.key_of_table("deep", OptimizerSpec(name="sgd")) == "optimizer.tables.deep"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, None),
        ({"kind": "constant"}, None),
        ({"warmup_steps": 9}, ScheduleSpec(kind="constant", warmup_steps=9)),
        ({"kind": "step", "step_size": 5}, ScheduleSpec(kind="step", step_size=5, gamma=0.1)),
    ],
)
def test_schedule_is_none_only_if_the_rate_never_changes(
    schedule: dict[str, object], expected: ScheduleSpec | None
) -> None:
    job = override_job({"optimizer": {"schedule": schedule}}, [], source="job")

    assert job.optimizer.of_dense().schedule == expected
