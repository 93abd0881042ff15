"""Progress of a run as JSON."""

import json
from typing import Any

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_worker.checkpoints.resume import RunState, Validation

STATE = RunState(
    epochs_done=1,
    is_between_epochs=False,
    num_workers=2,
    files="ab",
    order={"train.seed": 1, "data.shuffle": "none", "data.in_memory": False},
    validations=[
        Validation(epoch=1, step=5, auc=None, log_loss=0.5, checkpoint="step-5"),
        Validation(epoch=1, step=9, auc=0.7, log_loss=0.4),
    ],
    steps_since_validation=3,
)


def test_state_survives_json() -> None:
    assert RunState.from_json(STATE.to_json().encode(), "run.json") == STATE


@pytest.mark.parametrize(
    "each",
    [
        {"epoch": 1, "step": 5, "auc": 0.5, "log_loss": 0.5, "gauc": 0.5},
        {"epoch": 1, "step": 5},
        7,
    ],
    ids=["unknown-field", "missing-field", "number"],
)
def test_other_validations_are_refused_by_the_name_of_the_file(each: Any) -> None:
    text = json.dumps({**json.loads(STATE.to_json()), "validations": [each]}).encode()

    with pytest.raises(
        CheckpointError, match=r"^the run progress in epoch-1/run\.json is invalid: validations\.0"
    ):
        RunState.from_json(text, "epoch-1/run.json")


@pytest.mark.parametrize("name", ["epochs_done", "is_between_epochs", "num_workers", "order"])
def test_state_that_does_not_say_where_the_run_was_is_refused(name: str) -> None:
    values = json.loads(STATE.to_json())
    del values[name]

    with pytest.raises(
        CheckpointError, match=rf"the run progress in .*run\.json is invalid: {name}: "
    ):
        RunState.from_json(json.dumps(values).encode(), "run.json")
