"""A script's model travels with its checkpoints as name and options."""

import json
import logging

import numpy as np
import pytest

from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.models.model import origin_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.checkpoints.attachments import JOB_ATTACHMENT
from ctr_ps.ps_worker.fleet.task import Task
from tests.support.training import job

SCHEMA = Schema.numbered(2, 3)


def test_model_is_saved_as_name_and_options() -> None:
    task = Task(model=CtrDnn(SCHEMA, dim=4, hidden=(8, 2)), job=job("sync"))

    saved = json.loads(task.attachments()[JOB_ATTACHMENT])["model"]

    assert saved == {"name": "ctr_dnn", "dim": 4, "hidden": [8, 2]}


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"hidden": np.array([8, 2])}, r"hidden: array\(\[8, 2\]\)"),
        ({"output_bias": "\ud800"}, r"output_bias: '\\ud800'"),
    ],
)
def test_option_that_cannot_be_saved_is_an_error_before_training(
    option: dict[str, object], named: str
) -> None:
    model = CtrDnn(SCHEMA)
    origin_of(model).options.update(option)

    with pytest.raises(UsageError, match=f"option {named} cannot be saved with the model"):
        Task(model=model, job=job("sync"))


def test_model_that_infer_cannot_build_is_said_before_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own(CtrDnn):
        """Of this script."""

    with caplog.at_level(logging.WARNING):
        Task(model=Own(SCHEMA), job=job("sync"))

    assert "checkpoints will have only parameters" in caplog.text
    assert "Own" in caplog.text
