"""Which synchronous steps are complete, and in what order their parts are added."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.role import Members
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.steps import CompleteStep, StepAggregator
from tests.support.stores import push_id

NOTHING = np.empty(0, np.float32)


@given(
    num_steps=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_interleaving_completes_the_same_steps(
    num_steps: list[int], data: st.DataObject
) -> None:
    """Each worker adds its steps and leaves at their number; the order among workers is free."""
    steps = StepAggregator(Membership(Members(len(num_steps))))
    next_step = dict.fromkeys(range(len(num_steps)), 0)
    complete = []
    while next_step:
        may_resume = sorted(
            worker for worker, step in next_step.items() if step <= steps.version + 1
        )
        worker = data.draw(st.sampled_from(may_resume))
        step = next_step[worker]
        if step < num_steps[worker]:
            add(steps, worker, step)
            next_step[worker] += 1
        else:
            steps.leave(worker, step)
            del next_step[worker]
        complete += take_all(steps)

    assert complete == [
        [(worker, step) for worker, number in enumerate(num_steps) if step < number]
        for step in range(max(num_steps))
    ]
    assert steps.version == max(num_steps)


def test_behind_names_exactly_the_workers_that_are_missing() -> None:
    steps = StepAggregator(Membership(Members(4)))
    add(steps, 1, 0)
    steps.leave(2, 0)
    steps.leave(3, 1)

    assert steps.behind(0) == [0, 3]
    assert steps.behind(1) == [0, 1]


def test_worker_that_rejoins_goes_on_at_the_version() -> None:
    steps = StepAggregator(Membership(Members(2)))
    steps.leave(1, 0)
    for step in range(3):
        add(steps, 0, step)
        take_all(steps)
    steps.rejoin(1)

    add(steps, 0, 3)
    assert take_all(steps) == []
    add(steps, 1, 3)
    assert take_all(steps) == [[(0, 3), (1, 3)]]


@pytest.mark.parametrize(
    ("worker", "step", "message"),
    [
        (0, 0, "worker 0 pushed step 0, expected 2, at version 1"),
        (0, 1, "worker 0 pushed step 1, expected 2, at version 1"),
        (0, 3, "pushes of worker 0 are lost: it pushed step 3, expected 2, at version 1"),
        (1, 2, "pushes of worker 1 are lost: it pushed step 2, expected 1, at version 1"),
        (2, 1, "worker 2 pushed step 1 after it had left synchronous training"),
        (3, 1, "worker 3 called, but this job has 3 workers"),
        (-1, 1, "worker -1 called, but this job has 3 workers"),
    ],
)
def test_part_out_of_turn_is_refused_and_changes_nothing(
    worker: int, step: int, message: str
) -> None:
    """Version 1; worker 0 is a step ahead, worker 1 is behind, worker 2 has left."""
    steps = StepAggregator(Membership(Members(3)))
    steps.leave(2, 0)
    for known, number in ((0, 0), (1, 0), (0, 1)):
        add(steps, known, number)
        take_all(steps)
    missing = [steps.behind(number) for number in range(5)]

    with pytest.raises(ProtocolError, match=message):
        add(steps, worker, step)

    assert steps.version == 1
    assert [steps.behind(number) for number in range(5)] == missing
    add(steps, 1, 1)
    assert take_all(steps) == [[(0, 1), (1, 1)]]


def test_arrival_moves_the_version_and_everyone_s_next_step() -> None:
    steps = StepAggregator(Membership(Members(2)))

    steps.begin_arrival(1)
    assert steps.version == 0
    steps.end_arrival(3)

    assert steps.version == 3
    for worker in (0, 1):
        add(steps, worker, 3)
    assert take_all(steps) == [[(0, 3), (1, 3)]]


def test_worker_that_waits_while_others_push_on_arrival_goes_on_at_the_version() -> None:
    steps = StepAggregator(Membership(Members(2)))
    steps.leave(1, 0)
    steps.begin_arrival(0)
    steps.end_arrival(5)
    steps.leave(0, 5)

    for worker in (0, 1):
        steps.rejoin(worker)
        add(steps, worker, 5)

    assert take_all(steps) == [[(0, 5), (1, 5)]]


def test_part_of_a_step_is_refused_while_a_push_is_applied_on_arrival() -> None:
    steps = StepAggregator(Membership(Members(2)))
    steps.begin_arrival(0)

    with pytest.raises(ProtocolError, match="worker 1 pushed synchronous step 0 during"):
        add(steps, 1, 0)

    steps.end_arrival(1)
    assert steps.behind(1) == [0, 1]


def test_arrival_of_a_stranger_is_refused() -> None:
    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        StepAggregator(Membership(Members(2))).begin_arrival(2)


def test_a_heter_trainers_gradient_is_over_the_examples_that_it_says() -> None:
    """One of its CPU trainers is lost, with the part of the step that would have counted three of them."""
    keys = np.array([1], np.uint64)
    sparse = SparseGrad(keys, np.ones((1, 1), np.float32), 4)
    of_worker = Gradients(sparse={"table": sparse})
    of_heter = Gradients(dense={"dense": DenseGrad(np.ones(2, np.float32), 7)})

    step = CompleteStep(0, [of_worker, of_heter], [push_id(0, 0, 4), push_id(2, 0, 0)])

    assert step.sum().sparse["table"].examples == 4
    assert step.sum().dense["dense"].examples == 7


def part(worker: int, step: int) -> Gradients:
    return Gradients(dense={f"{worker} {step}": DenseGrad(NOTHING, 1)})


def add(steps: StepAggregator, worker: int, step: int) -> None:
    steps.add(push_id(worker, 0), step, part(worker, step))


def take_all(steps: StepAggregator) -> list[list[tuple[int, int]]]:
    """Takes the complete steps as if they were applied; returns the worker and step of each part."""
    complete = []
    while (taken := steps.take_complete_step()) is not None:
        assert taken.step == steps.version
        names = [name.split() for gradients in taken.parts for name in gradients.dense]
        complete.append([(int(worker), int(step)) for worker, step in names])
        assert [each.worker for each in taken.push_ids] == [worker for worker, _ in complete[-1]]
        steps.step_applied(1)
    return complete


def test_one_step_at_a_time_is_taken_and_the_version_moves_on_when_it_is_applied() -> None:
    steps = StepAggregator(Membership(Members(1)))
    for step in range(2):
        add(steps, 0, step)
    first = steps.take_complete_step()

    assert steps.take_complete_step() is None
    assert (steps.version, steps.num_complete) == (0, 2)
    steps.step_applied(1)
    second = steps.take_complete_step()

    assert first is not None
    assert second is not None
    assert (first.step, second.step, steps.version) == (0, 1, 1)


def test_parts_of_the_next_steps_are_taken_while_one_is_applied() -> None:
    """A worker may be one step ahead of those that are complete, applied or not."""
    steps = StepAggregator(Membership(Members(2)))
    for worker in range(2):
        add(steps, worker, 0)
    steps.take_complete_step()
    for worker in range(2):
        add(steps, worker, 1)
    for step in (2, 3):
        add(steps, 0, step)

    with pytest.raises(ProtocolError, match="worker 0 pushed step 4, expected 4, at version 0"):
        add(steps, 0, 4)
    with pytest.raises(
        ProtocolError,
        match=r"asynchronously, but other workers pushed synchronous steps \[0, 1, 2, 3",
    ):
        steps.begin_arrival(0)


def test_sum_of_a_step_is_over_the_examples_of_all_its_workers() -> None:
    ones, nothing = DenseGrad(np.ones(2, np.float32), 8), Gradients()
    steps = StepAggregator(Membership(Members(2)))
    steps.add(push_id(0, 0, 8), 0, Gradients(dense={"block": ones}))
    steps.add(push_id(1, 0, 24), 0, nothing)
    step = steps.take_complete_step()

    assert step is not None
    assert step.num_values == 2
    assert step.sum().dense["block"].examples == 32
