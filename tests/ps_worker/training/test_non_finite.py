"""Which batches are skipped, how they are counted, and when it is too many."""

import logging

import numpy as np
import pytest

from ctr_ps.protos.errors import GradientError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches, Policy


def gradients(deep: float = 1.0, dense: float = 1.0) -> Gradients:
    keys = np.array([7, 8], np.uint64)
    rows = np.array([[1.0, 2.0], [3.0, deep]], np.float32)
    wide = SparseGrad(keys, np.ones((2, 1), np.float32), 1)
    values = np.array([0.0, dense], np.float32)
    return Gradients(
        {"deep": SparseGrad(keys, rows, 1), "wide": wide}, {"tower": DenseGrad(values, 1)}
    )


BAD = {
    "a-row": (gradients(deep=np.inf), 1.0, {"deep": 1}, r"table 'deep' .* key 8 has \[3.0, inf\]"),
    "a-block": (gradients(dense=np.nan), 1.0, {"tower": 1}, "'tower' .* element 1 is nan"),
    "both": (gradients(np.nan, -np.inf), 1.0, {"deep": 1, "tower": 1}, "table 'deep' is not"),
    "the-loss": (gradients(), np.nan, {"loss": 1}, "loss is nan"),
}


@pytest.mark.parametrize("fault", BAD)
def test_batch_that_is_not_finite_is_skipped_and_counted_by_name(fault: str) -> None:
    given, loss, by_name, _ = BAD[fault]
    batches = NonFiniteBatches("skip")

    assert not batches.is_skipped(gradients(), 1.0, 1)
    assert batches.is_skipped(given, loss, 2)

    assert (batches.skipped, batches.by_name) == (1, by_name)


@pytest.mark.parametrize("fault", BAD)
def test_batch_that_is_not_finite_is_an_error_with_its_number(fault: str) -> None:
    given, loss, _, text = BAD[fault]
    batches = NonFiniteBatches("fail")

    assert not batches.is_skipped(gradients(), 1.0, 1)
    with pytest.raises(GradientError, match=f"^batch 12: .*{text}"):
        batches.is_skipped(given, loss, 12)

    assert (batches.skipped, batches.by_name) == (0, {})


@pytest.mark.parametrize(
    ("policy", "text"), [("fail", "batch 51: "), ("skip", "51 of the last 51 batches were skipped")]
)
def test_errors_name_the_worker(policy: Policy, text: str) -> None:
    batches = NonFiniteBatches(policy, worker=1)
    for number in range(1, 51 if policy == "skip" else 1):
        batches.is_skipped(gradients(np.inf), 1.0, number)

    with pytest.raises(GradientError, match=f"^worker 1: {text}"):
        batches.is_skipped(gradients(np.inf), 1.0, 51)


def test_log_has_the_first_skipped_batch_and_then_every_power_of_two(caplog) -> None:
    batches = NonFiniteBatches("skip")

    with caplog.at_level(logging.WARNING):
        for number in range(1, 21):
            batches.is_skipped(gradients(np.inf), 1.0, number)

    assert [record.args[1] for record in caplog.records] == [1, 2, 4, 8, 16]
    assert caplog.messages[0].startswith('batch skipped batch=1 skipped_batches=1 fault="gradient')


def test_half_of_the_last_hundred_may_be_skipped_and_one_more_may_not() -> None:
    batches = NonFiniteBatches("skip")
    for number in range(1, 301):
        batches.is_skipped(gradients(np.inf if number % 2 else 1.0), 1.0, number)

    assert not batches.is_skipped(gradients(), 1.0, 301)
    assert batches.is_skipped(gradients(np.inf), 1.0, 302)
    assert batches.is_skipped(gradients(np.inf), 1.0, 303)
    with pytest.raises(
        GradientError, match=r"51 of the last 100 batches .*, batch 304: .*diverged"
    ):
        batches.is_skipped(gradients(np.inf), 1.0, 304)
