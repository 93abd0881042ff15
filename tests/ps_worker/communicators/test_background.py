"""Threads in the background: what goes wrong there is raised where training waits."""

import threading

import pytest

from ctr_ps.protos.errors import ProtocolError, TransportError, WaitTimeoutError
from ctr_ps.ps_worker.communicators.communicator import Background


def test_first_error_stays() -> None:
    background = Background(stall_limit_s=5.0, stalled="nothing")
    may_follow = threading.Event()

    def cause() -> None:
        raise TransportError("the cause")

    def consequence() -> None:
        may_follow.wait(5)
        raise ProtocolError("what came of it")

    background.start("one", cause)
    with background.changed, pytest.raises(TransportError, match="the cause"):
        background.wait_until(lambda: False)
    background.start("two", consequence)
    may_follow.set()
    background.close()

    with pytest.raises(TransportError, match="the cause"):
        background.require_health()


def test_what_does_not_happen_in_time_is_said() -> None:
    background = Background(stall_limit_s=0.01, stalled="the sea did not freeze")

    with (
        background.changed,
        pytest.raises(WaitTimeoutError, match=r"the sea did not freeze within 0\.01 s"),
    ):
        background.wait_until(lambda: False)


def test_closing_ends_threads_and_those_who_wait() -> None:
    background = Background(stall_limit_s=5.0, stalled="nothing")

    def work() -> None:
        with background.changed:
            background.changed.wait_for(lambda: background.is_closed)

    background.start("one", work)
    background.close()

    with pytest.raises(ProtocolError, match="closed"):
        background.require_health()
