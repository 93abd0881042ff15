"""Example jobs: all are valid for the models that they name; DIN and ESMM learn what they are there for."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.job import load_job
from ctr_ps.ps_worker.job.checks import require_life, require_optimizers
from ctr_ps.ps_worker.job.model import model_of, specs_of
from ctr_ps.ps_worker.predict import Predictor
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import Summary, train_job
from tests.support.commands import ROOT, run
from tests.support.formats import rows_of

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs name schemas and models relative to it."""
    monkeypatch.chdir(ROOT)


def require_torch() -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_example_is_a_job(example: Path) -> None:
    if "ctr-ps[torch]" in example.read_text():
        require_torch()

    job = load_job(example)

    model = model_of(job, Schema.load(job.data.schema_source))
    require_optimizers(job, model)
    require_life(specs_of(model, job))
    assert "part-*" in str(job.data.train)


def made_by(program: str, folder: Path) -> Path:
    done = run(sys.executable, EXAMPLES / program, folder)
    assert done.returncode == 0, done.stderr
    return folder


def trained(example: str, data: Path, *settings: str) -> Summary:
    files = [f"data.{name}={data}/{name}/part-*" for name in ("train", "test")]
    return train_job(plan_of(load_job(EXAMPLES / example, [*files, *settings])), ParameterStore())


def auc_of(example: str, data: Path, *settings: str) -> float:
    auc = trained(example, data, *settings).auc
    assert auc is not None
    return auc


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks for which the best AUC is about 0.8."""
    return made_by("history_clicks.py", tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="module")
def din(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Path]:
    """AUC and checkpoints of a trained DIN."""
    require_torch()
    folder = tmp_path_factory.mktemp("din")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return auc_of("din.toml", clicks, f"checkpoint.dir={folder}"), folder


def test_attention_learns_what_a_sum_of_the_history_does_not(
    clicks: Path, din: tuple[float, Path]
) -> None:
    total = auc_of("din.toml", clicks, "model={name='ctr_dnn', dim=8, hidden=[32], init_range=0.1}")

    attention, _ = din

    assert attention > 0.77
    assert attention > total + 0.05


def test_trained_model_predicts_samples_with_histories(din: tuple[float, Path]) -> None:
    predictor = Predictor.load(din[1])

    assert predictor.schema.shares == {"history": "item"}
    seen, unseen = (
        predictor.predict_samples(
            (None, [], [f"item-{n}", [f"item-{n + 1}", f"item-{n + step}", f"item-{n + 2}"]])
            for n in range(90)
        )
        for step in (0, 5)
    )
    assert seen.mean() > unseen.mean() + 0.3


@pytest.mark.parametrize("kind", [QueueDataset, InMemoryDataset])
def test_histories_keep_their_order(
    clicks: Path, kind: type[QueueDataset | InMemoryDataset]
) -> None:
    file = clicks / "test/part-0.parquet"
    dataset = kind(Schema.load("examples/schemas/histories.toml"), 64)
    dataset.set_filelist([file])

    keys = rows_of(dataset).keys.tolist()

    columns = pq.read_table(file).to_pydict()
    assert keys == [
        key_of(1, value)
        for item, history in zip(columns["item"], columns["history"], strict=True)
        for value in (item, *history)
    ]


def test_each_task_is_learnt(tmp_path: Path) -> None:
    """The best AUCs are 0.837 for clicks, 0.838 for conversions of clicked rows, and 0.856 for both."""
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    tasks = trained("esmm.toml", made_by("conversions.py", tmp_path)).tasks

    assert tasks is not None
    assert {name: figures["auc"] for name, figures in tasks.items()} == {
        "click": pytest.approx(0.83, abs=0.01),
        "conversion": pytest.approx(0.83, abs=0.02),
        "click_and_conversion": pytest.approx(0.85, abs=0.01),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mmoe", "ple", "pepnet"])
def test_each_label_is_learnt_over_all_rows(name: str, tmp_path: Path) -> None:
    """The conversions of the data come only after clicks: those of all rows are both."""
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    tasks = trained(f"{name}.toml", made_by("conversions.py", tmp_path)).tasks

    assert tasks is not None
    assert {name: figures["auc"] for name, figures in tasks.items()} == {
        "click": pytest.approx(0.83, abs=0.01),
        "conversion": pytest.approx(0.85, abs=0.01),
    }


@pytest.mark.slow
def test_vectors_of_two_towers_find_the_items_of_a_history(clicks: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    assert auc_of("two_towers.toml", clicks, f"checkpoint.dir={tmp_path}/checkpoints") > 0.75
    predictor = Predictor.load(tmp_path / "checkpoints")
    items = [f"item-{number}" for number in range(100)]

    vectors = predictor.outputs(pa.table({"item": items, "history": [[each] for each in items]}))
    nearest = (vectors["user"] @ vectors["item"].T).argmax(1)

    assert vectors["item"].shape == (100, 32)
    assert (nearest == range(100)).mean() > 0.9
    assert predictor.outputs(pa.table({"item": [], "history": []})) == {}
