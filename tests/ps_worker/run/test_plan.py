"""What a job is told before anything runs."""

from pathlib import Path
from types import ModuleType

import pytest

from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import model, override_job
from ctr_ps.ps_worker.run import plan
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job


def test_rows_that_are_trained_on_and_tested_on_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generate(tmp_path, rows=100, test_rows=100, files=2, test_files=1, seed=1)
    train, test = f"{tmp_path}/train/*", f"{tmp_path}/test/*"

    for patterns, told in (
        ([train], []),
        ([train, test], ["1 file of data.test is also trained on"]),
    ):
        caplog.clear()
        settings = ["model.name=lr", f"data.train={patterns}", f"data.test={test}"]
        plan_of(override_job({}, settings, source="test"))
        assert [each.split(", so metrics")[0] for each in caplog.messages] == told


def test_what_a_run_trains_is_derived_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the plan to the summary: specs, and the model that computes gradients."""
    generate(tmp_path, rows=100, test_rows=100, files=1, test_files=1, seed=1)
    settings = ["model.name=lr", "strategy.mode=geo", "life.shrink_every_epochs=1"]
    files = [f"data.train={tmp_path}/train/*", f"data.test={tmp_path}/test/*"]
    derived: list[str] = []

    def counted(module: ModuleType, name: str) -> None:
        derive = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **more: derived.append(name) or derive(*args, **more)
        )

    counted(model, "table_specs")
    counted(model, "dense_spec")
    counted(plan, "trained_model")
    counted(plan, "terms_of")
    job = override_job({}, [*settings, *files, "train.base_rate=0.1"], source="test")
    train_job(plan_of(job), ParameterStore())

    assert sorted(derived) == [
        "dense_spec",
        "dense_spec",
        "table_specs",
        "terms_of",
        "trained_model",
    ]
