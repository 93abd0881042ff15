"""Workers of a job, present until they leave."""

import pytest

from protos.errors import ProtocolError
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
