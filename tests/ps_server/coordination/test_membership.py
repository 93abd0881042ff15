"""Workers of a job, present until they leave."""

import pytest

from ctr_ps.protos.errors import JobError, ProtocolError
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import Lease, Member, WorkerLoss
from ctr_ps.ps_server.coordination.membership import Membership


def test_workers_are_present_until_they_leave() -> None:
    members = Membership(Members(3))
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


def test_place_of_a_worker_that_has_left_is_not_taken_again() -> None:
    members = Membership(Members(2))
    members.join(Member(1, 5), {}, None)
    members.leave(1)

    with pytest.raises(ProtocolError, match="another process"):
        members.join(Member(1, 6), {}, None)


def test_processes_agree_on_their_terms() -> None:
    members = Membership(Members(3))
    members.join(Member(0, 5), {"mode": "sync"}, None)
    members.join(Member(1, 6), {"mode": "sync", "epochs": "2"}, None)

    with pytest.raises(JobError, match=r"epochs = 3 \(worker 1 has epochs = 2\). Give all"):
        members.join(Member(2, 7), {"mode": "sync", "epochs": "3"}, None)
    with pytest.raises(JobError, match=r"mode = nothing \(worker 0 has mode = sync\)"):
        members.join(Member(2, 7), {"mode": ""}, None)

    members.join(Member(2, 7), {"epochs": "2"}, None)


def test_of_terms_of_several_lines_the_first_that_differs_is_told() -> None:
    members = Membership(Members(2))
    members.join(Member(0, 5), {"data.train": "3 files\na 1\nb 1\nc 1"}, None)

    with pytest.raises(JobError) as refused:
        members.join(Member(1, 6), {"data.train": "2 files\na 1\nc 1"}, None)

    assert str(refused.value).startswith(
        "worker 1 has other settings than the rest of the job: data.train = 2 files with c 1 (worker 0 has "
        "data.train = 3 files with b 1). Give"
    )


def test_all_that_processes_disagree_on_is_told() -> None:
    members = Membership(Members(2))
    members.join(Member(0, 5), {"train.seed": "0", "epochs": "2", "shuffle": "none"}, None)

    with pytest.raises(JobError) as refused:
        members.join(Member(1, 6), {"train.seed": "3", "epochs": "2", "shuffle": "local"}, None)

    assert str(refused.value) == (
        "worker 1 has other settings than the rest of the job: "
        "train.seed = 3 (worker 0 has train.seed = 0); "
        "shuffle = local (worker 0 has shuffle = none). Give all processes the same job file or "
        "script, --set options and environment"
    )


def test_of_many_disagreements_the_first_are_told() -> None:
    members = Membership(Members(2))
    terms = {f"term-{number}": "a" * 1000 for number in range(100)}
    members.join(Member(0, 5), terms, None)

    with pytest.raises(
        JobError, match=r"term-4 = b+\.\.\. \(worker 0 has .*; and 95 more\. Give all"
    ) as refused:
        members.join(Member(1, 6), dict.fromkeys(terms, "b" * 1000), None)

    assert len(str(refused.value)) < 2000


def test_members_of_formats_two_apart_are_not_in_one_job() -> None:
    """They exchange messages of their own, by way of a server that works with both."""
    members = Membership(Members(3))
    members.join(Member(0, 5), {}, None, format=FORMAT)
    members.join(Member(1, 6), {}, None, format=FORMAT + 1)
    before = members.state()

    told = f"worker 2 has format {FORMAT + 2} .* but worker 0 has format {FORMAT}, "
    with pytest.raises(ProtocolError, match=told):
        members.join(Member(2, 7), {"mode": "sync"}, None, format=FORMAT + 2)

    assert members.state() == before
    again = Membership(Members(3))
    again.restore(before)
    assert again.formats == {0: FORMAT, 1: FORMAT + 1}
    again.leave(0)
    again.join(Member(2, 7), {}, None, format=FORMAT + 2)
    assert again.formats == {1: FORMAT + 1, 2: FORMAT + 2}


def test_processes_agree_with_the_server_on_how_many_of_them_are_heter_trainers() -> None:
    members = Membership(Members(2, 1))
    members.join(Member(2, 7), Members(2, 1).terms, None)

    told = r"heter trainers = 0 \(the server has heter trainers = 1\)"
    with pytest.raises(JobError, match=rf"worker 0 has .* PADDLE_TRAINERS_NUM = 3 .*{told}"):
        members.join(Member(0, 8), Members(3).terms, None)


def test_second_process_in_a_heter_trainer_s_place_is_told_by_what_it_is_one() -> None:
    members = Membership(Members(2, 1))
    members.join(Member(2, 7), {}, None)

    with pytest.raises(
        ProtocolError,
        match=r"^another process joined as heter trainer 0 before.* two processes have the POD_IP and "
        r"PADDLE_PORT of heter trainer 0",
    ):
        members.join(Member(2, 8), {}, None)


def test_stranger_has_no_say_in_the_terms_of_a_job_that_runs() -> None:
    members = Membership(Members(1))
    members.join(Member(0, 5), {"mode": "sync"}, None)

    for worker in (0, 1):
        with pytest.raises(ProtocolError):
            members.join(Member(worker, 7), {"mode": "geo"}, None)


WAIT = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)


def job_that_waits() -> Membership:
    members = Membership(Members(2))
    members.join(Member(0, 5), {}, WAIT)
    members.join(Member(1, 6), {}, WAIT)
    return members


def test_silent_worker_is_lost_after_its_lease() -> None:
    members = job_that_waits()

    assert members.pass_time(2.0) == []
    members.hear_of(Member(1, 6))
    assert members.pass_time(2.0) == [0]
    members.lost.add(0)
    assert members.pass_time(0.5) == [], "said once"
    assert members.lost == {0}
    assert members.silent_s == {0: 4.5, 1: 2.5}
    members.leave(1)
    assert members.silent_s == {0: 4.5}


def test_lost_worker_that_calls_is_back() -> None:
    members = job_that_waits()
    members.lost.add(0)
    members.lost.add(1)

    members.hear_of(Member(0, 5))

    assert members.lost == {1}
    assert members.pass_time(1.0) == []
    assert members.pass_time(2.0) == [0], "lost once more"


def test_worker_that_is_back_and_ends_its_lease_gives_its_place_to_who_waits() -> None:
    members = job_that_waits()
    members.lost.add(0)
    members.hear_of(Member(0, 5))
    members.join(Member(0, 50), {}, WAIT, only_asks=True)

    members.end_lease(0)

    assert members.pass_time(0.25) == [0]
    members.lost.add(0)
    assert members.may_join(Member(0, 50))


def test_worker_that_is_back_and_leaves_may_call_after_a_restart() -> None:
    """The answer to its departure was lost, so it leaves once more."""
    members = job_that_waits()
    members.lost.add(0)
    members.hear_of(Member(0, 5))
    members.leave(0)

    after = Membership(Members(2))
    after.restore(members.state())

    after.require_place(Member(0, 5))


def test_worker_that_has_left_is_never_lost() -> None:
    members = job_that_waits()
    members.leave(0)

    assert members.pass_time(100.0) == [1]


def test_process_without_a_lease_has_none_to_end() -> None:
    members = Membership(Members(1))
    members.join(Member(0, 5), {}, None)

    members.end_lease(0)

    assert members.pass_time(100.0) == []


def test_process_with_other_terms_takes_no_place() -> None:
    members = Membership(Members(1))
    members.join(Member(0, 5), {"mode": "sync"}, WAIT)
    members.lost.add(0)

    with pytest.raises(JobError, match=r"worker 0 has .* mode = geo"):
        members.join(Member(0, 50), {"mode": "geo"}, WAIT)

    members.hear_of(Member(0, 5))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_lease_is_refused(seconds: float) -> None:
    members = Membership(Members(1))

    with pytest.raises(ProtocolError, match="has a lease of"):
        members.join(Member(0, 5), {}, Lease(seconds=seconds, on_worker_loss=WorkerLoss.FAIL))

    assert 0 not in members.state().incarnations


def test_terms_of_a_process_that_joins_again_bind_the_others() -> None:
    members = Membership(Members(2))
    members.join(Member(0, 5), {"mode": "sync"}, None)
    assert not members.join(Member(0, 5), {"data": "1 file"}, None)

    with pytest.raises(JobError, match=r"data = 2 files \(worker 0 has data = 1 file\)"):
        members.join(Member(1, 6), {"mode": "sync", "data": "2 files"}, None)
    members.join(Member(1, 6), {"mode": "sync", "data": "1 file"}, None)
    with pytest.raises(JobError, match=r"mode = geo \(worker 0 has mode = sync\)"):
        members.join(Member(1, 6), {"mode": "geo"}, None)


def test_an_elastic_job_has_places_that_are_taken_and_left_while_it_runs() -> None:
    members = Membership(Members(3, num_at_start=2))
    assert members.present == [0, 1]
    for worker in (0, 1):
        members.join(Member(worker, 5), {"mode": "async"}, None)
    assert members.all_joined

    with pytest.raises(JobError, match="mode = sync"):  # and the job goes on
        members.join(Member(2, 5), {"mode": "sync"}, None)
    assert members.present == [0, 1]
    members.join(Member(2, 5), {"mode": "async"}, None)
    assert members.present == [0, 1, 2]
    with pytest.raises(ProtocolError, match="which is alive"):
        members.join(Member(1, 6), {"mode": "async"}, None)
    members.leave(1)
    assert members.join(Member(1, 6), {"mode": "async"}, None)
    assert members.present == [0, 1, 2]


def test_process_that_comes_when_all_have_left_holds_an_elastic_job_not_up() -> None:
    members = Membership(Members(2, num_at_start=1))
    members.join(Member(0, 5), {}, None)
    members.leave(0)

    members.join(Member(1, 5), {}, None)

    assert members.all_left
