"""Rules of the launcher, without processes: events and times in, decisions out."""

import math
import signal

import pytest

from ctr_ps.deploy.supervisor import (
    FUTILE_SECONDS,
    MAX_FUTILE_RESTARTS,
    Decision,
    End,
    Exited,
    Policy,
    Restart,
    RestartAll,
    Supervisor,
    Warn,
)
from ctr_ps.protos.errors import AbortedError, NoMemoryError, ProtocolError, TransportError

SERVERS, WORKERS = ["pserver.0", "pserver.1"], ["trainer.0", "trainer.1"]
KILLED, CRASHED, TERMINATED = -signal.SIGKILL, -signal.SIGSEGV, 143


def supervisor(**policy: object) -> Supervisor:
    return Supervisor(SERVERS, WORKERS, Policy(**policy))


def exits(rules: Supervisor, *names: str, code: int = 0, now: float = 0.0) -> Decision | None:
    """Lets processes exit; all but the last without consequence."""
    for name in names[:-1]:
        assert rules.handle(Exited(name, code), now) is None
    return rules.handle(Exited(names[-1], code), now)


@pytest.mark.parametrize("order", [[*WORKERS, *SERVERS], ["trainer.1", *SERVERS, "trainer.0"]])
def test_a_run_ends_when_all_have_exited(order: list[str]) -> None:
    assert exits(supervisor(), *order) == End(0)


def test_a_spare_is_started_again_and_waited_for_by_nobody() -> None:
    rules = Supervisor(SERVERS, WORKERS, Policy(max_restarts=1, durability="log"), ["spare.0"])

    restart = rules.handle(Exited("spare.0", KILLED), 0.0)

    assert isinstance(restart, Restart)
    assert restart.name == "spare.0"
    assert exits(rules, *WORKERS, *SERVERS) == End(0)


@pytest.mark.parametrize("code", [1, KILLED])
def test_a_spare_that_is_not_started_again_leaves_the_others_alone(code: int) -> None:
    rules = Supervisor(SERVERS, WORKERS, Policy(), ["spare.0"])

    warning = rules.handle(Exited("spare.0", code), 0.0)

    assert isinstance(warning, Warn)
    assert "spare.0" in warning.text
    assert exits(rules, *WORKERS, *SERVERS) == End(0)


@pytest.mark.parametrize("code", [KILLED, NoMemoryError.exit_code])
def test_a_job_is_started_again_for_a_spare_only_if_workers_miss_it(code: int) -> None:
    """Nobody misses one that was never added."""
    rules = Supervisor(SERVERS, WORKERS, Policy(max_restarts=1, cause_seconds=5.0), ["spare.0"])

    assert isinstance(rules.handle(Exited("spare.0", code), 0.0), Warn)

    assert rules.restarts == 0
    assert exits(rules, "trainer.1", code=AbortedError.exit_code, now=90.0) is None
    assert exits(rules, "trainer.0", code=TransportError.exit_code, now=91.0) is None
    again = rules.handle(None, 96.0)
    assert isinstance(again, RestartAll)
    assert again.reason.startswith("spare.0 ")
    rules.started()
    assert exits(rules, *WORKERS, *SERVERS) == End(0)


def test_a_server_that_dies_after_a_spare_is_the_one_that_is_told() -> None:
    rules = Supervisor(SERVERS, WORKERS, Policy(max_restarts=1), ["spare.0"])
    rules.handle(Exited("spare.0", KILLED), 0.0)

    assert exits(rules, "trainer.0", code=TransportError.exit_code, now=90.0) is None
    again = RestartAll(1, "pserver.1 was ended by SIGKILL")
    assert exits(rules, "pserver.1", code=KILLED, now=90.5) == again


def test_servers_that_do_not_exit_end_the_run_at_their_limit() -> None:
    rules = supervisor(server_exit_seconds=30.0)
    assert rules.next_time() == math.inf
    exits(rules, *WORKERS, "pserver.1", now=100.0)

    assert rules.next_time() == 130.0
    assert rules.handle(None, 129.9) is None
    assert rules.handle(None, 130.0) == End(1, "pserver.0 did not exit within 30 s")


def test_workers_that_outlive_servers_are_named_once() -> None:
    rules = supervisor(notice_seconds=10.0)
    exits(rules, *SERVERS, now=5.0)

    assert rules.next_time() == 15.0
    notice = rules.handle(None, 15.0)

    assert notice == Warn(
        "pserver.0, pserver.1 exited 10 s ago with code 0, but trainer.0, trainer.1 still run"
    )
    assert rules.next_time() == math.inf


def test_server_that_was_drained_is_no_early_one() -> None:
    """The first one is never drained, and still serves."""
    rules = supervisor(notice_seconds=10.0)
    exits(rules, "pserver.1", now=5.0)
    assert rules.handle(None, 15.0) is None

    exits(rules, "pserver.0", now=50.0)

    notice = rules.handle(None, 60.0)
    assert notice == Warn(
        "pserver.0 exited 10 s ago with code 0, but trainer.0, trainer.1 still run"
    )


def test_server_that_was_drained_explains_no_failure() -> None:
    rules = supervisor()
    exits(rules, "pserver.1")

    assert exits(rules, "trainer.0", code=1) == End(1, "trainer.0 exited with code 1", "trainer.0")


def test_no_worker_is_said_to_run_when_all_have_exited() -> None:
    rules = supervisor(notice_seconds=10.0, server_exit_seconds=30.0)
    exits(rules, "pserver.1", now=5.0)

    exits(rules, *WORKERS, now=6.0)

    assert rules.next_time() == 36.0


@pytest.mark.parametrize("has_one_exited", [False, True])
def test_script_whose_workers_all_outlive_servers_is_asked_whether_these_served(
    has_one_exited: bool,
) -> None:
    rules = supervisor(is_script=True, notice_seconds=10.0)
    if has_one_exited:
        exits(rules, "trainer.1")
    exits(rules, *SERVERS)

    notice = rules.handle(None, 10.0)

    assert ("do the servers serve?" in notice.text) == (not has_one_exited)


def test_a_port_lost_by_a_server_that_is_started_again_is_a_failure() -> None:
    """All others know it by its port, and have trained with it."""
    rules = supervisor(max_restarts=2, durability="log")
    exits(rules, "pserver.1", code=KILLED)

    assert exits(rules, "pserver.1", code=3) == End(3, "pserver.1 exited with code 3", "pserver.1")


def test_the_failure_behind_an_aborted_worker_is_waited_for() -> None:
    rules = supervisor(cause_seconds=5.0)

    assert exits(rules, "trainer.0", code=12, now=1.0) is None
    assert rules.next_time() == 6.0
    assert exits(rules, "trainer.1", code=6, now=2.0) == End(
        6, "trainer.1 exited with code 6", "trainer.1"
    )


@pytest.mark.parametrize("is_last", [True, False], ids=["nobody-is-left", "time-is-up"])
def test_an_aborted_worker_is_the_failure_if_no_other_is_seen(is_last: bool) -> None:
    rules = supervisor(cause_seconds=5.0)
    assert exits(rules, "trainer.0", code=12, now=1.0) is None
    exits(rules, "trainer.1", code=12, now=2.0)

    assert rules.next_time() == 7.0
    end = exits(rules, *SERVERS, now=3.0) if is_last else rules.handle(None, 7.0)

    assert end == End(12, "trainer.0 exited with code 12", "trainer.0")


@pytest.mark.parametrize("code", [KILLED, CRASHED, TERMINATED, 137, 16])
def test_with_logs_a_killed_process_is_started_again_alone(code: int) -> None:
    rules = supervisor(max_restarts=2, durability="log")

    decision = exits(rules, "pserver.1", code=code)

    assert isinstance(decision, Restart)
    assert (decision.name, decision.number) == ("pserver.1", 1)
    assert exits(rules, *WORKERS, *SERVERS) == End(0)


@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        ({"max_restarts": 2, "durability": "log"}, [1, 2, 6, 9, 255]),
        ({"max_restarts": 2, "durability": "checkpoint"}, [1, 2, 6, 9, 255]),
        ({"continues": True}, [1, 2, 4, 6]),
        ({}, [4]),  # it lost a server, which nobody starts again
    ],
)
def test_an_error_of_its_own_ends_the_run(policy: dict[str, object], codes: list[int]) -> None:
    for code in codes:
        end = exits(supervisor(**policy), "trainer.1", code=code)

        assert end == End(code, f"trainer.1 exited with code {code}", "trainer.1")


def test_with_checkpoints_a_killed_process_starts_the_job_again() -> None:
    rules = supervisor(max_restarts=2)
    exits(rules, "trainer.0")

    decision = exits(rules, "pserver.1", code=KILLED)
    rules.started()

    assert decision == RestartAll(1, "pserver.1 was ended by SIGKILL")
    assert exits(rules, *WORKERS, *SERVERS) == End(0)


@pytest.mark.parametrize("continues", [False, True])  # a server is no lost worker
def test_without_restarts_a_killed_process_ends_the_run(continues: bool) -> None:
    assert exits(supervisor(continues=continues), "pserver.1", code=KILLED) == End(
        137, "pserver.1 was ended by SIGKILL", "pserver.1"
    )


@pytest.mark.parametrize("durability", ["log", "checkpoint"])
def test_after_the_last_restart_a_killed_process_ends_the_run(durability: str) -> None:
    rules = supervisor(max_restarts=2, durability=durability)
    for time in (0.0, 100.0):
        exits(rules, "pserver.0", code=KILLED, now=time)
        if durability == "checkpoint":
            rules.started()

    end = exits(rules, "trainer.0", code=KILLED, now=200.0)

    assert (end.code, end.failed) == (137, "trainer.0")
    assert "had its 2 restarts" in end.reason


def test_a_process_that_is_refused_in_place_of_a_killed_one_is_started_again() -> None:
    """Servers may have heard a message of that one later, which was on its way for long."""
    refused = ProtocolError.exit_code
    rules = supervisor(max_restarts=9, durability="log", lease_seconds=30.0)
    exits(rules, "trainer.1", code=KILLED, now=100.0)

    again = exits(rules, "trainer.1", code=refused, now=101.0)

    assert again == Restart("trainer.1", 2, "trainer.1 exited with code 10")
    end = exits(rules, "trainer.1", code=refused, now=141.0)  # later than that: by one that lives
    assert end == End(10, "trainer.1 exited with code 10", "trainer.1")


def test_many_restarts_in_a_short_time_end_the_run() -> None:
    rules = supervisor(max_restarts=99, durability="log")
    times = [index * 0.9 * FUTILE_SECONDS / MAX_FUTILE_RESTARTS for index in range(4)]
    for time in times[:3]:
        assert isinstance(exits(rules, "pserver.0", code=KILLED, now=time), Restart)

    end = exits(rules, "pserver.0", code=KILLED, now=times[3])

    assert end.code == 137
    assert "pserver.0 was restarted 3 times within 10 s" in end.reason


def test_the_job_is_not_started_again_that_often_either() -> None:
    rules = supervisor(max_restarts=99)
    for name in ("pserver.0", "trainer.0", "pserver.1"):
        assert isinstance(exits(rules, name, code=KILLED), RestartAll)
        rules.started()

    end = exits(rules, "trainer.1", code=KILLED)

    assert "the job was restarted 3 times" in end.reason


def test_rare_restarts_are_not_futile() -> None:
    rules = supervisor(max_restarts=99, durability="log")
    apart = FUTILE_SECONDS / MAX_FUTILE_RESTARTS + 0.1

    for index in range(8):
        assert isinstance(exits(rules, "pserver.0", code=KILLED, now=index * apart), Restart)


def test_restarts_of_several_processes_are_not_futile() -> None:
    rules = supervisor(max_restarts=99, durability="log")

    for name in SERVERS * MAX_FUTILE_RESTARTS:
        assert isinstance(exits(rules, name, code=KILLED), Restart)


def test_a_worker_that_lost_a_server_may_exit_before_the_server() -> None:
    rules = supervisor(max_restarts=1)

    assert exits(rules, "trainer.0", code=4) is None
    assert exits(rules, "pserver.0", code=KILLED) == RestartAll(1, "pserver.0 was ended by SIGKILL")


def test_one_process_is_not_started_again_where_others_have_given_up() -> None:
    rules = supervisor(max_restarts=1, durability="log")
    assert exits(rules, "trainer.0", code=12) is None

    end = exits(rules, "trainer.1", code=TERMINATED)

    assert (end.code, end.failed) == (143, "trainer.1")
    assert "trainer.0 exited with code 12 before" in end.reason


@pytest.mark.parametrize("durability", ["log", "checkpoint"])
def test_a_server_that_is_killed_after_all_workers_have_ended_is_not_started_again(
    durability: str,
) -> None:
    rules = supervisor(max_restarts=1, durability=durability)

    assert exits(rules, *WORKERS) is None
    warning = rules.handle(Exited("pserver.1", KILLED), 0.0)
    end = rules.handle(Exited("pserver.0", KILLED), 0.0)

    assert isinstance(warning, Warn)
    assert "pserver.1" in warning.text
    assert isinstance(end, End)
    assert (end.code, rules.restarts) == (0, 0)


@pytest.mark.parametrize("code", [KILLED, CRASHED, TERMINATED, 137, 10])
@pytest.mark.parametrize("durability", ["log", "checkpoint"])
def test_where_the_job_continues_a_lost_worker_is_left_dead(durability: str, code: int) -> None:
    rules = supervisor(continues=True, max_restarts=9, durability=durability)

    warning = exits(rules, "trainer.1", code=code)

    assert warning.text.startswith("trainer.1 ")
    assert warning.text.endswith(
        ': the others go on without it, as cluster.on_worker_loss is "continue"'
    )
    assert rules.next_time() == math.inf
    assert exits(rules, "trainer.0", *SERVERS) == End(0)
    assert rules.restarts == 0


def test_worker_0_cannot_be_lost_nor_replaced_where_the_job_continues() -> None:
    rules = supervisor(continues=True, max_restarts=9, durability="log")

    end = exits(rules, "trainer.0", code=KILLED)

    assert (end.code, end.failed) == (137, "trainer.0")
    assert "none can take its place" in end.reason


@pytest.mark.parametrize("code", [1, 4, 10])
def test_worker_that_wakes_up_after_the_others_have_ended_does_not_fail_the_run(code: int) -> None:
    rules = supervisor(continues=True)
    exits(rules, "trainer.0", *SERVERS)

    assert exits(rules, "trainer.1", code=code) == End(
        0,
        f"trainer.1 exited with code {code}: "
        'the others have ended without it, as cluster.on_worker_loss is "continue"',
    )


def test_worker_that_fails_after_a_server_was_drained_ends_the_run() -> None:
    rules = supervisor(continues=True)
    exits(rules, "pserver.1")

    end = exits(rules, "trainer.1", code=1)

    assert isinstance(end, End)
    assert end.code == 1


@pytest.mark.parametrize("last", ["pserver.1", "trainer.0"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_worker_that_does_not_wake_up_is_stopped_soon_after_the_others(
    last: str, is_restarted: bool
) -> None:
    """A spare waits meanwhile."""
    policy = Policy(continues=True, notice_seconds=10.0, durability="log", max_restarts=1)
    rules = Supervisor(SERVERS, WORKERS, policy, ["spare.0"])
    if is_restarted:
        assert isinstance(rules.handle(Exited("spare.0", KILLED), 0.0), Restart)
    others = [name for name in ("trainer.0", *SERVERS) if name != last]
    exits(rules, *others, now=0.0)
    exits(rules, last, now=8.0)

    assert rules.next_time() == 18.0
    end = rules.handle(None, 18.0)

    assert end.code == 0
    assert end.reason.startswith("trainer.1 did not exit within 10 s of the others")


def test_servers_have_the_time_of_a_lease_more_to_notice_a_loss() -> None:
    rules = supervisor(continues=True, lease_seconds=60.0, server_exit_seconds=30.0)
    exits(rules, "trainer.0", now=0.0)

    exits(rules, "trainer.1", code=KILLED, now=100.0)

    assert rules.next_time() == 190.0
    assert rules.handle(None, 190.0) == End(1, "pserver.0, pserver.1 did not exit within 90 s")


def test_refused_worker_that_ended_the_others_is_the_failure() -> None:
    rules = supervisor(continues=True)
    assert isinstance(exits(rules, "trainer.1", code=10), Warn)
    exits(rules, "trainer.0", code=12, now=1.0)

    assert exits(rules, *SERVERS, code=12, now=2.0) == End(
        10, "trainer.1 exited with code 10", "trainer.1"
    )


def test_worker_that_dies_while_a_failure_ends_the_job_is_not_told_as_lost() -> None:
    rules = supervisor(continues=True)
    exits(rules, "trainer.0", code=12)

    assert exits(rules, "trainer.1", code=TERMINATED) is None
    assert exits(rules, *SERVERS, code=12) == End(12, "trainer.0 exited with code 12", "trainer.0")


def test_job_that_is_started_again_has_all_its_workers() -> None:
    rules = supervisor(continues=True, max_restarts=1)
    exits(rules, "trainer.1", code=KILLED)

    assert isinstance(exits(rules, "pserver.0", code=KILLED), RestartAll)
    rules.started()

    assert exits(rules, "trainer.0", "trainer.1", *SERVERS) == End(0)
