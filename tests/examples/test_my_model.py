"""The example of a user-defined model; tests/ctr_model/models/test_models.py checks its gradients."""

from pathlib import Path

import pytest

from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import load_job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from tests.reference import my_model as oracle
from tests.support.model_cases import MY_MODEL, ModelCase, assert_gradients_agree


def test_one_slot_and_no_numbers_suffice() -> None:
    schema = Schema.numbered(0, 3)
    model = build_model(MY_MODEL, schema, {"slots": ["C2"], "dim": 3})

    assert_gradients_agree(ModelCase(model, schema, seed=1), oracle.probability)


def test_tables_have_their_own_dims_slots_and_optimizers() -> None:
    weight, embedding = build_model(MY_MODEL, Schema.numbered(1, 3), {"slots": ["C3"]}).tables

    assert (weight.dim, weight.slots) == (1, None)
    assert (embedding.dim, embedding.slots) == (4, (2,))
    assert weight.optimizer is not None
    assert embedding.optimizer is None


def test_no_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="slots is empty"):
        build_model(MY_MODEL, Schema.numbered(1, 3), {"slots": []})


def test_its_job_learns(tmp_path: Path) -> None:
    """Clicks are drawn from a known model with AUC 0.82."""
    generate(tmp_path, rows=4000, test_rows=2000, files=1, test_files=1, seed=1)
    job = load_job(
        Path("examples/my_model.toml"),
        [f"data.train={tmp_path}/train/part-*", f"data.test={tmp_path}/test/part-*"],
    )

    summary = train_job(plan_of(job), ParameterStore())

    assert summary.auc is not None
    assert summary.auc > 0.7
