"""Things that are done later: in the order of their times, and at once when nobody waits any more."""

import queue
import threading
import time

from ctr_ps.ps_worker.cluster.delays import Delays

LIMIT_S = 20.0
NEVER_S = 600.0
NAME = "delays-of-a-test"


def test_what_is_due_sooner_is_not_kept_by_what_came_before() -> None:
    done: queue.Queue[int] = queue.Queue()
    delays = Delays(NAME)
    delays.after(NEVER_S, lambda: done.put(-1))
    delays.after(0.1, lambda: done.put(1))
    delays.after(0.0, lambda: done.put(0))
    assert [done.get(timeout=LIMIT_S) for _ in range(2)] == [0, 1]

    for number in range(20):  # the thread waits for the first, mostly
        delays.after(0.0, lambda number=number: done.put(number))
        assert done.get(timeout=LIMIT_S) == number
    assert delays.num_due == 1

    delays.close()
    assert done.get_nowait() == -1


def test_closing_does_at_once_what_is_left_and_what_comes_then() -> None:
    done: queue.Queue[str] = queue.Queue()
    delays = Delays(NAME)
    for name in ("a", "b"):
        delays.after(NEVER_S, lambda name=name: done.put(name))
    begun = time.monotonic()

    delays.close()

    assert [done.get_nowait() for _ in range(2)] == ["a", "b"]
    assert NAME not in {each.name for each in threading.enumerate()}
    delays.after(NEVER_S, lambda: done.put("c"))
    assert done.get(timeout=LIMIT_S) == "c"
    assert time.monotonic() - begun < LIMIT_S
