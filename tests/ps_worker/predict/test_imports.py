"""A process that only predicts loads little."""

import json

from tests.support.commands import printed_by

PROGRAM = "import json, sys, ctr_ps.ps_worker.predict; print(json.dumps(sorted(sys.modules)))"


OF_TRAINING = (
    "ctr_ps.ps_worker.cluster",
    "ctr_ps.ps_worker.communicators",
    "ctr_ps.ps_worker.data.columnar",
    "ctr_ps.ps_worker.data.global_shuffle",
    "ctr_ps.ps_worker.data.rows_in_memory",
    "ctr_ps.ps_worker.data.text",
    "ctr_ps.ps_worker.fleet",
    "ctr_ps.ps_worker.extras.heter",
    "ctr_ps.ps_worker.run.",
)


def test_serving_loads_no_grpc_and_nothing_that_trains() -> None:
    modules = json.loads(printed_by(PROGRAM))
    own = [name for name in modules if name.startswith("ctr_ps.ps_worker")]

    assert "ctr_ps.ps_worker.predict.predictor" in own
    assert not [name for name in modules if name.split(".")[0] in {"grpc", "google"}]
    assert not [name for name in own if name.startswith(OF_TRAINING)]
    assert "ctr_ps.ps_worker.training.step_loop" not in own
    assert "ctr_ps.ps_worker.checkpoints.saver" not in own
