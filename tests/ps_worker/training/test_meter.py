"""The lines that a training worker writes."""

import logging
import math
import re
import threading

import numpy as np
import pytest

from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.ps_worker.training import meter
from ctr_ps.ps_worker.training.meter import LearningRates, Progress


class Run:
    """A progress with a clock that stands still, and the lines it wrote."""

    def __init__(self, caplog: pytest.LogCaptureFixture, every_s: float = 5.0) -> None:
        caplog.set_level(logging.INFO, "ctr_ps.ps_worker.training.meter")
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

    def __init__(self, caplog: pytest.LogCaptureFixture, **settings: bool | str) -> None:
        caplog.set_level(logging.WARNING, "ctr_ps.ps_worker.training.meter")
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
        "at step 10 the mean loss since the last progress line is 0.60000, above "
        f"{losses.BASE:.5f}, the log loss of predicting the click rate so far (0.2500) for every example: "
        "try a smaller learning rate"
    )


def test_base_rate_is_that_of_all_examples_on_those_of_the_interval(caplog) -> None:
    """Of 1,000 examples 125 were clicked, of the interval's 500 none."""
    losses = Losses(caplog)
    losses.add(*[0.1] * 5)
    losses.add(*[0.2] * 5, clicks=0)

    assert (
        f"above {-math.log1p(-0.125):.5f}, the log loss of predicting the click rate so far (0.1250) for "
        "every example:" in (losses.warnings[0])
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


@pytest.mark.parametrize(("loss", "is_above"), [(0.4, True), (0.3, False)])
def test_base_rate_is_that_of_the_weights(caplog, loss: float, is_above: bool) -> None:
    """Half of the examples are clicks, which weigh 2 of 20: always predicting that has a loss of 0.325."""
    losses = Losses(caplog)
    labels = np.tile(np.float32([0, 1]), 50)
    weights = np.where(labels > 0, np.float32(2), np.float32(18))
    for _ in range(20):
        losses.now_s += 1.0
        losses.progress.add(labels, np.full(100, 0.3, np.float32), loss * weights.sum(), weights)

    assert len(losses.warnings) == is_above
    shown = (
        "above 0.32508, the log loss of predicting the click rate so far (0.1000) for every example"
    )
    assert all(shown in warning for warning in losses.warnings)


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


def test_losses_of_weighted_examples_are_divided_by_their_weight(run: Run) -> None:
    labels, predictions = np.float32([0, 1]), np.float32([0.2, 0.8])
    run.progress.add(labels, predictions, 12.0, np.float32([0.5, 1.5]))
    run.progress.log()
    run.progress.add(labels, predictions, 12.0, np.float32([1, 3]))
    run.progress.log()

    assert [line["loss"] for line in run.lines] == ["6.00000", "3.00000"]
    assert run.progress.mean_loss == 4.0
    assert run.progress.examples == 4


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


def test_pass_has_metrics_of_its_own(run: Run) -> None:
    run.add(examples=10, is_right=False)
    run.progress.begin_pass()
    assert run.progress.of_pass().examples == 0

    run.add(examples=30)

    assert run.progress.of_pass().examples == 30
    assert run.progress.of_pass().auc() == 1.0
    assert run.progress.counts().examples == 40


@pytest.mark.parametrize("early", [False, True])
def test_early_steps_of_a_pass_that_know_less_than_the_click_rate_are_warned_of(
    caplog, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Within the first interval: predictions of 0.5 have a loss of log 2, those of the rate one of 0.5623."""
    monkeypatch.setattr(meter, "EARLY_STEPS", 3 if early else 5)
    losses = Losses(caplog, advice="try this")
    losses.progress.begin_pass()

    losses.add(*[0.6] * 4)

    expected = (
        f"the model after the first 3 steps of a pass has a log loss of {math.log(2):.5f} "
        f"({math.log(2):.5f} in the last 20 batches of this worker), above {losses.BASE:.5f}, the log "
        "loss of predicting the click rate (0.2500) for every example: try this"
    )
    assert losses.warnings == ([expected] if early else [])


def test_early_steps_are_those_of_this_run_the_skipped_ones_included(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "EARLY_STEPS", 3)
    losses = Losses(caplog)
    losses.progress.resume(100)

    losses.add(0.6, 0.6)
    assert losses.warnings == []
    losses.progress.skip()
    losses.add(0.6)

    [warning] = losses.warnings
    assert warning.startswith("the model after the first 3 steps of a pass has a log loss")


@pytest.mark.parametrize("recent", [0.5, 0.25])
def test_loss_that_has_fallen_below_the_base_rates_is_not_warned_of(caplog, recent: float) -> None:
    """A mean above it is that of the first predictions."""
    losses = Losses(caplog)
    labels = np.zeros(100, np.float32)
    labels[:25] = 1
    for prediction in [0.9] * 30 + [recent] * 20:
        losses.progress.add(labels, np.full(100, prediction, np.float32), 0.0)

    losses.progress.warn_of_base_rate(losses.progress.of_pass(), "the pass")

    assert len(losses.warnings) == (recent == 0.5)


def test_line_says_where_the_pass_is_and_how_long_it_takes(run: Run) -> None:
    done = iter([0.4, 0.5, 0.52, None])
    run.progress.begin_pass("2/3", lambda: next(done))
    for now_s in (110.0, 120.0, 137.0, 150.0):
        run.now_s = now_s
        run.add()

    # 12 % took 27 s, so 48 % take 108 s: what was done before the first line took none of this time.
    shown = [{name: line.get(name) for name in ("pass", "done", "left")} for line in run.lines]
    assert shown == [
        {"pass": "2/3", "done": "40%", "left": None},
        {"pass": "2/3", "done": "50%", "left": "0:00:50"},
        {"pass": "2/3", "done": "52%", "left": "0:01:48"},
        {"pass": "2/3", "done": None, "left": None},
    ]


def test_lines_are_told_with_their_figures(run: Run) -> None:
    told = []
    run.progress.watch(lambda figures, step: told.append({"step": step, **figures}))
    run.progress.begin_pass("1/1", lambda: 0.25)

    run.now_s = 110.0
    run.add(examples=30, loss=6.0)

    assert (told[0]["step"], told[0]["examples"]) == (1, 30)
    assert told[0]["examples_per_s"] == 3.0
    assert told[0]["loss"] == 0.2
    assert told[0]["pass_done"] == 0.25
    assert math.isnan(told[0]["pass_left_s"])


@pytest.mark.parametrize("waits_for", ["rates", "disk"])
def test_others_count_while_a_line_is_written(waits_for: str) -> None:
    """Servers may take long to say how many batches are applied, and a disk to write figures."""
    asked, has_counted, waits = threading.Event(), threading.Event(), []

    def wait() -> None:
        asked.set()
        waits.append(has_counted.wait(5.0))

    def rates() -> str:
        wait()
        return " rates=wide:0.1"

    progress = Progress(every_s=0.0, rates=rates if waits_for == "rates" else str)
    if waits_for == "disk":
        progress.watch(lambda figures, step: wait())
    one = np.ones(1, np.float32)
    writer = threading.Thread(target=progress.add, args=(one, one, 0.0))
    writer.start()
    assert asked.wait(5.0)
    progress.skip()
    has_counted.set()
    writer.join()

    assert waits == [True]
    assert progress.steps == 2


def test_lines_are_told_in_the_order_of_their_steps() -> None:
    """Also if the thread of the first line is overtaken by that of the second before it writes."""
    arrived, has_written, told = threading.Event(), threading.Event(), []

    class Overtaken:
        def __enter__(self) -> None:
            if threading.current_thread() is first:
                arrived.set()
                assert has_written.wait(5.0)

        def __exit__(self, *_: object) -> None:
            has_written.set()

    progress = Progress(every_s=0.0)
    progress._writing = Overtaken()
    progress.watch(lambda figures, step: told.append(step))
    one = np.ones(1, np.float32)
    first = threading.Thread(target=progress.add, args=(one, one, 0.0))
    first.start()
    assert arrived.wait(5.0)
    progress.add(one, one, 0.0)
    first.join()

    assert told == [1, 2]


def test_nothing_is_asked_or_shown_where_no_rate_changes() -> None:
    constant = OptimizerSpec(name="sgd", params={"learning_rate": 0.5})
    rates = LearningRates({"ad": constant}, lambda: pytest.fail("asked"))

    assert rates.shown() == ""
