"""Futures with a limit."""

import threading
from unittest.mock import Mock

import pytest

from ctr_ps.protos.errors import ProtocolError, WaitTimeoutError
from ctr_ps.protos.futures import WaitingFuture

LONG_S = 30.0


@pytest.fixture
def give_up() -> Mock:
    return Mock(return_value=WaitTimeoutError("worker 1 did not come"))


def test_answer_within_the_limit_is_the_result(give_up: Mock) -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)
    setter = threading.Thread(target=future.set_result, args=(7,))
    setter.start()

    assert future.result() == 7
    setter.join(LONG_S)
    assert give_up.call_count == 0


def test_limit_that_passes_raises_what_giving_up_returns(give_up: Mock) -> None:
    future: WaitingFuture[int] = WaitingFuture(0.001, give_up)

    with pytest.raises(WaitTimeoutError) as raised:
        future.result()

    assert raised.value is give_up.return_value
    assert raised.value.__context__ is None  # a bare TimeoutError above it would say nothing
    assert give_up.call_count == 1


def test_timeout_of_the_caller_goes_before_the_limit(give_up: Mock) -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)

    with pytest.raises(WaitTimeoutError):
        future.result(timeout=0.0)

    assert give_up.call_count == 1


def test_error_of_the_answer_is_raised_as_it_is(give_up: Mock) -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)
    error = ProtocolError("not at this step")
    future.set_exception(error)

    with pytest.raises(ProtocolError) as raised:
        future.result()

    assert raised.value is error
    assert give_up.call_count == 0


def test_error_while_answering_reaches_the_one_who_waits(give_up: Mock) -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)

    future.answer_with(lambda: int("seven"))

    with pytest.raises(ValueError, match="seven"):
        future.result()


def test_answer_that_nobody_waits_for_is_not_computed(give_up: Mock) -> None:
    future: WaitingFuture[int] = WaitingFuture(LONG_S, give_up)
    future.cancel()

    future.answer_with(lambda: pytest.fail("computed"))

    assert future.cancelled()
