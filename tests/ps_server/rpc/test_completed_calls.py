"""Calls that come again: answered as before, and not carried out again."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ctr_ps.ps_server.rpc.completed_calls import CompletedCalls

LIMIT_S = 10.0


def test_same_call_again_has_the_same_answer() -> None:
    completed, answers = CompletedCalls(), itertools.count()

    def call(caller: str, number: int) -> int:
        return completed.once(caller, number, lambda: next(answers), remembered=2)

    assert [call("a", 1), call("a", 1), call("a", 2), call("b", 1)] == [0, 0, 1, 2]
    assert [call("a", 1), call("a", 2), call("b", 1)] == [0, 1, 2]


def test_answer_of_nothing_is_remembered_too() -> None:
    completed, carried_out = CompletedCalls(), []

    for _ in range(2):
        completed.once("a", 1, lambda: carried_out.append(1), remembered=1)

    assert carried_out == [1]


def test_same_call_again_waits_for_the_first() -> None:
    completed, begun, goes_on = CompletedCalls(), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert goes_on.wait(LIMIT_S)
        return "first"

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(completed.once, "a", 1, slow, remembered=1)
        assert begun.wait(LIMIT_S)
        again = threads.submit(completed.once, "a", 1, lambda: "second", remembered=1)
        assert completed.once("b", 1, lambda: "other", remembered=1) == "other", "waits for nobody"
        assert not again.done()
        goes_on.set()

        assert [first.result(LIMIT_S), again.result(LIMIT_S)] == ["first", "first"]


def test_error_is_not_remembered() -> None:
    completed = CompletedCalls()

    def fail() -> str:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        completed.once("a", 1, fail, remembered=1)

    assert completed.once("a", 1, lambda: "good", remembered=1) == "good"


def test_oldest_answers_are_forgotten() -> None:
    completed = CompletedCalls()
    for number in range(4):
        completed.once("a", number, lambda: "first", remembered=2)

    again = {
        number: completed.once("a", number, lambda: "again", remembered=4) for number in range(4)
    }

    assert again == {0: "again", 1: "again", 2: "first", 3: "first"}
