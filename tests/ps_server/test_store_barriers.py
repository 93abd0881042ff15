"""Barriers of a store whose workers come again, or too late."""

import pytest

from protos.errors import WaitTimeoutError
from ps_server.store import ParameterStore


def test_worker_that_comes_again_waits_on_when_its_first_call_gives_up() -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=0.01)
    first = store.barrier("b", 0, step=0)
    second = store.barrier("b", 0, step=0)

    with pytest.raises(WaitTimeoutError, match=r"\[1\]"):
        first.result()
    last = store.barrier("b", 1, step=0)

    assert (second.result(), last.result()) == (0, 0)


def test_worker_that_gave_up_is_missing_again() -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=0.01)

    with pytest.raises(WaitTimeoutError, match=r"workers \[1\]"):
        store.barrier("b", 0, step=0).result()
    with pytest.raises(WaitTimeoutError, match=r"workers \[0\]"):
        store.barrier("b", 1, step=0).result()
