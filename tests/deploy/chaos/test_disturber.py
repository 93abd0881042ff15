"""Chaos of a launch, with stand-ins for servers, workers and the program that watches versions.

They synchronise through named pipes: opening one waits for the other side.
"""

import json
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.deploy.chaos.disturber import WATCHER, Disturber
from ctr_ps.deploy.chaos.sentences import parse
from ctr_ps.deploy.cluster import Cluster, Events, Line
from ctr_ps.deploy.supervisor import Progressed
from ctr_ps.ps_worker.extras.chaos.channels import Chaos, Fault
from tests.support.launches import launched_here
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
        """Waits until it stops and goes on, and leaves its exit to the launcher."""
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
    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                Path("alive").write_text("")

    handler = Said()
    logging.getLogger("ps-launch").addHandler(handler)

    code, _ = launched_here(
        "", "open('alive').read()", chaos="kill server 0 at step 9", watcher="raise SystemExit(1)"
    )

    logging.getLogger("ps-launch").removeHandler(handler)
    assert code == 0
    assert (
        "cannot follow the training steps any more: versions exited, see log/versions.log"
        in caplog.text
    )


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

    told = [disturber.handle(Line(WATCHER, b"[%d]" % version)) for version in (1, 3, 3, 3, 4, 5)]

    assert told == [None, Progressed(), None, None, None, Progressed()]
