"""Code that a checkpoint names is run where the caller allows it alone."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CtrPsError, UsageError
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.extras.inference_server.served_model import ServedModel
from ctr_ps.ps_worker.extras.report.report import report
from ctr_ps.ps_worker.predict.export import export
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.support.training import job_of, train_alone

MODEL = """
from pathlib import Path

from ctr_ps.ctr_model.models.summed import LogisticRegression

Path(__file__).with_name("has_run").touch()

class Model(LogisticRegression):
    pass
"""
PIPE = 'touch {folder}/has_run; awk \'NR <= 100 {{print "1 " NR " 1 0"}}\''
SCHEMA = 'hash_version = 1\nslots = ["a"]\ndense = []\n'


def trained(folder: Path, *settings: str) -> Path:
    if not (folder / "data").exists():
        generate(folder / "data", rows=100, test_rows=100, files=1, test_files=1, seed=1)
    job = job_of(
        "model.name=lr",
        f"data.train={folder}/data/train/*",
        f"data.test={folder}/data/test/*",
        f"run.dir={folder}/run",
        f"checkpoint.dir={folder}/saved",
        *settings,
    )
    train_alone(job)
    (folder / "has_run").unlink(missing_ok=True)
    return folder / "saved" / "epoch-1"


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_model")
    (folder / "model.py").write_text(MODEL)
    return trained(folder, f"model.name={folder}/model.py:Model")


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("piped")
    (folder / "schema.toml").write_text(SCHEMA)
    return trained(
        folder,
        f"data.schema={folder}/schema.toml",
        f"data.pipe_command={PIPE.format(folder=folder)}",
    )


def serve(saved: Path, **settings: bool) -> None:
    ServedModel(str(saved), name="ctr", max_rows=10, threads=1, **settings).close()


def write_report(saved: Path, **settings: bool) -> None:
    """Writes the page of the run; raises why the importance of features was not measured."""
    output = saved.parents[1] / "report.html"
    done = report([saved.parents[1] / "run"], output, importance_rows=50, **settings)
    if not done["runs_with_importance"]:
        raise UsageError(output.read_text())


USES: dict[str, Callable[..., object]] = {
    "infer": lambda saved, **settings: infer(str(saved), [], **settings),
    "predictor": Predictor.load,
    "ps-serve": serve,
    "report": write_report,
    "export": lambda saved, **settings: export(str(saved), saved / "m.onnx", **settings),
}


@pytest.mark.parametrize("use", USES)
def test_file_of_a_model_is_not_run_unless_allowed(own_model: Path, use: str) -> None:
    with pytest.raises(UsageError, match=r"names code to run, model\.name = .*--allow-code"):
        USES[use](own_model)

    assert not (own_model.parents[1] / "has_run").exists()


@pytest.mark.parametrize("use", ["infer", "predictor", "ps-serve", "report"])
def test_file_of_a_model_is_run_where_allowed_and_told(
    own_model: Path, use: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    USES[use](own_model, allow_code=True)

    (own_model.parents[1] / "has_run").unlink()
    assert f"runs code: model.name = '{own_model.parents[1]}/model.py:Model'" in caplog.text


@pytest.mark.parametrize("use", ["infer", "report"])
def test_command_for_data_is_not_run_unless_allowed(piped: Path, use: str) -> None:
    with pytest.raises(UsageError, match=r"names code to run, data\.pipe_command = "):
        USES[use](piped)

    with pytest.raises(UsageError, match=r"names code to run, data\.pipe_command = "):
        Predictor.load(piped).predict(f"{piped.parents[1]}/data/test/*")
    assert not (piped.parents[1] / "has_run").exists()
    USES[use](piped, allow_code=True)
    (piped.parents[1] / "has_run").unlink()


def test_override_of_another_setting_allows_no_code(own_model: Path, piped: Path) -> None:
    for saved, key in ((own_model, "model.name"), (piped, "data.pipe_command")):
        with pytest.raises(UsageError, match=f"names code to run, {key} = "):
            infer(str(saved), [], overrides=["train.batch_size=7"])
        assert not (saved.parents[1] / "has_run").exists()


def test_code_that_the_caller_names_is_allowed(own_model: Path, piped: Path) -> None:
    infer(str(own_model), [], overrides=["model.name=lr"])
    infer(str(piped), [], overrides=['data.pipe_command=awk \'NR <= 100 {print "1 " NR " 1 0"}\''])

    assert not (own_model.parents[1] / "has_run").exists()
    assert not (piped.parents[1] / "has_run").exists()


def test_model_with_code_does_not_replace_one_that_answers(own_model: Path, tmp_path: Path) -> None:
    """Whoever can write to the folder that is watched cannot run code in the server."""
    served = ServedModel(str(trained(tmp_path).parent), name="ctr", max_rows=10, threads=1)
    shutil.copytree(own_model, tmp_path / "saved/epoch-2")
    (tmp_path / "saved/LATEST").write_text("epoch-2\n")

    assert not served.reload()
    with pytest.raises(CtrPsError, match="names code to run"):
        served.current.predictor.switch_to(tmp_path / "saved/epoch-2")

    assert served.current.version == "epoch-1"
    assert not (own_model.parents[1] / "has_run").exists()
    served.close()
