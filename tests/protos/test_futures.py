"""Futures with a limit."""

import threading

import pytest

from ctr_ps.protos.errors import CtrPsError, ProtocolError, WaitTimeoutError
from ctr_ps.protos.futures import WaitingFuture

LONG_S = 30.0


class GiveUp:
    """Gives up with one error, and counts how often."""

    def __init__(self) -> None:
        self.error = WaitTimeoutError("worker 1 did not come")
        self.num_calls = 0

    def __call__(self) -> CtrPsError:
        self.num_calls += 1
        return self.error


def test_answer_within_the_limit_is_the_result() -> None:
    give_up = GiveUp()
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)
    setter = threading.Thread(target=future.set_result, args=(7,))
    setter.start()

    assert future.result() == 7
    setter.join(LONG_S)
    assert give_up.num_calls == 0


def test_limit_that_passes_raises_what_giving_up_returns() -> None:
    give_up = GiveUp()
    future: WaitingFuture[int] = WaitingFuture(0.001, give_up)

    with pytest.raises(WaitTimeoutError) as raised:
        future.result()

    assert raised.value is give_up.error
    assert raised.value.__context__ is None  # a bare TimeoutError above it would say nothing
    assert give_up.num_calls == 1


def test_timeout_of_the_caller_goes_before_the_limit() -> None:
    give_up = GiveUp()
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)

    with pytest.raises(WaitTimeoutError):
        future.result(timeout=0.0)

    assert give_up.num_calls == 1


def test_error_of_the_answer_is_raised_as_it_is() -> None:
    give_up = GiveUp()
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)
    error = ProtocolError("not at this step")
    future.set_exception(error)

    with pytest.raises(ProtocolError) as raised:
        future.result()

    assert raised.value is error
    assert give_up.num_calls == 0


def test_error_while_answering_reaches_the_one_who_waits() -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, GiveUp())

    future.answer_with(lambda: int("seven"))

    with pytest.raises(ValueError, match="seven"):
        future.result()


def test_answer_that_nobody_waits_for_is_not_computed() -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, GiveUp())
    future.cancel()

    future.answer_with(lambda: pytest.fail("computed"))

    assert future.cancelled()
