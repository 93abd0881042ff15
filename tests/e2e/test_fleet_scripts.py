"""Scripts as a cluster of real processes: how they train together, and how they end."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.commands import clean_environment, run
from tests.support.processes import environment_of, free_port, server_process, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 60.0

SCRIPT = """
import logging, sys, time
import numpy as np
from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker import fleet

logging.basicConfig(level=logging.INFO)
fleet.init(wait_timeout_s=60)
schema = Schema.numbered(1, 2)
strategy = fleet.DistributedStrategy(mode=sys.argv[1])
optimizer = fleet.distributed_optimizer(fleet.optimizer.Adagrad(learning_rate=0.1), strategy)
executor = optimizer.minimize(CtrDnn(schema, dim=4, hidden=[8]))

def say(line):
    sys.stdout.write(line + "\\n")  # in one piece: other threads log into the same file

def samples():
    rng = np.random.default_rng(fleet.worker_index())
    for _ in range(500 + 100 * fleet.worker_index()):
        user = int(rng.integers(20))
        yield user % 2, [rng.normal()], [f"user {user}", ["a", "b"][: user % 3]]
"""
SERVE = """
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
"""
TRAIN = """
fleet.init_worker()
loader = fleet.SampleLoader(samples, schema, batch_size=20)
for _ in range(3):
    executor.train_from_dataset(loader)
"""
ENDING = """
fleet.barrier_worker()
own = executor.infer_from_dataset(loader)
merged = fleet.metrics.merged(own)
assert fleet.metrics.auc(own) == merged.auc()
assert fleet.util.all_reduce([fleet.worker_index(), 1]).tolist() == [1, 2]
assert fleet.metrics.max(fleet.worker_index()) == 1 and fleet.metrics.min(fleet.worker_index()) == 0
say(f"examples {own.examples} {merged.examples} auc {merged.auc()}")
if fleet.is_first_worker():
    fleet.save_persistables(sys.argv[2])
fleet.stop_worker()
"""


def launch(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    sizes = ["--server-num", 2, "--worker-num", 2, "--log-dir", folder / "log"]
    return run("ps-launch", *sizes, folder / "script.py", *arguments, cwd=folder)


def require_trained_together(folder: Path, mode: str) -> str:
    """Workers train, merge what they measured, and save a model; returns the last line of worker 0."""
    done = launch(folder, SCRIPT + SERVE + TRAIN + ENDING, mode, str(folder / "model"))

    assert done.returncode == 0, done.stderr
    logs = [(folder / f"log/trainer.{index}.log").read_text() for index in range(2)]
    words = [log.split("examples ")[-1].split() for log in logs]
    assert [line[:2] for line in words] == [["500", "1100"], ["600", "1100"]]
    assert words[0][3] == words[1][3]
    assert float(words[0][3]) > 0.95
    assert (folder / "model/MANIFEST.json").is_file()
    for index in range(2):
        assert "all workers have left" in (folder / f"log/pserver.{index}.log").read_text()
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("mode", ["half_async", "async", "geo", "bounded_staleness"])
def test_workers_train_together_and_merge_what_they_measure(mode: str, tmp_path: Path) -> None:
    require_trained_together(tmp_path, mode)


def test_workers_share_the_rows_of_all(tmp_path: Path) -> None:
    """Worker 1 gets no files."""
    loads = """
fleet.init_worker()
dataset = fleet.InMemoryDataset(schema, batch_size=20)
dataset.set_filelist(["rows.tsv"] if fleet.is_first_worker() else [])
dataset.load_into_memory()
dataset.global_shuffle(fleet)
executor.train_from_dataset(dataset)
say(f"rows {dataset.get_memory_data_size()} {dataset.get_memory_data_size(fleet)}")
fleet.stop_worker()
"""
    rows = "".join(f"{row % 2}\t{row}\tu{row % 20}\ta\n" for row in range(4_000))
    (tmp_path / "rows.tsv").write_text(rows)

    done = launch(tmp_path, SCRIPT + SERVE + loads, "async")

    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / f"log/trainer.{index}.log").read_text() for index in range(2)]
    sizes = [list(map(int, log.split("rows ")[-1].split()[:2])) for log in logs]
    assert sizes[0][0] + sizes[1][0] == sizes[0][1] == sizes[1][1] == 4_000
    assert abs(sizes[0][0] - 2_000) < 200


def test_fit_is_the_rest_of_the_script_in_both_roles(tmp_path: Path) -> None:
    fits = """
batches = list(fleet.SampleLoader(samples, schema, batch_size=20)) if fleet.is_worker() else []
fleet.Executor().fit(own_model, batches, epoch=2)
print("fitted", flush=True)
"""
    script = SCRIPT.replace(
        "executor = optimizer.minimize(CtrDnn(schema, dim=4, hidden=[8]))",
        "own_model = CtrDnn(schema, dim=4, hidden=[8])\noptimizer.minimize(own_model)",
    )

    done = launch(tmp_path, script + fits, "sync")

    assert done.returncode == 0, done.stderr
    for name in ("pserver.0", "pserver.1", "trainer.0", "trainer.1"):
        assert "fitted" in (tmp_path / f"log/{name}.log").read_text()


@pytest.mark.parametrize("at", ["after training", "before joining"])
@pytest.mark.parametrize("ending", ["sys.exit()", "sys.exit('no rows for today')", "sys.exit(3)"])
def test_worker_that_ends_without_stop_worker_ends_all(
    ending: str, at: str, tmp_path: Path
) -> None:
    ends = f"if fleet.is_first_worker():\n    {ending}\n"
    script = TRAIN + ends + "fleet.barrier_worker()\n" if at == "after training" else ends + TRAIN

    (code, log), (other_code, other_log) = endings_of_workers(tmp_path, SCRIPT + script)

    assert (code, other_code) == (2, 12), other_log
    missing = "the script ended without fleet.stop_worker(): call it at the end"
    assert f"error: {missing}" in log
    assert f": worker 0 aborted the job: ScriptEndedError: {missing}" in other_log


def test_error_of_a_script_ends_all_with_its_trace(tmp_path: Path) -> None:
    fails = "if fleet.is_first_worker():\n    1 / 0\nfleet.barrier_worker()\n"

    done = launch(tmp_path, SCRIPT + SERVE + TRAIN + fails, "sync")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "stop_worker" not in done.stderr


def endings_of_workers(folder: Path, script: str) -> list[tuple[int, str]]:
    """Runs a script as two workers without the launcher, which would end the second one.

    Returns:
        Exit code and log of each.
    """
    (folder / "script.py").write_text(script)
    with free_port() as port:
        role = environment_of([port], 0, num_workers=2)
    with server_process(role, folder / "server.log"), ExitStack() as stack:
        workers = []
        for index in range(2):
            as_worker = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)}
            environment = {**clean_environment(), **role, **as_worker}
            command = [sys.executable, folder / "script.py", "async"]
            workers.append(stack.enter_context(started(command, environment)))
        logs = [worker.communicate(timeout=LIMIT_S)[1] for worker in workers]
    return [(worker.returncode, log) for worker, log in zip(workers, logs, strict=True)]


SIGTERM = "os.kill(os.getpid(), signal.SIGTERM)"
TRAIN_ON = "[executor.train_from_dataset(loader) for _ in range(1000)]"  # until the job has ended


@pytest.mark.parametrize(
    ("before", "ending", "exit_code", "reason"),
    [
        (TRAIN, f"{SIGTERM}; {TRAIN_ON}", 143, "it was told to stop (SIGTERM)"),
        ("", "fleet.split_files(['/none'])", 6, "DataError: "),
    ],
    ids=["sigterm", "before-joining"],
)
def test_worker_that_is_ended_ends_the_other_with_its_reason(
    before: str, ending: str, exit_code: int, reason: str, tmp_path: Path
) -> None:
    ends = f"import os, signal\nif fleet.is_first_worker():\n    {ending}\n"
    script = SCRIPT + before + ends + (TRAIN if not before else "fleet.barrier_worker()\n")

    (code, _), (other_code, other_log) = endings_of_workers(tmp_path, script)

    assert (code, other_code) == (exit_code, 12), other_log
    assert f"worker 0 aborted the job: {reason}" in other_log


def test_sigterm_at_the_end_of_a_script_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The abort and the worker's leaving meet; either may come first."""
    ends = f"""
import os, signal
fleet.barrier_worker()
if fleet.is_first_worker():
    {SIGTERM}
fleet.stop_worker()
"""
    (code, log), (other_code, other_log) = endings_of_workers(tmp_path, SCRIPT + TRAIN + ends)

    assert code in (0, 143), log
    assert other_code in (0, 12), other_log


def test_sigterm_ends_a_script_at_once_that_is_in_no_run(tmp_path: Path) -> None:
    alone = """
import os, signal, threading
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait()
"""
    assert [code for code, _ in endings_of_workers(tmp_path, SCRIPT + alone)] == [143, 143]


def test_fork_of_a_script_ends_by_sigterm(tmp_path: Path) -> None:
    """As by `multiprocessing.Process.terminate`."""
    forks = """
import os, signal
heard, told = os.pipe()
child = os.fork()
if not child:
    os.write(told, b".")
    signal.pause()
os.read(heard, 1)
os.kill(child, signal.SIGTERM)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 20)
"""
    assert [code for code, _ in endings_of_workers(tmp_path, SCRIPT + forks)] == [5, 5]


def test_server_that_never_serves_ends_all_and_says_what_is_missing(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT + "if fleet.is_server():\n    sys.exit()\n" + TRAIN, "async")

    assert done.returncode == 2
    assert "pserver." in done.stderr
    assert "its script ended without fleet.run_server()" in done.stderr


def test_server_that_fails_to_start_ends_with_its_exit_code(tmp_path: Path) -> None:
    loads = (
        f"if fleet.is_server():\n    fleet.init_server({str(tmp_path)!r})\n    fleet.run_server()\n"
    )

    done = launch(tmp_path, SCRIPT + loads + TRAIN, "async")

    assert done.returncode == 5
    assert "neither a checkpoint nor a folder of checkpoints" in done.stderr


def test_servers_begin_with_a_model_that_workers_trained_in_sync(tmp_path: Path) -> None:
    expected = require_trained_together(tmp_path, "sync")
    loads = SERVE.replace("init_server()", f"init_server({str(tmp_path / 'model')!r})")
    only_infers = TRAIN.split("for _", maxsplit=1)[0] + ENDING

    again = launch(tmp_path, SCRIPT + loads + only_infers, "sync", str(tmp_path / "again"))

    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == expected


def test_workers_do_not_load_the_servers_shell() -> None:
    program = """
import sys
from ctr_ps.ps_worker import fleet
fleet.init()
server = "ctr_ps.ps_server."
shell = {server + name for name in ("rpc.run", "rpc.server", "rpc.service", "cli")}
assert not shell & sys.modules.keys(), shell & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], env=clean_environment(), check=True)
