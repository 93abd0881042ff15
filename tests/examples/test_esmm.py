"""The example of several labels: ESMM on planted clicks and conversions."""

import sys
from pathlib import Path

import pytest

from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job import load_job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from tests.support.commands import ROOT, run


def test_each_task_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best AUCs are 0.837 for clicks, 0.838 for conversions of clicked rows, and 0.856 for both."""
    done = run(sys.executable, ROOT / "examples/conversions.py", tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(ROOT)  # the job names its schema relative to it
    files = [f"data.{name}={tmp_path}/{name}/part-*" for name in ("train", "test")]

    summary = train_job(plan_of(load_job(Path("examples/esmm.toml"), files)), ParameterStore())

    assert summary.tasks is not None
    aucs = {name: figures["auc"] for name, figures in summary.tasks.items()}
    assert aucs == {
        "click": pytest.approx(0.83, abs=0.01),
        "conversion": pytest.approx(0.83, abs=0.02),
        "click_and_conversion": pytest.approx(0.85, abs=0.01),
    }
