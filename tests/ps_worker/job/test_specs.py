"""What a run declares of a model's tables and dense parameters."""

from ctr_ps.ctr_model.models.wide_deep import WideDeep
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
)
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.specs import dense_spec, table_specs

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
