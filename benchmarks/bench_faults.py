"""What it costs to survive faults, and how long a lost server is missed: 2 servers x 2 workers over loopback.

    python -m benchmarks.bench_faults                          # all cases, one JSON line each
    python -m benchmarks.bench_faults --case cost --batch-size 512
    python -m benchmarks.bench_faults --case recovery --rows 20_000 --batches 100   # small, to try it

cost: examples/s with an update log (`--log-sync os`) as a ratio to without, by mode; and of synchronous
training with cluster.on_worker_loss = "wait", which copies the values before each step, to "fail". The two
alternate, and the ratio is the median over the rounds.

recovery: a server that holds half of the rows is killed with SIGKILL while both workers train, some hundred
batches after a checkpoint, and started again at once: seconds until it serves, by part, until the next batch
is trained, and until the workers train at 90 % of their speed before.

snapshot: how long `status()` and a small pull take while checkpoints are saved, with an update log, which
begins a segment with each, and without one.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.background import meanwhile
from benchmarks.bench_checkpoint import fill
from benchmarks.bench_table import all_keys
from benchmarks.bench_train import (
    STEPS,
    cluster,
    environment_of,
    free_ports,
    run_worker,
    settings_of,
    start_server,
    warmup_steps,
    worker_role,
)
from benchmarks.fault_worker import STOP
from benchmarks.figures import say, spread
from benchmarks.train_worker import job_of
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import Missing, SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.job.model import declare, specs_of

NUM_SERVERS = NUM_WORKERS = 2
BATCH_SIZES = (512, 4096)
MODES = ("sync", "async", "geo")
BATCH_SIZE, MODE = 512, "sync"  # of recovery and snapshot
WAIT = "cluster.on_worker_loss=wait"

NUM_PULLED = 1_000  # keys of a pull
POLL_S = 0.002
QUIET_S = 3.0  # seconds between saves
WINDOW_S = 1.0  # in which the workers' speed is counted
BACK = 0.9  # of the speed before: the workers are back
LIMIT_S = 180.0

Line = dict[str, Any]


# The cost of what is done before there is a fault


def with_log(mode: str, batch_size: int, folder: Path) -> Line:
    """Trains with an update log; the result has its size by batch."""
    size_bytes = 0

    def watch(is_over: threading.Event) -> None:
        """Opens the logs, one a server, as soon as they are there: the servers remove them at the end."""
        nonlocal size_bytes
        left = [Path(logs, str(i), "segment-00000001.log") for i in range(NUM_SERVERS)]
        with contextlib.ExitStack() as stack:
            files = []
            while not is_over.wait(0.05):
                for path in [path for path in left if path.exists()]:
                    files.append(stack.enter_context(path.open("rb")))
                    left.remove(path)
            size_bytes = sum(file.seek(0, 2) for file in files)  # removed, but still open

    with tempfile.TemporaryDirectory(dir=folder, prefix="logs-") as logs, meanwhile(watch):
        result = cluster(mode, batch_size, update_logs=Path(logs))
    num_batches = NUM_WORKERS * (STEPS[batch_size] + warmup_steps(mode, batch_size))
    return {**result, "log_kb_a_batch": round(size_bytes / num_batches / 1e3)}


def measure_costs(batch_size: int, rounds: int, folder: Path, modes: Sequence[str]) -> None:
    """Prints a line for each mode with an update log, and one for synchronous training that waits."""
    for mode in modes:
        report_ratio(
            f"log_{mode}",
            batch_size,
            rounds,
            lambda mode=mode: with_log(mode, batch_size, folder),
            lambda mode=mode: cluster(mode, batch_size),
        )
    if "sync" in modes:
        report_ratio(
            "wait_sync",
            batch_size,
            rounds,
            lambda: cluster("sync", batch_size, settings=[WAIT]),
            lambda: cluster("sync", batch_size),
        )


def report_ratio(
    case: str,
    batch_size: int,
    rounds: int,
    measured: Callable[[], Line],
    baseline: Callable[[], Line],
) -> None:
    """Runs two variants by turns, and prints their speeds and the ratios of `measured` to `baseline`."""
    runs: list[tuple[Line, Line]] = []
    for number in range(rounds):
        order = (measured, baseline) if number % 2 else (baseline, measured)
        found = {run: run() for run in order}
        runs.append((found[measured], found[baseline]))
    speeds = [[line["examples_per_s"] for line in pair] for pair in runs]
    ratios = [pair[0] / pair[1] for pair in speeds]
    last = runs[-1][0]
    sizes = {name: last[name] for name in ("log_kb_a_batch",) if name in last}
    say(
        "faults",
        case=case,
        batch_size=batch_size,
        **spread("ratio", ratios, 3),
        examples_per_s=round(statistics.median(pair[0] for pair in speeds)),
        baseline_per_s=round(statistics.median(pair[1] for pair in speeds)),
        **sizes,
    )


# A job whose parts can be killed, and told to save


@dataclass
class Worker:
    """A process of benchmarks.fault_worker."""

    process: subprocess.Popen[str]

    def tell(self, command: str) -> None:
        """Sends a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def wait_for(self, event: str) -> Line:
        """Returns the next such event."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line: Line = json.loads(text)
            if line["event"] == event:
                return line
        raise SystemExit(f"a worker ended with exit code {self.process.wait()} before {event!r}")


@dataclass
class Cluster:
    """Servers and workers as processes; use as a context manager, which ends them."""

    folder: Path  # for logs and checkpoints
    has_log: bool  # whether the servers keep update logs
    load: str  # checkpoint to start with
    endpoints: list[str] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    _servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _ports: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._ports = free_ports(NUM_SERVERS)
        self.endpoints = [f"127.0.0.1:{port}" for port in self._ports]
        self._servers = [self._start_server(index) for index in range(NUM_SERVERS)]
        arguments = [
            *("--batch-size", str(BATCH_SIZE)),
            *("--folder", str(self.folder / "checkpoints")),
            *("--load", self.load),
            *(f"--set={each}" for each in settings_of(MODE, BATCH_SIZE)),
        ]
        common = environment_of(self._ports, NUM_WORKERS)
        self.workers = [
            Worker(
                run_worker(
                    {**common, **worker_role(index)}, arguments, module="benchmarks.fault_worker"
                )
            )
            for index in range(NUM_WORKERS)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._servers, *(worker.process for worker in self.workers)):
            process.kill()
            process.wait()

    def log_of(self, server: int) -> Path:
        """Returns the file with what a server logs."""
        return self.folder / f"server-{server}.txt"

    def _start_server(self, index: int) -> subprocess.Popen[bytes]:
        with self.log_of(index).open("a") as stderr:
            return start_server(
                self._ports[index],
                environment_of(self._ports, NUM_WORKERS),
                update_log=self.folder / f"log-{index}" if self.has_log else None,
                stderr=stderr,
            )

    def segment_bytes(self, server: int) -> int:
        """Returns the size of the newest segment of a server's update log."""
        newest = max((self.folder / f"log-{server}").glob("segment-*.log"))
        return newest.stat().st_size

    def kill_and_restart(self, server: int) -> tuple[float, float]:
        """Kills a server and starts it again; returns the times of both."""
        killed = time.time()
        self._servers[server].kill()
        self._servers[server].wait()
        started = time.time()
        self._servers[server] = self._start_server(server)
        return killed, started

    def stop(self) -> list[Line]:
        """Ends training; returns the last event of each worker."""
        for worker in self.workers:
            worker.tell(STOP)
        ends = [worker.wait_for("end") for worker in self.workers]
        for process in (*self._servers, *(worker.process for worker in self.workers)):
            if process.wait(timeout=60):
                raise SystemExit(f"{process.args!r} ended with exit code {process.returncode}")
        return ends


def filled_checkpoint(rows: int, url: Path) -> str:
    """Saves a model whose sparse table has `rows` rows that training does not touch; returns the url."""
    store, spec = declared()
    fill(store, spec, all_keys(rows))
    store.save(SaveRequest(url=str(url)))
    return str(url)


def declared() -> tuple[ParameterStore, TableSpec]:
    """Returns a store with the model of the jobs, and the spec of its sparse table."""
    store = ParameterStore()
    job = job_of(BATCH_SIZE, settings_of(MODE, BATCH_SIZE))
    declare(store, specs_of(build_model("ctr_dnn", criteo_schema(), {}), job))
    (spec, *_), _ = store.engine.parameters.declared()
    return store, spec


# Recovery


def measure_recovery(rows: int, num_batches: int, folder: Path) -> None:
    """Kills a server of a job that trains, starts it again, and prints one line."""
    load = filled_checkpoint(rows, folder / "filled")
    with Cluster(folder, has_log=True, load=load) as job:
        first = job.workers[0]
        first.wait_for("start")
        first.tell("save first")
        saved = first.wait_for("saved")["time"]
        since = first.wait_for("trained")["batches"]
        while first.wait_for("trained")["batches"] < since + num_batches:
            pass
        log_bytes = job.segment_bytes(0)
        killed, started = job.kill_and_restart(0)
        log = ServerLog.wait_for(job.log_of(0), since=started)
        time.sleep(WINDOW_S + (log.serving - killed) / 2 + QUIET_S)
        ends = job.stop()
    times = np.sort(np.concatenate([end["times"] for end in ends]))
    before_per_s = np.count_nonzero((times > saved) & (times < killed)) / (killed - saved)
    say(
        "faults",
        case="recovery",
        rows=rows,
        mode=MODE,
        batch_size=BATCH_SIZE,
        log_mb=round(log_bytes / 1e6, 1),
        calls=log.calls,
        serves_after_s=round(log.serving - killed, 2),
        start_s=round(log.recovered - started - log.load_s - log.replay_s, 2),
        load_s=log.load_s,
        replay_s=log.replay_s,
        other_s=round(log.serving - log.recovered, 2),
        trains_after_s=round(float(times[times > log.serving][0]) - killed, 2),
        speed_back_after_s=back_after_s(times, killed, log.serving, before_per_s),
        examples_per_s_before=round(before_per_s * BATCH_SIZE),
    )


def back_after_s(times: Any, killed: float, serving: float, before_per_s: float) -> float | None:
    """Returns the seconds from `killed` to the first window at the speed before; None: there was none.

    Args:
        times: When each batch was trained, ascending.
        killed: Time of the fault.
        serving: Time from which the server answered again.
        before_per_s: Batches a second before it.
    """
    expected = BACK * before_per_s * WINDOW_S
    for start in times[times > serving]:
        if start + WINDOW_S > times[-1]:
            return None
        if np.count_nonzero((times >= start) & (times < start + WINDOW_S)) >= expected:
            return round(float(start - killed), 2)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLog:
    """What a restarted server logged: times at which it was ready, and seconds that parts took."""

    recovered: float
    load_s: float
    replay_s: float
    calls: int
    serving: float

    @classmethod
    def wait_for(cls, path: Path, *, since: float) -> Self:
        """Waits until a server that was started at `since` serves."""
        end = time.time() + LIMIT_S
        while time.time() < end:
            found: dict[str, tuple[float, dict[str, str]]] = {}
            for line in path.read_text().splitlines():
                if match := re.match(r"(\S+ \S+) [A-Z]+ server-\d+ (recovered|serving) (.*)", line):
                    at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    if at >= since:
                        found[match[2]] = at, dict(re.findall(r"(\w+)=(\S+)", match[3]))
            if "serving" in found:
                values = found["recovered"][1]
                return cls(
                    recovered=found["recovered"][0],
                    load_s=float(values["load_seconds"]),
                    replay_s=float(values["replay_seconds"]),
                    calls=int(values["calls"]),
                    serving=found["serving"][0],
                )
            time.sleep(0.05)
        raise SystemExit(f"the server did not serve within {LIMIT_S:g} s:\n{path.read_text()}")


# Snapshots


class Poller:
    """Repeats a call, and records when each began and ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        """Repeats `call`."""
        self._call = call
        self._spans: list[tuple[float, float]] = []

    def poll(self, is_over: threading.Event) -> None:
        """Repeats it until the end."""
        while not is_over.wait(POLL_S):
            start = time.time()
            self._call()
            self._spans.append((start, time.time()))

    def took_ms(self, name: str, saves: Sequence[tuple[float, float]]) -> Line:
        """Returns percentiles of the calls during saves, and of the others."""
        spans = np.array(self._spans)
        is_during = np.zeros(len(spans), bool)
        for start, end in saves:
            is_during |= (spans[:, 1] >= start) & (spans[:, 0] <= end)
        took_ms = (spans[:, 1] - spans[:, 0]) * 1e3
        line: Line = {}
        for when, chosen in (("save", took_ms[is_during]), ("quiet", took_ms[~is_during])):
            p50, p99, longest = np.percentile(chosen, [50, 99, 100])
            line |= {
                f"{name}_{when}_p50_ms": round(p50, 2),
                f"{name}_{when}_p99_ms": round(p99, 2),
                f"{name}_{when}_max_ms": round(longest, 2),
            }
        return line


def measure_snapshots(rows: int, saves: int, folder: Path, *, has_log: bool) -> None:
    """Saves checkpoints of a job that trains, while its servers are asked; prints one line."""
    load = filled_checkpoint(rows, folder / "filled")
    with Cluster(folder, has_log=has_log, load=load) as job:
        first = job.workers[0]
        first.wait_for("start")
        first.wait_for("trained")
        with connect(job.endpoints) as asks_status, connect(job.endpoints) as pulls:
            _, spec = declared()
            status, pull = Poller(asks_status.status), Poller(pull_of(pulls, spec))
            with meanwhile(status.poll), meanwhile(pull.poll):
                spans, pauses = [], []
                for number in range(saves):
                    time.sleep(QUIET_S)
                    first.tell(f"save {number}")
                    begin = first.wait_for("save")["time"]
                    pauses.append(first.wait_for("snapshot")["time"] - begin)
                    spans.append((begin, first.wait_for("saved")["time"]))
                time.sleep(QUIET_S)
        job.stop()
    say(
        "faults",
        case="snapshot_with_log" if has_log else "snapshot",
        rows=rows,
        mode=MODE,
        batch_size=BATCH_SIZE,
        saves=saves,
        seconds_a_save=round(statistics.median(end - start for start, end in spans), 2),
        training_pause_max_ms=round(max(pauses) * 1e3, 1),
        **status.took_ms("status", spans),
        **pull.took_ms("pull", spans),
    )


def pull_of(client: ClusterClient, spec: TableSpec) -> Callable[[], object]:
    """Returns a pull of a few rows of a table that is on the servers."""
    client.create_table(spec)  # it is there; the client learns of it
    keys = all_keys(NUM_PULLED)
    return lambda: client.pull_sparse({spec.name: keys}, missing=Missing.ZEROS).result()


CASES = ("cost", "recovery", "snapshot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--batch-size", type=int, action="append", choices=BATCH_SIZES)
    parser.add_argument("--mode", action="append", choices=MODES, help="of cost; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="of each pair of runs, of cost")
    parser.add_argument("--rows", type=int, default=5_000_000, help="of recovery and snapshot")
    parser.add_argument("--batches", type=int, default=300, help="a worker, in the log of recovery")
    parser.add_argument("--saves", type=int, default=5, help="of snapshot")
    options = parser.parse_args()
    keep_freed_memory()
    cases = options.case or CASES
    modes = [mode for mode in MODES if mode in (options.mode or MODES)]
    if "cost" in cases:
        for batch_size in options.batch_size or BATCH_SIZES:
            measure_costs(batch_size, options.rounds, options.folder, modes)
    if "recovery" in cases:
        with scratch(options.folder) as folder:
            measure_recovery(options.rows, options.batches, folder)
    if "snapshot" in cases:
        for has_log in (False, True):
            with scratch(options.folder) as folder:
                measure_snapshots(options.rows, options.saves, folder, has_log=has_log)


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yields an empty folder, which is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench_faults-") as path:
        yield Path(path)


if __name__ == "__main__":
    main()
