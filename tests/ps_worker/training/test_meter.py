"""The lines that a training worker writes."""

import logging
import math
import re

import numpy as np
import pytest

from ps_worker.training.meter import Progress


class Run:
    """A progress with a clock that stands still, and the lines it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture, every_s: float = 5.0) -> None:
        caplog.set_level(logging.INFO, "ps_worker.training.meter")
        self._records = caplog
        self.now_s = 100.0
        self.progress = Progress(every_s=every_s, clock=lambda: self.now_s)

    def add(self, examples: int = 4, loss: float = 1.0, *, is_right: bool = True) -> None:
        """Adds a step of half clicks, all of them ranked first or all of them last."""
        labels = np.tile(np.float32([0, 1]), examples // 2)
        predictions = np.float32(0.2) + np.float32(0.6) * (labels if is_right else 1 - labels)
        self.progress.add(labels, predictions, loss)

    @property
    def lines(self) -> list[dict[str, str]]:
        return [dict(re.findall(r"(\S+)=(\S+)", line)) for line in self._records.messages]


class Losses:
    """A progress over batches of 25 clicks and 75 others, in intervals of 5 s, and its warnings."""

    BASE = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))

    def __init__(self, caplog: pytest.LogCaptureFixture, **settings: bool) -> None:
        caplog.set_level(logging.WARNING, "ps_worker.training.meter")
        self._records = caplog
        self.now_s = 0.0
        self.progress = Progress(every_s=5.0, clock=lambda: self.now_s, **settings)

    def add(self, *losses: float, clicks: int = 25) -> None:
        """Adds a batch a second with each mean loss."""
        labels = np.zeros(100, np.float32)
        labels[:clicks] = 1
        for loss in losses:
            self.now_s += 1.0
            self.progress.add(labels, np.full(100, 0.5, np.float32), 100 * loss)

    @property
    def warnings(self) -> list[str]:
        return [r.getMessage() for r in self._records.records if r.levelno == logging.WARNING]


def test_interval_with_a_loss_above_the_base_rates_is_warned_of_once(caplog) -> None:
    losses = Losses(caplog)
    losses.add(*[0.4] * 5, *[0.6] * 4)
    assert losses.warnings == []

    losses.add(*[0.6] * 21)

    assert len(losses.warnings) == 1
    assert losses.warnings[0].startswith(
        f"loss 0.60000 up to step 10 is above {losses.BASE:.5f}, the loss of predicting the click rate "
        f"0.2500 for every example: try a smaller learning rate"
    )


def test_base_rate_is_that_of_all_examples_on_those_of_the_interval(caplog) -> None:
    """Of 1,000 examples 125 were clicked, of the interval's 500 none."""
    losses = Losses(caplog)
    losses.add(*[0.1] * 5)
    losses.add(*[0.2] * 5, clicks=0)

    assert (
        f"is above {-math.log1p(-0.125):.5f}, the loss of predicting the click rate 0.1250"
        in (losses.warnings[0])
    )


@pytest.mark.parametrize(
    "intervals",
    [
        pytest.param([[0.6] * 5], id="the-first-interval"),
        pytest.param([[0.4] * 5, [2.0] * 4], id="less-than-an-interval"),
        pytest.param([[0.4] * 5, [0.7, 0.5, 0.5, 0.5, 0.5]], id="some-batches"),
    ],
)
def test_loss_that_may_yet_be_below_the_base_rates_is_not_warned_of(caplog, intervals) -> None:
    losses = Losses(caplog)

    for interval in intervals:
        losses.add(*interval)
    losses.progress.log()

    assert losses.warnings == []


def test_other_losses_are_not_compared(caplog) -> None:
    losses = Losses(caplog, has_log_loss=False)

    losses.add(*[5.0] * 20)

    assert losses.warnings == []


@pytest.mark.parametrize("clicks", [0, 100])
def test_data_of_one_class_have_no_base_rate(caplog, clicks: int) -> None:
    losses = Losses(caplog)

    losses.add(*[5.0] * 20, clicks=clicks)

    assert losses.warnings == []


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Run:
    return Run(caplog)


def test_line_comes_with_the_first_step_after_the_interval(run: Run) -> None:
    run.add()
    run.now_s = 104.9
    run.add()
    assert run.lines == []

    run.now_s = 105.0
    run.add()

    assert [line["step"] for line in run.lines] == ["3"]
    assert run.lines[0]["examples"] == "12"


def test_line_has_rate_and_mean_loss_of_its_window(run: Run) -> None:
    run.add(examples=10, loss=3.0)
    run.now_s = 108.0
    run.add(examples=30, loss=5.0)

    assert run.lines[0]["examples/s"] == "5"  # 40 examples in 8 seconds
    assert run.lines[0]["loss"] == "0.20000"


def test_next_window_starts_at_the_line(run: Run) -> None:
    run.now_s = 107.0
    run.add(examples=10, loss=100.0)
    run.now_s = 111.9
    run.add(examples=20, loss=2.0)
    assert len(run.lines) == 1

    run.now_s = 112.0
    run.add(examples=20, loss=6.0)

    assert run.lines[1] | {"step": "3", "examples": "50"} == run.lines[1]
    assert run.lines[1]["examples/s"] == "8"  # 40 examples in 5 seconds
    assert run.lines[1]["loss"] == "0.20000"


def test_mean_loss_is_over_all_windows(run: Run) -> None:
    assert math.isnan(run.progress.mean_loss)
    run.now_s = 107.0
    run.add(examples=10, loss=7.0)
    run.add(examples=30, loss=1.0)

    assert run.progress.mean_loss == 0.2
    assert (run.progress.steps, run.progress.examples) == (2, 40)


def test_recent_auc_forgets_what_the_whole_auc_keeps(run: Run) -> None:
    run.add(is_right=False)
    run.progress.log()
    (recent,) = (name for name in run.lines[0] if name.startswith("auc_"))
    assert run.lines[0]["auc"] == run.lines[0][recent] == "0.0000"

    for _ in range(int(recent.removeprefix("auc_"))):
        run.add()
    run.progress.log()

    assert run.lines[1][recent] == "1.0000"
    assert 0.0 < float(run.lines[1]["auc"]) < 1.0


def test_last_line_is_of_what_came_since_and_not_written_twice(run: Run) -> None:
    run.now_s = 107.0
    run.add()
    run.progress.log()
    assert len(run.lines) == 1

    run.add(examples=4, loss=2.0)
    run.progress.log()
    run.progress.log()

    assert [line["loss"] for line in run.lines] == ["0.25000", "0.50000"]
    assert run.lines[1]["examples/s"] == "0"  # no time has passed
