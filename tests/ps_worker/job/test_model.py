"""The model of a job."""

import re
import sys

import pytest

from ctr_ps.ctr_model.models.summed import WideDeep
from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
)
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.model import (
    dense_spec,
    errors_of_model,
    model_of,
    table_specs,
    trained_model,
)

SCHEMA = Schema.numbered(1, 2)


def test_model_trains_in_float32_unless_told_otherwise() -> None:
    model = build_model("ctr_dnn", SCHEMA, {})

    assert trained_model(override_job({}, [], source="test"), model) is model


def test_bfloat16_without_pytorch_says_which_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "ctr_ps.ctr_model.torch.bfloat16", raising=False)
    job = override_job({}, ["train.compute=bfloat16"], source="test")

    with pytest.raises(
        JobError,
        match=r"^--set train\.compute=bfloat16: train\.compute: bfloat16 needs PyTorch, which is not "
        r"installed: pip install 'ctr-ps\[torch\]'$",
    ):
        trained_model(job, build_model("ctr_dnn", SCHEMA, {}))


@pytest.mark.parametrize(
    "setting",
    [
        "train.compute=float16",
        "train.row_dtype=float16",
        "train.row_dtype={wide='bfloat16', embedding='float16'}",
    ],
)
def test_unknown_precision_is_refused(setting: str) -> None:
    with pytest.raises(JobError, match=r"(train\.compute|train\.row_dtype) is .*bfloat16"):
        override_job({}, [setting], source="test")


@pytest.mark.parametrize(
    ("setting", "of_tables"),
    [
        ("train.row_dtype=bfloat16", {"wide": True, "embedding": True}),
        ("train.row_dtype.embedding=bfloat16", {"wide": False, "embedding": True}),
        ("train.seed=0", {"wide": False, "embedding": False}),
    ],
)
def test_rows_have_the_precision_of_their_table(setting: str, of_tables: dict[str, bool]) -> None:
    model = build_model("wide_deep", SCHEMA, {})
    specs = table_specs(model, override_job({}, [setting], source="test"))

    assert {spec.name: spec.is_bfloat16 for spec in specs} == of_tables


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.slots.C9.pooling=max",
            "job.toml, --set model.slots.C9.pooling=max: model.slots.C9: the schema has no slot 'C9', ",
        ),
        (
            "model.slots.C1.pooling=avg",
            "--set model.slots.C1.pooling=avg: model.slots.C1.pooling is 'avg', expected ",
        ),
        (
            "model.crosses=[['C1', 'C9']]",
            "--set model.crosses=[['C1', 'C9']]: model.crosses: the s",
        ),
    ],
)
def test_option_is_named_with_the_key_within_it_and_its_place(override: str, message: str) -> None:
    job = override_job({}, ["model.name=wide_deep", override], source="job.toml")

    with pytest.raises(JobError, match=f"^{re.escape(message)}"):
        model_of(job, SCHEMA)


def test_what_a_model_refuses_is_an_error_of_the_job() -> None:
    job = override_job({}, ["model.name=my.py:Net"], source="test")

    with (
        pytest.raises(
            JobError, match=r"^--set model.name=my.py:Net: model.name: model 'my.py:Net': no$"
        ),
        errors_of_model(job),
    ):
        raise ModelInputError("no")


MODEL = WideDeep(Schema.numbered(2, 3), dim=4, hidden=[5], init_range=0.5)


def optimizers(*overrides: str) -> dict[str, OptimizerSpec]:
    job = override_job({}, overrides, source="test")
    return {spec.name: spec.optimizer for spec in table_specs(MODEL, job)}


def test_table_has_the_dim_and_the_start_that_its_model_says() -> None:
    job = override_job({}, ["train.seed=7"], source="test")

    specs = {spec.name: spec for spec in table_specs(MODEL, job)}

    assert (specs["wide"].dim, specs["embedding"].dim) == (1, 4)
    assert specs["wide"].initializer == InitializerSpec(kind="uniform", scale=0.0)
    assert specs["embedding"].initializer == InitializerSpec(kind="uniform", scale=0.5)
    assert {spec.seed for spec in specs.values()} == {7}


def test_table_takes_the_optimizer_that_its_model_asks_for() -> None:
    asked = dict(MODEL.tables[0].optimizer or {})

    specs = optimizers("optimizer.sparse=sgd")

    assert specs["wide"].name == asked.pop("name") == "ftrl"
    assert specs["wide"].params == asked
    assert specs["embedding"] == OptimizerSpec(name="sgd")


def test_job_has_the_last_word_on_the_optimizer_of_a_table() -> None:
    specs = optimizers("optimizer.sparse=sgd", "optimizer.tables.wide=adam")

    assert specs == {"wide": OptimizerSpec(name="adam"), "embedding": OptimizerSpec(name="sgd")}


def test_dense_parameters_are_one_block_in_the_order_of_the_model() -> None:
    job = override_job({}, ["optimizer.dense=sgd", "train.seed=7"], source="test")

    spec = dense_spec(MODEL, job)

    assert spec.optimizer == OptimizerSpec(name="sgd")
    assert spec.seed == 7
    assert sum(segment.length for segment in spec.segments) == MODEL.num_params
    assert spec.segments[2] == DenseSegment(  # behind wide.weight and wide.bias
        length=(2 + 3 * 4) * 5,
        initializer=InitializerSpec(kind="normal", scale=14**-0.5),
        name="fc1.weight",
        shape=(2 + 3 * 4, 5),
    )


def test_table_that_admits_by_a_score_comes_after_the_one_that_has_it() -> None:
    """Whatever the model's order is, and the one with the score counts."""
    job = override_job(
        {"life": {"tables": {"wide": {"admission": {"policy": "score", "table": "embedding"}}}}},
        [],
        source="test",
    )

    scoring, admitting = table_specs(MODEL, job)

    assert (scoring.name, scoring.statistics) == ("embedding", StatisticsSpec())
    assert (admitting.name, admitting.statistics) == ("wide", StatisticsSpec())
    assert admitting.admission == AdmissionSpec(policy="score", table="embedding")
    assert scoring.admission is None
