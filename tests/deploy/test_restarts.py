"""Restarts by `ps-launch`, with stand-ins for servers and workers that die by a signal.

The stand-ins synchronise through named pipes: opening one waits for the other side, reading one to its end
waits until every process that holds it has exited.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.deploy.cluster import LocalEngine, LogDirError
from ctr_ps.protos.errors import BindError
from tests.deploy.test_launch import finish
from tests.support.launches import launched_here, python
from tests.support.processes import started

DIES_ONCE = """
import os, signal, sys
role = os.environ["TRAINING_ROLE"]
print(sys.argv[1:], sorted(os.environ.items()), flush=True)
try:
    os.mkdir("died")
except FileExistsError:
    pass
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS = "import signal; signal.pause()"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").touch()
    for pipe in ("done", "alive", "asked"):
        os.mkfifo(pipe)


def launched(
    server: str, worker: str, *options: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    commands = ["--server-command", shlex.join(python(server))]
    commands += ["--worker-command", shlex.join(python(worker))]
    return started([sys.executable, "-m", "ctr_ps.deploy.launch", *commands, *options, "job.toml"])


def test_killed_server_is_started_again_with_all_that_it_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = "open('done', 'w').close(); print('trained')"

    code, shown = launched_here(
        DIES_ONCE + "open('done').read()", worker, max_restarts=2, durability="log"
    )

    assert (code, shown) == (0, "trained\n")
    first, note, second = Path("log/pserver.0.log").read_text().splitlines()
    assert note == "ps-launch: restarted (1 of 2)"
    assert first == second
    assert "PADDLE_PORT" in first
    assert "pserver.0 was ended by SIGKILL: restarting it, restarted (1 of 2)" in caplog.text


def test_killed_worker_is_started_again_and_shown() -> None:
    code, shown = launched_here(
        "open('done').read()",
        DIES_ONCE + "open('done', 'w').close(); print('trained')",
        max_restarts=1,
        durability="log",
    )

    first, second, trained = shown.splitlines()
    assert (code, trained) == (0, "trained")
    assert first == second
    assert Path("log/trainer.0.log").read_text().splitlines() == [
        first,
        "ps-launch: restarted (1 of 1)",
        second,
        trained,
    ]


def test_update_logs_are_new_ones_and_are_removed_after_a_clean_end() -> None:
    Path("log/update-log/server-7").mkdir(parents=True)
    server = """
import os, sys
print(sys.argv[1:], os.path.exists("log/update-log"))
os.makedirs(sys.argv[2])
open(sys.argv[2] + "/segment", "w").close()
open("done").read()
"""
    worker = "open('done', 'w').close()"

    code, _ = launched_here(server, worker, durability="log")

    assert code == 0
    said = Path("log/pserver.0.log").read_text()
    assert said == "['--update-log', 'log/update-log/server-0'] False\n"
    assert not Path("log/update-log").exists()


WRITES_A_LOG = """
import os, sys
print(os.path.exists(sys.argv[2] + "/segment-00000001.log"))
os.makedirs(sys.argv[2], exist_ok=True)
open(sys.argv[2] + "/segment-00000001.log", "w").close()
"""


def test_second_run_goes_on_from_the_update_logs_of_one_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = WRITES_A_LOG + "open('done').read()"
    code, _ = launched_here(
        server, "open('done', 'w').close(); raise SystemExit(8)", durability="log"
    )
    assert code == 8
    assert "kept the update logs in log/update-log: the same command resumes" in caplog.text

    code, _ = launched_here(server, "open('done', 'w').close()", durability="log")

    assert code == 0
    assert Path("log/pserver.0.log").read_text() == "True\n"
    assert "resuming from the update logs of an earlier run in log/update-log" in caplog.text
    assert not Path("log/update-log").exists()


SAYS_ITS_PORT = WRITES_A_LOG + "print(os.environ['PADDLE_PORT'], flush=True)\nopen('done').read()"


@pytest.mark.parametrize("is_free", [True, False])
def test_second_run_has_the_ports_of_the_first_if_they_are_free(
    is_free: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Maps in its servers' logs name them."""
    ports = []
    for worker in ("raise SystemExit(8)", "raise SystemExit(8)", ""):
        with contextlib.ExitStack() as stack:
            if len(ports) == 1 and not is_free:
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", int(ports[0])))
                listener.listen()
            launched_here(SAYS_ITS_PORT, f"open('done', 'w').close(); {worker}", durability="log")
        ports.append(Path("log/pserver.0.log").read_text().split()[-1])

    assert ports[2] == ports[0], "the second one may have had no other choice"
    assert (ports[1] == ports[0]) == is_free
    assert ("which is in use, and gets" in caplog.text) == (not is_free)


def test_endpoints_of_the_run_are_there_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def write_slowly(path: Path, text: str) -> None:
        path.write_bytes(text[:9].encode())
        seen.append(Path("log/endpoints.json").exists())
        path.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", write_slowly)
    launched_here("exit(1)", "exit(1)", durability="log")

    assert seen == [False]
    assert [*json.loads(Path("log/endpoints.json").read_text())["endpoints"]] == ["pserver.0"]


DRAINED = (
    WRITES_A_LOG
    + """
if sys.argv[2].endswith("server-1"):
    asked = open("asked", "w")
    open(sys.argv[2] + "/DRAINED", "w").close()
    os.remove(sys.argv[2] + "/segment-00000001.log")
    sys.exit()
open("alive", "w").close()
open("done").read()
"""
)


def test_a_run_goes_on_without_a_server_that_was_drained(caplog: pytest.LogCaptureFixture) -> None:
    """Its log is gone, as its shards are; at its address nobody would ever call it.

    The first run ends as soon as that server has.
    """
    worker = "open('alive').read(); open('asked').read(); raise SystemExit(8)"
    code, _ = launched_here(DRAINED, worker, num_servers=2, durability="log")
    assert code == 8
    assert "kept the update logs in log/update-log: the same command resumes" in caplog.text
    before = Path("log/pserver.1.log").stat()

    worker = "open('alive').read(); open('done', 'w').close()"
    code, _ = launched_here(DRAINED, worker, num_servers=2, durability="log")

    assert code == 0
    assert Path("log/pserver.0.log").read_text() == "True\n"
    assert Path("log/pserver.1.log").stat().st_mtime_ns == before.st_mtime_ns


def test_update_logs_of_more_spares_than_the_run_has_are_named() -> None:
    for name in ("server-0", "spare-0"):
        segment = Path(f"log/update-log/{name}/segment-00000001.log")
        segment.parent.mkdir(parents=True)
        segment.touch()

    with pytest.raises(LogDirError, match=r"logs of 1 spare servers, .*: give --spare-num 1"):
        launched_here("exit(1)", "exit(1)", durability="log")

    assert segment.exists()


@pytest.mark.parametrize("content", ["", '{"pserver.0": "127', "7"])
def test_endpoints_that_cannot_be_read_are_named_and_nothing_is_started(content: str) -> None:
    segment = Path("log/update-log/server-0/segment-00000001.log")
    segment.parent.mkdir(parents=True)
    segment.touch()
    Path("log/endpoints.json").write_text(content)

    with pytest.raises(
        LogDirError, match=r"earlier run in log/endpoints\.json: .* remove it; else"
    ):
        launched_here("exit(1)", "exit(1)", durability="log")

    assert segment.exists()
    assert not Path("log/pserver.0.log").exists()


@pytest.mark.parametrize("run", [{"num_servers": 2}, {"waits_for_lost": False}])
def test_update_logs_with_which_a_run_cannot_go_on_are_not_removed(run: dict[str, Any]) -> None:
    segment = Path("log/update-log/server-0/segment-00000001.log")
    segment.parent.mkdir(parents=True)
    segment.touch()

    with pytest.raises(LogDirError, match=r"of server-0 in .* Remove the folder, or"):
        launched_here("exit(1)", "exit(1)", durability="log", **run)

    assert segment.exists()
    assert not Path("log/pserver.0.log").exists()


def test_second_launcher_in_a_folder_is_refused_and_removes_nothing() -> None:
    kept = Path("log/update-log/server-0/segment-00000001.log")
    options = ("--durability", "log")
    with launched(WRITES_A_LOG + "open('done').read()", "open('asked').read()", *options) as first:
        with Path("asked").open("w"):
            with launched("exit(1)", "exit(1)", *options) as second:
                code, _, told = finish(second)

            assert code == 2
            assert f"in use by ps-launch, process {first.pid}" in " ".join(told.split())
            assert kept.exists()
        Path("done").open("w").close()
        assert finish(first)[0] == 0


def test_job_is_started_again_from_its_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """The worker has saved one when it dies; the server that waited is stopped."""
    server = "import os, signal; os.path.exists('died') or signal.pause(); open('done').read()"
    worker = f"""
import os
if not os.path.exists("died"):
    os.makedirs("model/epoch-1")
    open("model/epoch-1/MANIFEST.json", "w").write('{{"data_folder": "data-1"}}')
    open("model/LATEST", "w").write("epoch-1\\n")
{DIES_ONCE}
open("done", "w").close()
"""

    code, shown = launched_here(server, worker, max_restarts=1, checkpoints="model")

    first, second = shown.splitlines()
    assert code == 0
    assert first.startswith("[] [")
    assert second.startswith("['--set', 'checkpoint.resume=true'] [")
    assert "trainer.0 was ended by SIGKILL: stopping all processes" in caplog.text
    assert "restarting all processes from model/epoch-1, restarted (1 of 1)" in caplog.text
    for name in ("pserver.0", "trainer.0"):
        assert "ps-launch: restarted (1 of 1)\n" in Path(f"log/{name}.log").read_text()


def test_a_server_that_was_drained_is_there_again_in_a_job_that_is_started_again() -> None:
    """Its shards are at their first places."""
    server = """
import os
if os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].endswith(os.environ["PADDLE_PORT"]):
    os.path.exists("died") or open("asked", "w").write(str(os.getpid()))
    raise SystemExit
open("done").read()
"""
    worker = f"""
import os, time
drained = "" if os.path.exists("died") else open("asked").read()
while drained and os.path.exists("/proc/" + drained):
    time.sleep(0.01)
{DIES_ONCE}
open('done', 'w').close()
"""
    code, _ = launched_here(server, worker, num_servers=2, max_restarts=1, checkpoints="model")

    assert code == 0
    assert Path("log/pserver.1.log").read_text() == "ps-launch: restarted (1 of 1)\n"


def test_a_run_that_finds_a_port_in_use_wants_none_of_its_ports_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later run would take the first ones for those of its servers."""
    wanted, endpoints = [], LocalEngine.endpoints

    def noted(engine: LocalEngine, names: list[str], of: dict[str, str]) -> list[str]:
        wanted.append({**of})
        return endpoints(engine, names, of)

    monkeypatch.setattr(LocalEngine, "endpoints", noted)
    server = f"""
import os
if not os.path.exists("died"):
    os.mkdir("died")
    raise SystemExit({BindError.exit_code})
open("done").read()
"""
    code, _ = launched_here(server, "open('done', 'w').close()", durability="log")

    assert code == 0
    assert wanted == [{}, {}]


def test_ctrl_c_while_a_job_is_stopped_for_a_restart_ends_it() -> None:
    stubborn = """
import os, signal
def reached(*_):
    open("asked", "w").close()
signal.signal(signal.SIGTERM, reached)
open("alive", "w").write("started")
open("done").read()
while True:
    signal.pause()
"""
    dies = "import os, signal; open('done', 'w').close(); os.kill(os.getpid(), signal.SIGKILL)"
    options = ["--max-restarts", "9", "--set", "checkpoint.dir=model"]
    with launched(stubborn, dies, *options) as process:
        assert Path("alive").read_text() == "started"
        assert Path("asked").read_text() == ""  # the launcher waits for the grace
        process.send_signal(signal.SIGINT)

        code, _, err = finish(process)

    assert code == 128 + signal.SIGINT
    assert "got SIGINT" in err
    assert "restarting all processes" not in err


def test_process_that_was_started_again_does_not_outlive_the_launcher() -> None:
    server = DIES_ONCE + "alive = open('alive', 'w'); print('up', file=alive, flush=True);" + WAITS
    with launched(server, WAITS, "--max-restarts", "1", "--durability", "log") as process:
        with Path("alive").open() as alive:
            assert alive.readline() == "up\n"
            process.kill()

            assert alive.read() == ""  # ends only when the server has exited

        finish(process)


def test_job_without_checkpoints_is_not_started_again() -> None:
    with launched(WAITS, DIES_ONCE, "--max-restarts", "3") as process:
        code, _, err = finish(process)

    assert code == 128 + signal.SIGKILL
    assert "nothing can be resumed: job.toml has no checkpoint.dir" in err


def test_script_is_not_started_again_from_a_checkpoint_and_gets_no_options() -> None:
    Path("script.py").write_text(DIES_ONCE)
    options = ["--max-restarts", "3"]
    with started([sys.executable, "-m", "ctr_ps.deploy.launch", *options, "script.py"]) as process:
        code, _, err = finish(process)

    assert code == 128 + signal.SIGKILL
    assert "nothing can be resumed: a script loads its checkpoints itself" in err


def test_process_of_a_script_is_started_again_without_options_of_ours() -> None:
    Path("script.py").write_text(DIES_ONCE)
    options = ["--max-restarts", "3", "--durability", "log"]
    with started([sys.executable, "-m", "ctr_ps.deploy.launch", *options, "script.py"]) as process:
        code, _, err = finish(process)

    assert code == 0, err
    for log in Path("log").glob("*.log"):
        told = [line for line in log.read_text().splitlines() if not line.startswith("ps-launch")]
        assert all(line.startswith("[] [") for line in told)


@pytest.mark.parametrize(
    ("job", "overrides", "told"),
    [
        ("", [], ["cluster.on_worker_loss=wait"]),
        ("", ["cluster.on_worker_loss=fail"], ["cluster.on_worker_loss=fail"]),
        ("[cluster]\non_worker_loss = 'continue'", [], []),
    ],
    ids=["by-default", "set", "in-the-job"],
)
def test_workers_of_a_job_wait_for_a_lost_one_unless_told_otherwise(
    job: str, overrides: list[str], told: list[str]
) -> None:
    Path("job.toml").write_text(job)
    options = [word for override in overrides for word in ("--set", override)]
    with launched(
        "", "import sys; print(*sys.argv[2:])", "--durability", "log", *options
    ) as process:
        code, out, err = finish(process)

    assert code == 0, err
    assert out.split() == [word for override in told for word in ("--set", override)]
