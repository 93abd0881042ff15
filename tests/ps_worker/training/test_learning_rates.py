"""Learning rates at the end of a line of progress."""

import pytest

from ctr_ps.protos.spec import OptimizerSpec, ScheduleSpec
from ctr_ps.ps_worker.training.meter import LearningRates

LINEAR = ScheduleSpec(kind="linear", total_steps=10)


def sgd(schedule: ScheduleSpec | None) -> OptimizerSpec:
    return OptimizerSpec(name="sgd", params={"learning_rate": 0.5}, schedule=schedule)


def test_rates_that_change_are_shown_as_they_are_at_the_batches_of_all_workers() -> None:
    batches = iter([0, 5])
    rates = LearningRates({"ad": sgd(LINEAR), "dense": sgd(None)}, lambda: next(batches))

    assert [rates.shown(), rates.shown()] == [" rates=ad:0.5", " rates=ad:0.25"]


def test_nothing_is_asked_or_shown_where_no_rate_changes() -> None:
    rates = LearningRates({"ad": sgd(None)}, lambda: pytest.fail("asked"))

    assert rates.shown() == ""


def test_rate_that_has_come_to_0_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the first batch that is trained at it: the last batch of a schedule leaves it at 0 as well."""
    batches = iter([10, 11, 12])
    rates = LearningRates({"ad": sgd(LINEAR), "item": sgd(LINEAR)}, lambda: next(batches))

    assert rates.shown() == " rates=ad:0,item:0"
    assert not caplog.messages
    assert [rates.shown(), rates.shown()] == [" rates=ad:0,item:0"] * 2

    (warning,) = caplog.messages
    assert warning.startswith("the learning rate of ad, item is 0 after 11 batches of all workers")
