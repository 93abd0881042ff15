"""What the coordinator does in a step grows linearly with the number of workers.

Counted in instructions of Python, so loops within functions written in C are left out.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Future, Version
from ctr_ps.ps_server.coordination.coordinator import Coordinator
from ctr_ps.ps_server.coordination.pending_calls import answer_all
from tests.support.stores import push_id

SIZES = (16, 32, 64)


def instructions(work: Callable[[], object]) -> int:
    """Returns the number of instructions that a function takes, those of functions that it calls included."""
    number = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(earlier)
    return number


def in_sync(workers: Coordinator, num_workers: int, step: Version) -> None:
    """All push their parts, and wait for rows and dense parameters of the next step."""
    waiting: list[Future[None]] = []
    for worker in range(num_workers):
        entered = workers.pushes.enter_part(Gradients(), push_id(worker, step, pulled=step), step)
        waiting += [workers.pushes.at_version(step + 1, lambda: None) for _ in range(2)]
    assert entered.complete is not None
    answer_all(workers.pushes.step_applied(entered.complete).answers)
    for answer in waiting:
        answer.result()


def in_async(workers: Coordinator, num_workers: int, step: Version) -> None:
    """All push a batch, to be applied on arrival."""
    for worker in range(num_workers):
        workers.pushes.begin_arrival(push_id(worker, step, pulled=step))
        answer_all(workers.pushes.arrival_applied(push_id(worker, step, pulled=step)))


def in_bounded_staleness(workers: Coordinator, num_workers: int, step: Version) -> None:
    """All finish a step, and wait for the slowest."""
    clock = step + 1
    waiting = [
        workers.rendezvous.advance(worker, clock, at_least=clock) for worker in range(num_workers)
    ]
    for answer in waiting:
        assert answer.result() == clock


def at_a_barrier(workers: Coordinator, num_workers: int, step: Version) -> None:
    """All come to a barrier."""
    waiting = [
        workers.rendezvous.barrier(f"b{step}", worker, step=0, number=step + 1)
        for worker in range(num_workers)
    ]
    for answer in waiting:
        answer.result()


EVENTS = {each.__name__: each for each in (in_sync, in_async, in_bounded_staleness, at_a_barrier)}


def cost(event: str, num_workers: int) -> int:
    """Returns the instructions of an event, after one of its kind."""
    workers = Coordinator(Members(num_workers, 0), wait_limit_s=10.0, inbox_bytes=1000)
    EVENTS[event](workers, num_workers, 0)
    return instructions(lambda: EVENTS[event](workers, num_workers, 1))


@pytest.mark.parametrize("event", EVENTS)
def test_instructions_grow_linearly(event: str) -> None:
    small, middle, large = (cost(event, num_workers) for num_workers in SIZES)

    assert large - middle < 2.2 * (middle - small), (small, middle, large)
