"""The model of a job."""

import re
import sys

import pytest

from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.model import errors_of_model, model_of, trained_model

SCHEMA = Schema.numbered(1, 2)


def test_model_trains_in_float32_unless_told_otherwise() -> None:
    model = build_model("ctr_dnn", SCHEMA, {})

    assert trained_model(override_job({}, [], source="test"), model) is model


def test_bfloat16_without_pytorch_says_which_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "ctr_ps.ctr_model.torch.bfloat16", raising=False)
    job = override_job({}, ["train.compute=bfloat16"], source="test")

    with pytest.raises(
        JobError,
        match=r"^--set train\.compute=bfloat16: train\.compute: bfloat16 needs PyTorch, which is not "
        r"installed: pip install 'ctr-ps\[torch\]'$",
    ):
        trained_model(job, build_model("ctr_dnn", SCHEMA, {}))


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(JobError, match=r"train\.compute"):
        override_job({}, ["train.compute=float16"], source="test")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.slots.C9.pooling=max",
            "job.toml, --set model.slots.C9.pooling=max: model.slots.C9: the schema has no slot 'C9', ",
        ),
        (
            "model.slots.C1.pooling=avg",
            "--set model.slots.C1.pooling=avg: model.slots.C1.pooling is 'avg', expected ",
        ),
        (
            "model.crosses=[['C1', 'C9']]",
            "--set model.crosses=[['C1', 'C9']]: model.crosses: the s",
        ),
    ],
)
def test_option_is_named_with_the_key_within_it_and_its_place(override: str, message: str) -> None:
    job = override_job({}, ["model.name=wide_deep", override], source="job.toml")

    with pytest.raises(JobError, match=f"^{re.escape(message)}"):
        model_of(job, SCHEMA)


def test_what_a_model_refuses_is_an_error_of_the_job() -> None:
    job = override_job({}, ["model.name=my.py:Net"], source="test")

    with (
        pytest.raises(
            JobError, match=r"^--set model.name=my.py:Net: model.name: model 'my.py:Net': no$"
        ),
        errors_of_model(job),
    ):
        raise ModelInputError("no")
