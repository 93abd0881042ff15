"""When a call that failed is sent again."""

import pytest

from ctr_ps.ps_worker.cluster.retry import FIRST_PAUSE_S, FORGET_S, LONGEST_PAUSE_S, Retry


def pauses(retry: Retry, number: int) -> list[float]:
    found = [retry.pause_after(0.0) for _ in range(number)]
    assert None not in found
    return [pause for pause in found if pause is not None]


def test_pauses_grow_up_to_the_longest() -> None:
    found = pauses(Retry(budget_s=10.0), 2000)

    assert FIRST_PAUSE_S / 2 <= found[0] <= FIRST_PAUSE_S
    for shorter, longer in zip(found[:2], found[2:4], strict=True):
        assert shorter < longer, "half of a pause is by chance, and the next is twice as long"
    assert all(LONGEST_PAUSE_S / 2 <= pause <= LONGEST_PAUSE_S for pause in found[10:])
    assert len(set(found[10:])) > 100, "by chance, so that workers do not come all at once"


def test_no_try_begins_after_the_budget() -> None:
    """It is counted from the first failure, not from the call."""
    retry = Retry(budget_s=10.0)

    assert retry.pause_after(100.0) is not None
    assert retry.pause_after(109.9) is not None
    assert retry.pause_after(110.0) is None
    assert retry.tries == 3


def test_last_try_is_when_the_budget_ends() -> None:
    """Others count on that: the error has to come before a lease is over (extras/heter/connect.py)."""
    retry = Retry(budget_s=10.0)
    for now in (100.0, 103.0, 106.0, 109.0, 109.5):
        retry.pause_after(now)

    assert retry.pause_after(109.99) == pytest.approx(0.01)


def test_call_without_a_budget_is_not_sent_again() -> None:
    retry = Retry(budget_s=0.0)

    assert retry.pause_after(5.0) is None
    assert retry.tries == 1


@pytest.mark.parametrize("asked_s", [7.5, 60.0])
def test_pause_is_as_long_as_asked(asked_s: float) -> None:
    assert Retry(budget_s=10.0).pause_after(0.0, asked_s=asked_s) == asked_s


def test_pause_is_not_shorter_than_usual_when_less_is_asked() -> None:
    pause = Retry(budget_s=10.0).pause_after(0.0, asked_s=0.0)

    assert pause is not None
    assert pause >= FIRST_PAUSE_S / 2


def test_time_in_which_a_server_recovers_is_not_used_up() -> None:
    retry = Retry(budget_s=10.0)
    for now in range(0, 100, 5):
        assert retry.pause_after(now, progress=now) is not None


@pytest.mark.parametrize("progress", [99, 5])
def test_server_that_makes_no_progress_is_not_waited_for(progress: int) -> None:
    """It hangs, or dies at the same call again and again: beyond that it has to come."""
    retry = Retry(budget_s=10.0)
    assert retry.pause_after(0.0, progress=99) is not None
    assert retry.pause_after(8.0, progress=progress) is not None

    assert retry.pause_after(10.0, progress=progress) is None


def test_failure_after_a_long_wait_begins_another_budget() -> None:
    """A call may wait at a server for other workers, in whose time that one is restarted twice."""
    retry = Retry(budget_s=10.0)
    assert retry.pause_after(0.0) is not None
    assert retry.pause_after(9.0) is not None

    assert retry.pause_after(9.0 + FORGET_S) is not None
    assert retry.pause_after(18.0 + FORGET_S) is not None
    assert retry.pause_after(19.0 + FORGET_S) is None
