"""A process that only predicts loads little."""

import json
import subprocess
import sys

PROGRAM = "import json, sys, ps_worker.serving; print(json.dumps(sorted(sys.modules)))"


OF_TRAINING = (
    "ps_worker.cluster",
    "ps_worker.communicators",
    "ps_worker.data.columnar",
    "ps_worker.data.memory",
    "ps_worker.data.text",
    "ps_worker.fleet",
    "ps_worker.heter",
    "ps_worker.run.",
)


def test_serving_loads_no_grpc_and_nothing_that_trains() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    modules = json.loads(answer.stdout)
    own = [name for name in modules if name.split(".")[0] == "ps_worker"]

    assert "ps_worker.serving.predictor" in own
    assert not [name for name in modules if name.split(".")[0] in {"grpc", "google"}]
    assert not [name for name in own if name.startswith(OF_TRAINING)]
    assert "ps_worker.training.step_loop" not in own
    assert "ps_worker.checkpoints.saver" not in own
