"""`ps-launch` as a program, with fakes of the server and the worker.

The fakes synchronise through named pipes, without polling: opening one waits for the other side, and reading
one to its end waits until every process that holds it has exited.
"""

import ast
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ctr_ps.deploy.cluster import free_port
from ctr_ps.deploy.launch import JobSettings
from ctr_ps.deploy.launcher import TAIL_LINES, Launch, run, tail
from ctr_ps.deploy.plan import Commands
from ctr_ps.deploy.supervisor import Policy
from ctr_ps.ps_worker.job import load_job
from tests.support.launches import launched_here, python, terminal_at, warnings_open
from tests.support.processes import LIMIT_S, started

Start = Callable[..., subprocess.Popen[str]]

SERVER = """
import os, sys
endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
index = endpoints.index(os.environ["POD_IP"] + ":" + os.environ["PADDLE_PORT"])
print("server", index, "ready", flush=True)
for trainer in range(int(os.environ["PADDLE_TRAINERS_NUM"])):
    open(f"done.{index}.{trainer}").read()
"""
WORKER = """
import json, os, sys
trainer = os.environ["PADDLE_TRAINER_ID"]
print("progress of", trainer, file=sys.stderr)
for server in range(len(os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(","))):
    open(f"done.{server}.{trainer}", "w").close()
print("trained")
print(json.dumps({"trainer": trainer, "arguments": sys.argv[1:]}))
"""
WAITS_FOR_EVER = """
import os, signal
with open("alive", "w") as alive:
    print(os.environ["TRAINING_ROLE"], file=alive, flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").touch()
    os.mkfifo("alive")
    for server in range(2):
        for trainer in range(2):
            os.mkfifo(f"done.{server}.{trainer}")


SCRIPT = """
import os, sys
role = os.environ["TRAINING_ROLE"]
with open(role + os.environ.get("PADDLE_TRAINER_ID", ""), "w") as told:
    print(sys.executable, sys.argv, file=told)
"""


def launch_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    Path("script.py").write_text(script)
    command = [sys.executable, "-m", "ctr_ps.deploy.launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def launch_command(server: str, worker: str, *arguments: str) -> list[str]:
    commands = ["--server-command", shlex.join(python(server))]
    commands += ["--worker-command", shlex.join(python(worker))]
    sizes = ["--server-num", "2", "--worker-num", "2"]
    return [sys.executable, "-m", "ctr_ps.deploy.launch", *commands, *sizes, "job.toml", *arguments]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts launchers; those that the test leaves are killed, and with them their children."""
    with ExitStack() as stack:

        def start(server: str, worker: str, *arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(started(launch_command(server, worker, *arguments)))

        yield start


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def test_json_of_trainer_0_is_the_last_line_and_all_output_is_in_logs(start: Start) -> None:
    code, out, err = finish(start(SERVER, WORKER, "--set", "train.epochs=2", "--json"))

    assert code == 0, err
    assert out.splitlines()[0] == "trained"
    assert json.loads(out.splitlines()[-1]) == {
        "trainer": "0",
        "arguments": ["job.toml", "--set", "train.epochs=2", "--json"],
    }
    assert "progress of 0" in err
    assert "progress of 1" not in err
    logs = {path.name: path.read_text() for path in Path("log").glob("*.log")}
    assert sorted(logs) == ["pserver.0.log", "pserver.1.log", "trainer.0.log", "trainer.1.log"]
    assert logs["pserver.1.log"] == "server 1 ready\n"
    assert logs["trainer.1.log"].startswith("progress of 1\ntrained\n")
    assert sorted(logs["trainer.0.log"].splitlines()) == sorted(
        ["progress of 0", *out.splitlines()]
    )


def test_dry_run_is_one_worker_without_a_role(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
    worker = """
import os, sys
print({k: v for k, v in os.environ.items() if k.startswith("PADDLE_TRAINER")}, sys.argv[1:])
sys.exit(7)
"""

    code, out, err = finish(start(SERVER, worker, "--dry-run", "--set", "train.epochs=2"))

    assert code == 7, err
    assert [*map(ast.literal_eval, out.strip().replace("} [", "}\n[").splitlines())] == [
        {},
        ["job.toml", "--set", "train.epochs=2", "--dry-run"],
    ]
    assert not Path("log").exists()


def test_first_failure_ends_the_others_and_shows_the_end_of_its_log(start: Start) -> None:
    os.mkfifo("servers_are_up")
    fails = """
import os, signal, sys
if os.environ["PADDLE_TRAINER_ID"] == "0":
    signal.pause()
open("servers_are_up").read()
for line in range(100):
    print("line", line)
sys.exit(6)
"""
    process = start(WAITS_FOR_EVER, fails)
    with Path("alive").open() as alive:
        roles = [alive.readline().strip() for _ in range(2)]
        Path("servers_are_up").write_text("")
        rest = alive.read()

    code, _, err = finish(process)

    assert code == 6
    assert (roles, rest) == (["PSERVER", "PSERVER"], "")
    assert "trainer.1 exited with code 6" in err
    assert "log/trainer.1.log" in err
    shown = [line.strip() for line in err.splitlines() if line.startswith("    ")]
    assert shown == [f"line {line}" for line in range(100 - TAIL_LINES, 100)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_children(number: signal.Signals, start: Start) -> None:
    process = start(WAITS_FOR_EVER, WAITS_FOR_EVER)
    with Path("alive").open() as alive:
        roles = sorted(alive.readline().strip() for _ in range(4))
        process.send_signal(number)
        rest = alive.read()

    code, _, err = finish(process)

    assert roles == ["PSERVER", "PSERVER", "TRAINER", "TRAINER"]
    assert rest == ""
    assert code == 128 + number
    assert f"got {number.name}" in err


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tether is Linux's")
def test_a_killed_launcher_leaves_no_child(start: Start) -> None:
    process = start(WAITS_FOR_EVER, WAITS_FOR_EVER)
    with Path("alive").open() as alive:
        for _ in range(4):
            alive.readline()
        process.kill()

        assert alive.read() == ""  # ends only when all writers have exited

    finish(process)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    ignores = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("alive", "w").write(str(os.getpid()))
signal.pause()
"""
    fails = "open('pid', 'w').write(open('alive').read()); raise SystemExit(7)"

    code, _ = launched_here(ignores, fails, grace_seconds=0.1)

    assert code == 7
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)


def test_servers_are_there_until_workers_have_ended() -> None:
    os.mkfifo("asked")
    os.mkfifo("answer")
    server = """
open("asked").read()
open("answer", "w").write("still here")
"""
    worker = """
import os, signal, sys
def leave(*_):
    open("asked", "w").close()
    open("answered", "w").write(open("answer").read())
    os._exit(143)
if os.environ["PADDLE_TRAINER_ID"] == "0":
    signal.signal(signal.SIGTERM, leave)
    open("alive", "w").close()
    while True:
        signal.pause()
open("alive").read()
sys.exit(6)
"""

    code, _ = launched_here(server, worker, num_workers=2, grace_seconds=LIMIT_S)

    assert code == 6
    assert Path("answered").read_text() == "still here"


def test_servers_end_in_order_where_a_worker_does_not() -> None:
    server = """
import os, signal
def end(*_):
    open("ended", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open("alive").read()
while True:
    signal.pause()
"""
    worker = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["PADDLE_TRAINER_ID"] == "0":
    signal.pause()
open("alive", "w").close()
sys.exit(6)
"""

    code, _ = launched_here(server, worker, num_workers=2, grace_seconds=2.0)

    assert code == 6
    assert Path("ended").exists()


def test_process_that_is_paused_ends_in_order_all_the_same() -> None:
    """SIGTERM alone would reach it only when it goes on."""
    server = """
import os, signal
def end(*_):
    open("ended", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open("alive", "w").write(str(os.getpid()))
signal.pause()
"""
    worker = """
import os, signal
pid = open("alive").read()
os.kill(int(pid), signal.SIGSTOP)
while open(f"/proc/{pid}/stat").read().split()[2] != "T":
    pass
raise SystemExit(6)
"""

    code, _ = launched_here(server, worker)

    assert code == 6
    assert Path("ended").exists()


def test_a_second_signal_does_not_wait_for_the_grace(start: Start) -> None:
    stubborn = """
import os, signal, sys
def reached(*_):
    with open("alive", "w") as alive:
        print("asked", file=alive)
signal.signal(signal.SIGTERM, reached)
print("ready", file=sys.stderr, flush=True)
while True:
    signal.pause()
"""
    process = start("import signal; signal.pause()", stubborn)
    assert process.stderr is not None
    while "ready" not in (line := process.stderr.readline()):
        assert line, "the launcher ended before its worker was ready"
    process.send_signal(signal.SIGINT)
    assert "asked" in Path("alive").read_text()
    process.send_signal(signal.SIGINT)

    code, _, _ = finish(process)

    assert code == 130


def test_a_port_lost_to_another_program_is_replaced_once() -> None:
    loses_the_first = """
import os
if not os.path.exists("lost"):
    open("lost", "w").close()
    raise SystemExit(3)
"""
    code, shown = launched_here(loses_the_first, "print('trained')")

    assert code == 0
    assert shown.endswith("trained\n")
    assert launched_here("raise SystemExit(3)", "import signal; signal.pause()")[0] == 3


def test_a_closed_terminal_does_not_stop_training() -> None:
    much = "for line in range(20_000): print('line', line)"
    reader, writer = os.pipe()
    os.close(reader)
    launch = Launch(
        commands=Commands(server=python(""), worker=python(much)),
        num_servers=1,
        num_workers=1,
        log_dir=Path("log"),
    )

    code = run(launch, terminal_at(writer))

    os.close(writer)
    assert code == 0
    assert Path("log/trainer.0.log").read_text().endswith("line 19999\n")


def test_a_held_port_is_reserved_until_it_is_closed() -> None:
    with free_port() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
        address = held.getsockname()
        held.close()

        other.bind(address)


def test_a_missing_job_is_a_usage_error_before_anything_starts() -> None:
    command = [word.replace("job.toml", "jobb.toml") for word in launch_command("", "")]

    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
    assert not Path("log").exists()


def test_a_script_is_both_roles_and_gets_all_arguments_after_it() -> None:
    own = ["--worker-num", "9", "--set", "a=b", "--help", "--", "-x"]

    done = launch_script(SCRIPT, "--worker-num", "2", "script.py", *own)

    assert done.returncode == 0, done.stderr
    told = f"{sys.executable} {['script.py', *own]}\n"
    for role in ("PSERVER", "TRAINER0", "TRAINER1"):
        assert Path(role).read_text() == told
    logs = sorted(path.name for path in Path("log").glob("*.log"))
    assert logs == ["pserver.0.log", "trainer.0.log", "trainer.1.log"]


def test_options_of_jobs_before_a_script_are_usage_errors() -> None:
    of_jobs = ["--set", "a=b", "--json", "--server-command", "x", "--worker-command", "x"]

    done = launch_script(SCRIPT, *of_jobs, "script.py")

    assert done.returncode == 2
    told = " ".join(done.stderr.replace("│", " ").split())
    assert "--set, --json, --server-command, --worker-command is for jobs, but 'script.py'" in told
    assert not Path("log").exists()


def test_an_argument_after_a_job_is_a_usage_error() -> None:
    done = launch_script(SCRIPT, "job.toml", "--json", "epochs=2")

    assert done.returncode == 2
    assert "epochs=2" in done.stderr


def test_workers_that_long_outlive_their_servers_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    os.mkfifo("said")
    fails_after_the_warning = "open('said').read(); raise SystemExit(4)"

    with warnings_open("said"):
        code, _ = launched_here("", fails_after_the_warning, notice_seconds=0.01, is_script=True)

    assert code == 4
    assert "pserver.0 exited 0.01 s ago with code 0, but trainer.0 still runs" in caplog.text
    assert "fleet.run_server()" in caplog.text
    assert "trainer.0 exited with code 4, after pserver.0 had exited with code 0" in caplog.text


def test_lease_that_servers_wait_is_that_of_a_job() -> None:
    Path("job.toml").write_text("[data]\ntrain = 'x'\n[model]\nname = 'lr'")

    assert load_job(Path("job.toml"), []).cluster.lease_s == Policy().lease_seconds


def test_tail_of_a_long_log_is_its_last_lines() -> None:
    Path("long.log").write_bytes(b"".join(b"line %d \xff\n" % n for n in range(50_000)))

    lines = tail(Path("long.log")).splitlines()

    assert len(lines) == TAIL_LINES
    assert lines[-1] == "    line 49999 \ufffd"


def test_ray_that_is_not_installed_is_named_with_its_extra(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('model = "lr"\n')
    without = "import sys; sys.modules['ray'] = None; from ctr_ps.deploy.launch import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", without, "--on", "ray", job],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )

    assert (done.returncode, "pip install 'ctr-ps[ray]'" in done.stderr) == (2, True), done.stderr


JOB = """
[data]
schema = "criteo"
[checkpoint]
dir = "output/model"
resume = true
"""


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["checkpoint.dir=other"],
        ["checkpoint.dir='other'", 'checkpoint.dir = "last"'],
        ["checkpoint.resume=false"],
        ["checkpoint={dir = 'whole'}"],
    ],
    ids=["file", "bare-word", "last-of-two", "not-text", "section"],
)
def test_settings_are_those_of_the_worker(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    words = ["ps-worker", "train", str(path), *(w for o in overrides for w in ("--set", o))]

    ours, checkpoint = JobSettings(path, words), load_job(path, overrides).checkpoint

    assert (ours.get("checkpoint", "dir") or "") == checkpoint.dir
    assert (ours.get("checkpoint", "resume") or False) == checkpoint.resume


@pytest.mark.parametrize("text", ["[checkpoint", "checkpoint = 3", ""])
def test_a_file_that_is_no_job_has_no_settings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)

    assert JobSettings(path, ["--set", "checkpoint.dir"]).get("checkpoint", "resume") is None
