"""The windows of a stream: where all workers end them, whatever each has."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Numbers, ReduceOp
from ctr_ps.ps_worker.data.streams.stream_data import StreamPosition
from ctr_ps.ps_worker.job.streams import PassLength, pass_length
from ctr_ps.ps_worker.run.training_job.training import Training
from ctr_ps.ps_worker.run.training_job.windows import Windows

MINUTE = 60_000.0


class Rows:
    """Stands for `StreamData`: rows of some times, each a batch."""

    latest_ms = 0

    def __init__(self, times: list[float], *, is_live: bool = False, now_ms: float = 0.0) -> None:
        self.times = times
        self._none = now_ms if is_live else math.inf

    def late(self) -> tuple[int, int]:
        return 0, 0

    def next_ms(self) -> float:
        return self.times[0] if self.times else self._none

    def batches(self, epoch: int, *, before_ms: float, max_rows: int, rows: int) -> Iterator[Any]:
        number = rows
        while self.times and self.times[0] < before_ms and (not max_rows or number < max_rows):
            number += 1
            yield self.times.pop(0)


def windows_of(
    rows: Rows,
    length: PassLength,
    start: StreamPosition | None = None,
    *,
    first: tuple[int, float] = (0, 0.0),
    others: Callable[[], Numbers] | None = None,
    num_workers: int = 1,
    is_repeating: bool = False,
) -> Windows:
    def all_reduce(values: Numbers, op: ReduceOp, name: str) -> Numbers:
        assert op is ReduceOp.MIN
        return values if others is None else np.minimum(values, others())

    run = SimpleNamespace(
        all_reduce=all_reduce,
        num_workers=num_workers,
        is_repeating=is_repeating,
        end_early=lambda: None,
    )
    return Windows(rows, run, length, start, first)  # type: ignore[arg-type]


def trained(windows: Windows, first: int = 1) -> dict[int, list[float]]:
    found = {}
    for each in windows.windows(first):
        found[each.number] = list(each.batches)
        if each.ends():
            break
    return found


def test_windows_end_at_multiples_of_their_length() -> None:
    times = [59_000.0, 59_999.0, 60_000.0, 61_000.0, 400_000.0]

    found = trained(windows_of(Rows(times.copy()), PassLength(milliseconds=MINUTE)))

    assert found == {1: times[:2], 2: times[2:4], 3: times[4:]}


def test_a_window_begins_with_the_oldest_row_of_all_workers() -> None:
    """So one without rows of that time has none in it."""
    others = iter([10_000.0, 70_000.0, 200_000.0, math.inf, math.inf])

    found = trained(
        windows_of(
            Rows([130_000.0, 200_000.0]),
            PassLength(milliseconds=MINUTE),
            others=lambda: np.array([next(others), math.inf, 0.0]),
        )
    )

    assert found == {1: [], 2: [], 3: [130_000.0], 4: [200_000.0]}


def test_a_worker_that_is_told_to_end_says_no_end_of_a_window() -> None:
    windows = windows_of(Rows([math.nan]), PassLength(milliseconds=MINUTE), others=pytest.fail)

    with pytest.raises(SystemExit):
        next(windows.windows(1))


def test_a_late_row_makes_no_second_window_of_the_same_end() -> None:
    found = trained(
        windows_of(Rows([61_000.0, 121_000.0, 119_000.0]), PassLength(milliseconds=MINUTE))
    )

    assert found == {1: [61_000.0], 2: [121_000.0, 119_000.0]}


def test_a_resumed_window_ends_where_it_would_have() -> None:
    start = StreamPosition(epoch=3, before_ms=120_000.0)

    found = trained(
        windows_of(Rows([30_000.0, 119_000.0, 121_000.0]), PassLength(milliseconds=MINUTE), start),
        first=3,
    )

    assert found == {3: [30_000.0, 119_000.0], 4: [121_000.0]}


def test_a_process_in_a_lost_ones_place_asks_nobody_for_the_window_that_all_agreed_on() -> None:
    """And the next one ends later, though its first row is late."""
    rows = Rows([30_000.0, 119_000.0])
    asked: list[float] = []

    def others() -> Numbers:
        asked.append(1)
        return np.array([math.inf, math.inf, 0.0])

    windows = windows_of(
        rows, PassLength(milliseconds=MINUTE), first=(3, 120_000.0), others=others
    ).windows(3)
    third = next(windows)
    found = list(third.batches)
    assert not asked
    rows.times += [100_000.0, 121_000.0]
    is_last = third.ends()
    fourth = next(windows)

    assert (third.before_ms, found) == (120_000.0, [30_000.0, 119_000.0])
    assert not is_last
    assert (*third.following(), fourth.before_ms) == (4, 180_000.0, 180_000.0)
    assert list(fourth.batches) == [100_000.0, 121_000.0]


def test_a_process_that_begins_at_a_restart_goes_on_in_the_window_that_it_is_told_of() -> None:
    none: Any = None

    def all_reduce(values: Numbers, op: ReduceOp, name: str) -> Numbers:
        raise AssertionError(f"the others are past {name}")

    run: Any = SimpleNamespace(
        all_reduce=all_reduce,
        earlier_progress=None,
        is_repeating=False,
        is_replacement=True,
        num_workers=2,
        progress=SimpleNamespace(),
        restarts=True,
        worker=1,
    )
    rows: Any = Rows([119_000.0, 121_000.0])
    rows.partitions, rows.lag, rows.lateness, rows.close = ["clicks/1"], none, {}, lambda: None
    stream: Any = SimpleNamespace(
        open=lambda *_, **__: rows, name="clicks", length=PassLength(milliseconds=MINUTE)
    )
    validator: Any = SimpleNamespace(
        is_over=False, best=None, recall=lambda _: np.array([7.0, 120_000.0])
    )
    checkpoints: Any = SimpleNamespace(name_before=None)
    plan: Any = SimpleNamespace(train_files=(), job=None)
    worker = Training(plan, run, none, stream, none, validator, checkpoints, none, lambda: False)

    done = worker._resume(None)
    each = next(worker._passes(done + 1, 0))

    assert (done, each.number, each.before_ms) == (6, 7, 120_000.0)
    assert list(each.batches) == [119_000.0]


def test_a_window_of_rows_has_the_share_of_each_worker() -> None:
    start = StreamPosition(epoch=1, rows=2)

    found = trained(
        windows_of(Rows([float(k) for k in range(10)]), PassLength(rows=12), start, num_workers=3)
    )

    assert [len(each) for each in found.values()] == [2, 4, 4]


def test_rows_of_a_window_that_a_lost_process_has_ended_are_not_trained() -> None:
    rows = Rows([1_000.0, 61_000.0])

    windows = windows_of(rows, PassLength(milliseconds=MINUTE), is_repeating=True)
    first = next(windows.windows(1))

    assert list(first.batches) == []
    assert len(rows.times) == 2


def test_a_stream_without_a_length_of_passes_is_one() -> None:
    found = trained(windows_of(Rows([1.0, 1e9, 2e12]), pass_length("")))

    assert found == {1: [1.0, 1e9, 2e12]}


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("90 s", PassLength(milliseconds=90_000)),
        ("1.5 min", PassLength(milliseconds=90_000)),
        ("2h", PassLength(milliseconds=7_200_000)),
        ("1 d", PassLength(milliseconds=86_400_000)),
        ("5000 rows", PassLength(rows=5000)),
        ("1.5 M rows", PassLength(rows=1_500_000)),
    ],
)
def test_lengths_of_passes(text: str, length: PassLength) -> None:
    assert pass_length(text) == length


@pytest.mark.parametrize("text", ["ten minutes", "0 min", "0 rows", "-1 s", "5"])
def test_wrong_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"length of a pass|no duration"):
        pass_length(text)
