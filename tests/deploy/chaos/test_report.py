"""The report of a run's chaos."""

from pathlib import Path

from ctr_ps.deploy.chaos.disturber import Report, faults_in
from ctr_ps.deploy.chaos.schedule import Record
from ctr_ps.deploy.chaos.sentences import parse
from ctr_ps.ps_worker.extras.chaos.channels import Fate

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
        "killed pserver.1 at 5.0 s, step 200: all servers went on after 1.3 s",
        "did not kill trainer.0 at 6.0 s: it did not run",
        "paused for 2.5 s trainer.0 at 9.0 s: no progress was seen after it",
        "pserver.1: neither killed nor paused, as the run ended before",
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


def test_faults_are_added_up_over_workers_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "trainer.0").write_text("reply_lost PushGrad 0\ndelayed PushGrad 1\n")
    (tmp_path / "trainer.1").write_text(
        "reply_lost PushGrad 1\nreply_lost Leave 0\ndelayed PushGrad 1"
    )

    assert faults_in(tmp_path) == {
        "request_lost": {},
        "reply_lost": {"Leave": 1, "PushGrad": 2},
        "duplicated": {},
        "delayed": {"PushGrad": 1},
    }


def test_faults_have_the_names_of_workers_journals(tmp_path: Path) -> None:
    every = Fate(is_reply_lost=True, is_duplicated=True, delay_s=1.0).faults

    assert {*every, *Fate(is_request_lost=True).faults} == set(faults_in(tmp_path))


def test_without_journals_nothing_was_done_to_calls(tmp_path: Path) -> None:
    assert set(faults_in(tmp_path / "none")) == set(faults_in(tmp_path))
