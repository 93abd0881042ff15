"""What a part of a synchronous step costs a server: visits to the lock, checks of place and values."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.gradients import require_finite
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import in_process, joined, push_id, random_gradients

LOCK, PLACE, FINITE = "lock", "place", "finite"
COUNTED = {Membership.require_place.__code__: PLACE, require_finite.__code__: FINITE}


class CountedLock:
    """A lock that says how often it was taken."""

    def __init__(self, counts: Counter[str]) -> None:
        self._lock = threading.Lock()
        self._counts = counts

    def __enter__(self) -> None:
        self._counts[LOCK] += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def counting(store: ParameterStore) -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in COUNTED:
            counts[COUNTED[frame.f_code]] += 1

    store.engine.job._calls.lock = CountedLock(counts)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(before)


def push(handlers: Handlers, worker: int, at: int | None) -> None:
    gradients = random_gradients(worker)
    dense = [(name, 0, grad) for name, grad in gradients.dense.items()]
    request = requests.PushGrad(
        chunk=PushChunk(list(gradients.sparse.items()), dense),
        push_id=push_id(worker, 0),
        at=at,
        shard_map_epoch=FIRST_EPOCH,
    )
    handlers.start(calls.PUSH_GRAD, request).result()


def test_part_of_a_step_visits_the_lock_twice_and_is_checked_once() -> None:
    store = joined(in_process(num_workers=2))
    handlers = Handlers(store.engine)

    with counting(store) as counts:
        push(handlers, 0, at=0)

    assert counts == {LOCK: 2, PLACE: 1, FINITE: 1}


def test_part_that_completes_a_step_visits_the_lock_once_more_to_count_it() -> None:
    store = joined(in_process(num_workers=2))
    handlers = Handlers(store.engine)
    push(handlers, 0, at=0)

    with counting(store) as counts:
        push(handlers, 1, at=0)

    assert counts == {LOCK: 3, PLACE: 1, FINITE: 1}
    assert store.status().version == 1


def test_push_on_arrival_is_admitted_begun_and_counted() -> None:
    store = joined(in_process())

    with counting(store) as counts:
        push(Handlers(store.engine), 0, at=None)

    assert counts == {LOCK: 3, PLACE: 1, FINITE: 1}


@pytest.mark.parametrize(("at", "visits"), [(0, 3), (None, 3)], ids=["sync", "async"])
def test_push_in_process_costs_no_more(at: int | None, visits: int) -> None:
    store = joined(in_process())

    with counting(store) as counts:
        store.push_grad(random_gradients(0), push_id(), at=at).result()

    assert counts == {LOCK: visits, PLACE: 1, FINITE: 1}
