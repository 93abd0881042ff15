"""Chaos of a launch, with stand-ins for servers, workers and the program that watches versions.

They synchronise through named pipes: opening one waits for the other side. When it is due, when a run has
recovered and what the report says are tested without processes.
"""

import json
import math
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.deploy.chaos import parse
from ctr_ps.deploy.cluster import Cluster, Events, Line
from ctr_ps.deploy.disturber import (
    VERSIONS,
    Disturber,
    Progress,
    Record,
    Report,
    Schedule,
    Send,
    faults_in,
)
from ctr_ps.deploy.supervisor import Progressed
from ctr_ps.ps_worker.extras.chaos.channels import Chaos, Fate, Fault
from tests.support.launches import launched_here, warnings_open
from tests.support.processes import LIMIT_S, started

WAITS = "import signal; signal.pause()\n"
WATCHES = "print('[10, 10]', flush=True)\n" + WAITS


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for pipe in ("done.0", "done.1", "restarted", "recovered", "pid", "alive"):
        os.mkfifo(pipe)


def result_in(shown: str) -> dict[str, Any]:
    return json.loads(shown.splitlines()[-1])


def test_server_is_killed_at_its_step_and_the_report_has_its_recovery() -> None:
    server = """
import os
endpoint = os.environ["POD_IP"] + ":" + os.environ["PADDLE_PORT"]
index = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",").index(endpoint)
if index == 1:
    try:
        os.mkdir("first")
    except FileExistsError:
        open("restarted", "w").close()
    else:
        open("alive", "w").close()
open(f"done.{index}").read()
"""
    watcher = """
import sys
assert len(sys.argv[1].split(",")) == 2
open("alive").read()
print("[0, 199]\\n[200, 201]", flush=True)
open("restarted").read()
print("[200, null]\\n[201, 150]\\n[204, 152]", flush=True)
open("recovered", "w").close()
"""
    worker = """
open("recovered").read()
for index in range(2):
    open(f"done.{index}", "w").close()
print('{"auc": 0.7}')
"""
    code, shown = launched_here(
        server,
        worker,
        num_servers=2,
        chaos="kill server 1 at step 200",
        watcher=watcher + WAITS,
        as_json=True,
        max_restarts=1,
        durability="log",
    )

    result = result_in(shown)
    (kill,) = result["chaos"]["processes"]
    assert code == 0
    assert (result["auc"], result["restarts"]) == (0.7, 1)
    assert (kill["action"], kill["process"], kill["step"]) == ("kill", "pserver.1", 200)
    assert 0 < kill["recovered_s"] < LIMIT_S


def test_paused_process_stops_and_goes_on() -> None:
    def observe() -> list[int]:
        pid = int(Path("pid").read_text())
        Path("alive").write_text("")
        codes = [os.waitid(os.P_PID, pid, state).si_code for state in (os.WSTOPPED, os.WCONTINUED)]
        Path("done.0").write_text("")
        return codes

    worker = "import os; open('pid', 'w').write(str(os.getpid())); open('done.0').read()"
    with ThreadPoolExecutor(1) as pool:
        codes = pool.submit(observe)
        code, shown = launched_here(
            "",
            worker,
            chaos="pause worker 0 for 300ms at step 10",
            watcher="open('alive').read()\n" + WATCHES,
            as_json=True,
        )

    assert codes.result(LIMIT_S) == [os.CLD_STOPPED, os.CLD_CONTINUED]
    assert code == 0
    (pause,) = result_in(shown)["chaos"]["processes"]
    assert (pause["action"], pause["process"], pause["pause_s"]) == ("pause", "trainer.0", 0.3)


def test_process_that_is_paused_ends_in_order_all_the_same() -> None:
    """SIGTERM alone would reach it only when it goes on."""
    server = """
import os, signal
def end(*_):
    open("ended", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open("pid", "w").write(str(os.getpid()))
signal.pause()
"""
    worker = """
pid = open("pid").read()
open("alive", "w").close()
while open(f"/proc/{pid}/stat").read().split()[2] != "T":
    pass
raise SystemExit(6)
"""
    watcher = "open('alive').read()\n" + WATCHES

    code, _ = launched_here(
        server, worker, chaos="pause server 0 for 3600s at step 10", watcher=watcher
    )

    assert code == 6
    assert Path("ended").exists()


def test_workers_alone_get_the_faults_of_calls_and_their_journals_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    server = "import os; assert 'CTR_PS_CHAOS' not in os.environ; open('done.0').read()"
    worker = """
import json, os
chaos = json.loads(os.environ["CTR_PS_CHAOS"])
trainer = os.environ["PADDLE_TRAINER_ID"]
open("told." + trainer, "w").write(os.environ["CTR_PS_CHAOS"])
open(chaos["journal"], "a").write("reply_lost PushGrad 0\\n")
if trainer == "0":
    open("done.0", "w").close()
"""
    Path("log/chaos").mkdir(parents=True)
    Path("log/chaos/trainer.7").write_text("delayed PushGrad 0\n")

    code, shown = launched_here(
        server, worker, num_workers=2, chaos="drop 5% pushes; delay 20ms pulls", as_json=True
    )

    assert code == 0
    for trainer in range(2):
        assert Chaos.from_json(Path(f"told.{trainer}").read_text()) == Chaos(
            seed=f"7/trainer.{trainer}",
            journal=str(Path(f"log/chaos/trainer.{trainer}").resolve()),
            faults=[Fault("drop", "pushes", 0.05), Fault("delay", "pulls", 0.02)],
        )
    assert result_in(shown)["chaos"]["calls"] == {
        "request_lost": {},
        "reply_lost": {"PushGrad": 2},
        "duplicated": {},
        "delayed": {},
    }
    assert "chaos: calls with reply_lost: 2 PushGrad" in caplog.text


def test_end_of_the_watcher_is_told_and_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    kill, ends = "kill server 0 at step 9", "raise SystemExit(1)"

    with warnings_open("alive"):
        code, _ = launched_here("", "open('alive').read()", chaos=kill, watcher=ends)

    assert code == 0
    assert "no more faults at steps: process versions exited, see log/versions.log" in caplog.text


@pytest.mark.parametrize(
    ("sentence", "said"), [("kill server 3 at 1s", "no server 3"), ("", "''"), (" ", "' '")]
)
def test_wrong_sentence_is_a_usage_error_before_anything_starts(sentence: str, said: str) -> None:
    Path("script.py").write_text("")
    command = [sys.executable, "-m", "ctr_ps.deploy.launch", "--chaos", sentence, "script.py"]
    with started(command) as process:
        _, err = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 2
    assert said in err
    assert not Path("log").exists()


def test_progress_is_told_once_until_servers_go_on_again(tmp_path: Path) -> None:
    """A launcher that heard of the same steps again and again would start a process again for ever."""
    chaos = parse("kill server 0 at step 900", num_servers=1, num_workers=1)
    disturber = Disturber(chaos, Cluster(tmp_path, Events()), tmp_path / "chaos", [])

    told = [disturber.handle(Line(VERSIONS, b"[%d]" % version)) for version in (1, 3, 3, 3, 4, 5)]

    assert told == [None, Progressed(), None, None, None, Progressed()]


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


CHAOS = parse("kill server 1 at 5s; drop 5% pushes", num_servers=2, num_workers=1, seed=7)
KILL = Record(action="kill", process="pserver.1", at_s=5.04, step=200, recovered_s=1.26)


def test_report_says_what_was_done_and_how_long_the_run_took_to_recover() -> None:
    missed = Record(action="kill", process="trainer.0", at_s=6.0, step=None, is_done=False)
    pause = Record(action="pause", process="trainer.0", at_s=9.0, step=None, pause_s=2.5)
    report = Report(
        chaos=CHAOS,
        records=[KILL, missed, pause],
        never_due=CHAOS.disturbances,
        faults={"reply_lost": {"PushGrad": 3, "PullDense": 1}, "delayed": {}},
    )

    assert report.lines() == [
        "killed pserver.1 at 5.0 s, step 200: progress on all servers after 1.3 s",
        "no kill of trainer.0 at 6.0 s: the process was not running",
        "paused for 2.5 s trainer.0 at 9.0 s: no progress afterwards",
        "pserver.1: neither killed nor paused, the run ended first",
        "calls with reply_lost: 3 PushGrad, 1 PullDense",
        "calls with delayed: none",
    ]


def test_report_has_the_same_as_fields() -> None:
    report = Report(chaos=CHAOS, records=[KILL], faults={"reply_lost": {"PushGrad": 3}})

    assert report.as_json() == {
        "seed": 7,
        "processes": [
            {
                "action": "kill",
                "process": "pserver.1",
                "at_s": 5.04,
                "step": 200,
                "pause_s": None,
                "is_done": True,
                "recovered_s": 1.26,
            }
        ],
        "never_due": [],
        "calls": {"reply_lost": {"PushGrad": 3}},
    }


@pytest.fixture
def journals(tmp_path: Path) -> Path:
    folder = tmp_path / "journals"
    folder.mkdir()
    return folder


def test_faults_are_added_up_over_workers_without_a_line_that_was_cut_off(journals: Path) -> None:
    (journals / "trainer.0").write_text("reply_lost PushGrad 0\ndelayed PushGrad 1\n")
    (journals / "trainer.1").write_text(
        "reply_lost PushGrad 1\nreply_lost Leave 0\ndelayed PushGrad 1"
    )

    assert faults_in(journals) == {
        "request_lost": {},
        "reply_lost": {"Leave": 1, "PushGrad": 2},
        "duplicated": {},
        "delayed": {"PushGrad": 1},
    }


def test_faults_have_the_names_of_workers_journals(journals: Path) -> None:
    every = Fate(is_reply_lost=True, is_duplicated=True, delay_s=1.0).faults

    assert {*every, *Fate(is_request_lost=True).faults} == set(faults_in(journals))


def test_without_journals_nothing_was_done_to_calls(journals: Path) -> None:
    assert set(faults_in(journals / "none")) == set(faults_in(journals))
