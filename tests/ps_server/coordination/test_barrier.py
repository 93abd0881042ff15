"""Who has come to a barrier, who is missing, when all may go on."""

import pytest

from protos.errors import ProtocolError
from ps_server.coordination.barrier import Barriers
from ps_server.coordination.membership import Membership


def test_barrier_is_released_when_all_members_have_come() -> None:
    barriers = barriers_of(3)
    for worker in (2, 0):
        barriers.arrive("pass", worker)
        assert barriers.take_released() == {}
    assert barriers.missing("pass") == [1]

    barriers.arrive("pass", 1)

    assert barriers.take_released() == {"pass": [0, 1, 2]}


def test_released_barrier_is_forgotten() -> None:
    barriers = come_all(2)
    assert barriers.take_released() == {"pass": [0, 1]}

    assert barriers.take_released() == {}
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {}
    assert barriers.missing("pass") == [1]


def test_barriers_of_different_names_do_not_mix() -> None:
    barriers = barriers_of(2)
    barriers.arrive("start", 0)
    barriers.arrive("end", 1)

    assert barriers.take_released() == {}
    barriers.arrive("start", 1)
    assert barriers.take_released() == {"start": [0, 1]}
    assert barriers.missing("end") == [0]


def test_worker_that_is_done_is_not_waited_for() -> None:
    barriers = barriers_of(3)
    leave(barriers, 1)
    barriers.arrive("pass", 0)
    assert barriers.missing("pass") == [2]

    barriers.arrive("pass", 2)

    assert barriers.take_released() == {"pass": [0, 2]}


def test_last_one_missing_releases_the_barrier_by_leaving() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 0)
    leave(barriers, 1)

    assert barriers.take_released() == {"pass": [0]}


def test_worker_that_leaves_while_it_waits_is_not_released() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 1)
    leave(barriers, 1)
    assert barriers.take_released() == {}

    barriers.arrive("pass", 0)

    assert barriers.take_released() == {"pass": [0]}


def test_nobody_waits_once_all_are_done() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 0)
    leave(barriers, 0)
    leave(barriers, 1)

    assert barriers.take_released() == {}


def test_who_gives_up_is_told_who_is_missing_and_counts_as_not_come() -> None:
    barriers = barriers_of(4)
    barriers.arrive("pass", 0)
    barriers.arrive("pass", 2)

    barriers.give_up("pass", 0)

    barriers.arrive("pass", 1)
    barriers.arrive("pass", 3)
    assert barriers.take_released() == {}
    assert barriers.missing("pass") == [0]
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {"pass": [0, 1, 2, 3]}


def test_coming_again_is_the_same_as_waiting_on() -> None:
    barriers = barriers_of(2)
    barriers.arrive("pass", 0)
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {}
    assert barriers.missing("pass") == [1]

    barriers.arrive("pass", 1)

    assert barriers.take_released() == {"pass": [0, 1]}


@pytest.mark.parametrize("worker", [1, 2, -1])
def test_who_is_done_or_unknown_is_refused_and_changes_nothing(worker: int) -> None:
    barriers = barriers_of(2)
    leave(barriers, 1)

    with pytest.raises(ProtocolError, match=rf"worker {worker} came to barrier 'pass'.*\[0\]"):
        barriers.arrive("pass", worker)

    assert barriers.missing("pass") == [0]
    barriers.arrive("pass", 0)
    assert barriers.take_released() == {"pass": [0]}


def test_workers_that_wait_for_each_other_at_different_barriers_are_stuck() -> None:
    barriers = barriers_of(3)
    barriers.arrive("pass", 0)
    barriers.arrive("loss", 1)
    assert barriers.take_stuck() == {}  # worker 2 may come to either

    leave(barriers, 2)

    assert barriers.take_released() == {}
    assert barriers.take_stuck() == {"pass": [0], "loss": [1]}
    assert barriers.take_stuck() == {}


def test_nobody_who_waits_is_not_stuck() -> None:
    assert barriers_of(1).take_stuck() == {}


def barriers_of(num_workers: int) -> Barriers:
    return Barriers(Membership(num_workers))


def leave(barriers: Barriers, worker: int) -> None:
    barriers._members.leave(worker)
    barriers.leave(worker)


def come_all(num_workers: int) -> Barriers:
    barriers = barriers_of(num_workers)
    for worker in range(num_workers):
        barriers.arrive("pass", worker)
    return barriers
