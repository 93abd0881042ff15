"""Example jobs are valid for the models that they name."""

from pathlib import Path

import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.job import load_job
from ctr_ps.ps_worker.job.checks import require_life, require_optimizers
from ctr_ps.ps_worker.job.model import model_of, specs_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem
)
def test_example_is_a_job(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.stem.startswith("torch_"):
        pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    monkeypatch.chdir(ROOT)

    job = load_job(example)

    model = model_of(job, Schema.load(job.data.schema_source))
    require_optimizers(job, model)
    require_life(specs_of(model, job))
    assert "part-*" in str(job.data.train)
