"""What a fetch handler is told, and what becomes of its errors."""

import itertools
import threading

import numpy as np
import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Staleness
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.monitor import Fetched, Fetching

LIMIT_S = 30.0
NEVER_S = 3600.0
STALENESS = Staleness().add(3)


class Pass:
    """A pass with a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.progress = Progress(every_s=NEVER_S, clock=lambda: self.now_s)

    def add(self, examples: int, loss: float, *, is_right: bool = True) -> None:
        labels = np.tile(np.float32([0, 1]), examples // 2)
        predictions = np.float32(0.2) + np.float32(0.6) * (labels if is_right else 1 - labels)
        self.progress.add(labels, predictions, loss)

    def fetching(self, handler, period_s: float = NEVER_S) -> Fetching:
        return Fetching(
            handler, period_s=period_s, progress=self.progress, staleness=lambda: STALENESS
        )


def test_handler_is_called_once_more_at_the_end() -> None:
    run, told = Pass(), []

    with run.fetching(told.append):
        run.add(10, loss=5.0)
        run.now_s = 102.0

    assert told == [
        Fetched(
            examples=10, examples_per_s=5.0, loss=0.5, auc=1.0, accuracy=1.0, staleness=STALENESS
        )
    ]
    line = "examples=10 examples/s=5 loss=0.50000 auc=1.0000 accuracy=1.0000 staleness=3.0"
    assert str(told[0]) == line


def test_figures_are_of_this_pass_alone() -> None:
    run, told = Pass(), []
    run.add(1000, loss=9.0, is_right=False)
    run.now_s = 200.0

    with run.fetching(told.append):
        run.add(10, loss=1.0)
        run.now_s = 201.0

    assert (told[0].examples, told[0].examples_per_s) == (10, 10.0)
    assert told[0].loss == pytest.approx(0.1)
    assert told[0].auc == 1.0


def test_rate_is_of_the_time_since_the_last_call() -> None:
    run, told = Pass(), []
    calls, leave = threading.Semaphore(0), threading.Semaphore(0)

    def handler(fetched: Fetched) -> None:
        told.append(fetched)
        calls.release()
        leave.acquire(timeout=LIMIT_S)

    with run.fetching(handler, period_s=0.001):
        for examples, seconds in [(40, 4.0), (20, 1.0)]:
            assert calls.acquire(timeout=LIMIT_S)
            run.add(examples, loss=1.0)
            run.now_s += seconds
            leave.release()
        assert calls.acquire(timeout=LIMIT_S)
        leave.release(1000)

    assert [call.examples for call in told[:3]] == [0, 40, 60]
    assert [call.examples_per_s for call in told[:3]] == [0.0, 10.0, 20.0]


def test_handler_without_examples_is_told_nan() -> None:
    told: list[Fetched] = []

    with Pass().fetching(told.append):
        pass

    assert told[0].examples == 0
    assert np.isnan([told[0].loss, told[0].auc]).all()


def test_error_of_the_handler_stops_the_batches_with_its_own_trace() -> None:
    def wrong_handler(fetched: Fetched) -> None:
        raise ZeroDivisionError("of the handler")

    def train() -> None:
        with Pass().fetching(wrong_handler, period_s=0.001) as fetching:
            for _ in fetching.watch(itertools.count()):
                pass

    with pytest.raises(ZeroDivisionError, match="of the handler") as caught:
        train()

    assert "wrong_handler" in [entry.name for entry in caught.traceback]


def test_error_of_the_handler_after_the_last_batch_is_raised_too() -> None:
    is_called = threading.Event()

    def handler(fetched: Fetched) -> None:
        if is_called.is_set():
            raise AssertionError("called again after its error")
        is_called.set()
        raise ZeroDivisionError

    def train() -> None:
        with Pass().fetching(handler, period_s=0.001):
            assert is_called.wait(LIMIT_S)

    with pytest.raises(ZeroDivisionError):
        train()


def test_failed_training_neither_waits_for_the_handler_nor_calls_it_again() -> None:
    is_called, may_resume, calls = threading.Event(), threading.Event(), []

    def handler(fetched: Fetched) -> None:
        calls.append(threading.current_thread())
        is_called.set()
        may_resume.wait(LIMIT_S)

    def train() -> None:
        with Pass().fetching(handler, period_s=0.001):
            assert is_called.wait(LIMIT_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert calls[0].is_alive()
    may_resume.set()
    calls[0].join(LIMIT_S)

    assert len(calls) == 1


@pytest.mark.parametrize("period_s", [0, -1.0, float("nan")])
def test_period_that_is_none_is_refused(period_s: float) -> None:
    with pytest.raises(UsageError, match="fetch_period is"):
        Pass().fetching(print, period_s)
