"""When chaos is due and when a run has recovered, without processes."""

import math
import signal

import pytest

from ctr_ps.deploy.chaos.schedule import Progress, Schedule, Send
from ctr_ps.deploy.chaos.sentences import parse

START = 100.0


def schedule_of(text: str) -> Schedule:
    return Schedule(parse(text, num_servers=2, num_workers=2).disturbances, START)


def sent(signals: list[Send]) -> list[tuple[str, signal.Signals]]:
    return [(each.record.process, each.number) for each in signals]


def test_processes_are_killed_at_their_times() -> None:
    schedule = schedule_of("kill server 1 at 5s; kill worker 0 at 2s")

    assert schedule.next_time() == START + 2.0
    assert schedule.time_passed(START + 1.9) == []
    assert sent(schedule.time_passed(START + 2.0)) == [("trainer.0", signal.SIGKILL)]
    assert schedule.next_time() == START + 5.0
    assert sent(schedule.time_passed(START + 9.0)) == [("pserver.1", signal.SIGKILL)]
    assert schedule.next_time() == math.inf
    assert [record.at_s for record in schedule.records] == [2.0, 9.0]


def test_process_is_killed_once_when_all_servers_that_answer_have_the_step() -> None:
    schedule = schedule_of("kill server 1 at step 200")

    assert schedule.next_time() == math.inf
    assert schedule.versions_seen([None, None], START + 1.0) == []
    assert schedule.versions_seen([201, 199], START + 2.0) == []
    assert sent(schedule.versions_seen([203, 201], START + 3.0)) == [("pserver.1", signal.SIGKILL)]
    assert schedule.versions_seen([203, None], START + 4.0) == []
    (record,) = schedule.records
    assert (record.action, record.at_s, record.step) == ("kill", 3.0, 201)


def test_step_0_is_when_a_server_answers() -> None:
    schedule = schedule_of("kill server 0 at step 0")

    assert schedule.versions_seen([None, None], START + 1.0) == []
    assert sent(schedule.versions_seen([None, 0], START + 2.0)) == [("pserver.0", signal.SIGKILL)]


def test_process_that_is_paused_goes_on_after_its_time() -> None:
    schedule = schedule_of("pause worker 0 for 5s at step 10")

    stopped = schedule.versions_seen([10, 12], START + 1.0)

    assert sent(stopped) == [("trainer.0", signal.SIGSTOP)]
    assert schedule.next_time() == START + 6.0
    assert sent(schedule.time_passed(START + 6.0)) == [("trainer.0", signal.SIGCONT)]
    assert schedule.next_time() == math.inf
    (record,) = schedule.records
    assert (record.action, record.pause_s, record.step) == ("pause", 5.0, 10)


def test_run_has_recovered_when_every_server_applies_steps_again() -> None:
    schedule = schedule_of("kill server 1 at step 200")
    schedule.versions_seen([200, 200], START + 10.0)

    for time, versions in enumerate([[200, None], [201, None], [201, 150], [205, 151]], start=11):
        schedule.versions_seen(versions, START + time)
        assert schedule.records[0].recovered_s is None
    schedule.versions_seen([205, 152], START + 15.0)
    schedule.versions_seen([300, 300], START + 99.0)

    assert schedule.records[0].recovered_s == 5.0


def test_recoveries_are_measured_for_each_by_itself() -> None:
    schedule = schedule_of("kill server 0 at 1s; kill server 1 at 3s")
    schedule.time_passed(START + 1.0)
    schedule.versions_seen([0, 0], START + 1.5)
    schedule.versions_seen([2, 2], START + 2.0)
    schedule.time_passed(START + 3.0)
    schedule.versions_seen([2, 2], START + 3.5)
    schedule.versions_seen([4, 4], START + 4.0)

    assert [record.recovered_s for record in schedule.records] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["kill", "pause"])
def test_process_that_does_not_run_is_noted_and_nothing_is_waited_for(kind: str) -> None:
    text = "kill worker 1 at 1s" if kind == "kill" else "pause worker 1 for 5s at 1s"
    schedule = schedule_of(text)
    (send,) = schedule.time_passed(START + 1.0)

    schedule.missed(send)
    schedule.versions_seen([1, 1], START + 2.0)
    schedule.versions_seen([9, 9], START + 3.0)

    assert not schedule.records[0].is_done
    assert schedule.records[0].recovered_s is None
    assert schedule.next_time() == math.inf


def test_paused_process_that_ended_before_it_went_on_was_paused_all_the_same() -> None:
    schedule = schedule_of("pause worker 1 for 5s at 1s")
    schedule.time_passed(START + 1.0)
    (go_on,) = schedule.time_passed(START + 6.0)

    schedule.missed(go_on)

    assert schedule.records[0].is_done


def test_what_was_never_due_is_known() -> None:
    schedule = schedule_of("kill server 0 at step 5; kill server 1 at step 500")
    schedule.versions_seen([7, 7], START + 1.0)

    assert [each.step for each in schedule.waiting] == [500]


def test_one_step_is_no_progress_as_it_may_have_been_on_its_way() -> None:
    progress = Progress()

    assert [progress.look([version]) for version in (5, 6, 6, 7)] == [False, False, False, True]


def test_version_that_goes_back_counts_from_there() -> None:
    progress = Progress()

    assert [progress.look([version]) for version in (9, 0, 1, 2)] == [False, False, False, True]
