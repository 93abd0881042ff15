"""The example of online training: a producer, a job on its stream, and predictions of what it saved."""

from pathlib import Path

import pytest

from ctr_ps import Predictor
from tests.support.commands import ROOT, run
from tests.support.streams import redis_server

ONLINE = ROOT / "examples/online"


@pytest.mark.slow
def test_rows_of_the_producer_become_a_model_that_predicts(tmp_path: Path) -> None:
    with redis_server(tmp_path) as port:
        url = f"redis://127.0.0.1:{port}/clicks"
        producer = [ONLINE / "producer.py", url, "--rate", "100000", "--rows", "3000"]
        assert run("python", *producer).returncode == 0
        settings = {
            "data.stream": f"{url}?end=latest",
            "data.schema": ONLINE / "schema.toml",
            "checkpoint.dir": tmp_path / "checkpoints",
            "run.dir": tmp_path / "run",
        }
        overrides = [f"--set={key}={value}" for key, value in settings.items()]
        trained = run("ps-worker", "train", ONLINE / "job.toml", *overrides)
        assert trained.returncode == 0, trained.stderr

    predictor = Predictor.load(str(tmp_path / "checkpoints"))
    clicks = predictor.predict([{"user": "u1", "item": f"i{k}", "hour": 3} for k in range(10)])

    assert clicks.shape == (10,)
    assert ((clicks > 0.02) & (clicks < 0.9)).all()
