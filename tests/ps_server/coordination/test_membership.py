"""Workers of a job, present until they leave."""

import pytest

from protos.errors import JobError, ProtocolError
from ps_server.coordination.membership import Membership


def test_workers_are_present_until_they_leave() -> None:
    members = Membership(3)
    assert members.present == [0, 1, 2]

    members.leave(1)
    members.leave(1)  # sent again

    assert members.present == [0, 2]
    assert members.left == {1}
    assert [members.is_present(worker) for worker in (-1, 0, 1, 2, 3)] == [0, 1, 0, 1, 0]
    members.require(1)
    assert not members.all_left
    for worker in (0, 2):
        members.leave(worker)
    assert members.all_left


@pytest.mark.parametrize("worker", [3, -1])
def test_worker_that_the_job_does_not_have_is_refused(worker: int) -> None:
    members = Membership(3)

    for call in (members.require, members.leave):
        with pytest.raises(ProtocolError, match=f"worker {worker} called, but this job has 3"):
            call(worker)

    assert members.present == [0, 1, 2]


def test_place_is_taken_by_one_process() -> None:
    members = Membership(2)
    members.join(1, 5, {})
    members.join(1, 5, {})  # sent again

    with pytest.raises(ProtocolError, match="another process, which joined before"):
        members.join(1, 6, {})

    members.require_joined(1)
    with pytest.raises(ProtocolError, match="worker 0 has not joined this job"):
        members.require_joined(0)


def test_place_of_a_worker_that_has_left_is_not_taken_again() -> None:
    members = Membership(2)
    members.join(1, 5, {})
    members.leave(1)

    with pytest.raises(ProtocolError, match="another process"):
        members.join(1, 6, {})


def test_processes_agree_on_their_terms() -> None:
    members = Membership(3)
    members.join(0, 5, {"mode": "sync"})
    members.join(1, 6, {"mode": "sync", "epochs": "2"})

    with pytest.raises(JobError, match="worker 2 has epochs = 3, worker 1 2: give all"):
        members.join(2, 7, {"mode": "sync", "epochs": "3"})
    with pytest.raises(JobError, match="worker 2 has mode = nothing, worker 0 sync"):
        members.join(2, 7, {"mode": ""})

    members.join(2, 7, {"epochs": "2"})


def test_processes_agree_with_the_server_on_how_many_they_are() -> None:
    members = Membership(2)

    with pytest.raises(JobError, match="worker 2 has PADDLE_TRAINERS_NUM = 3, the server 2"):
        members.join(2, 7, {"PADDLE_TRAINERS_NUM": "3"})


def test_stranger_has_no_say_in_the_terms_of_a_job_that_runs() -> None:
    members = Membership(1)
    members.join(0, 5, {"mode": "sync"})

    for worker in (0, 1):
        with pytest.raises(ProtocolError):
            members.join(worker, 7, {"mode": "geo"})
