"""Training throughput in examples/s, compared with the ceiling in the same run.

    python -m benchmarks.bench_train                 # all cases, one JSON line each, then the ratios
    python -m benchmarks.bench_train --peer FOLDER   # PaddlePaddle too, set up there (benchmarks/peers.py)
    python -m benchmarks.bench_train --torch-peer FOLDER  # plain PyTorch, bfloat16, and a module of it
    python -m benchmarks.bench_train --batch-size 512 --case geo_2x2 --case sync_2x2

Cases: the ceiling (benchmarks.ceiling), two ceilings at once, in process with 1 and 2 threads, and 2 servers
x 2 workers in each mode, as processes over loopback. Batches are in memory before the clock starts; it stops
when all gradients are applied. Rounds of a case alternate with rounds of the ceiling, since the speed of a
machine drifts, and medians are compared: with the ceiling, and with plain PyTorch in the same precision. A
peer that fails has a line with its error.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ceiling
from benchmarks.figures import say, spread
from benchmarks.peers import PeerCase, PeerError, paddle_cases, peer_folder, torch_cases
from ctr_ps.ps_worker.communicators.asynchronous import BATCHES_IN_STEP

BATCH_SIZES = (100, 512, 4096)
# At B=512, GEO makes ten exchanges, of which only the last does not overlap with training.
STEPS = {100: 1200, 512: 1000, 4096: 100}
_WARMUP_STEPS = {100: 100, 512: 100, 4096: 12}

NUM_WORKERS = 2  # of a cluster

# Async: batches merged before a sparse and a dense push (docs/consistency.md).
MERGES = {100: (4, 40), 512: (2, 16), 4096: (1, 4)}

SGD = (
    "optimizer.sparse={name='sgd', learning_rate=1.0}",
    "optimizer.dense={name='sgd', learning_rate=0.1}",
)


def settings_of(mode: str, batch_size: int) -> list[str]:
    """Returns the job settings of a mode; GEO trains with SGD, as Paddle does."""
    sparse_merge, dense_merge = MERGES[batch_size]
    merging = [
        f"strategy.{mode}.max_merge_var_num={sparse_merge}",
        f"strategy.{mode}.max_merge_dense_num={dense_merge}",
    ]
    more = {
        "async": merging,
        "bounded_staleness": [*merging, f"strategy.{mode}.max_staleness={2 * dense_merge}"],
        "geo": [f"strategy.{mode}.k_steps=100", *SGD],
    }
    return [f"strategy.mode={mode}", *more.get(mode, [])]


MODES = ("sync", "half_async", "async", "bounded_staleness", "geo")
TORCH_MODEL = "benchmarks/torch_models.py:CtrDnn"
PEER_FOLDERS = {"--peer": "CTR_PEER_DIR", "--torch-peer": "CTR_TORCH_PEER_DIR"}

ROOT = Path(__file__).parent.parent


def free_ports(count: int) -> list[int]:
    """Returns free ports of the loopback interface."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_worker(
    environment: dict[str, str],
    arguments: list[str],
    *,
    module: str = "benchmarks.train_worker",
    checkout: Path = ROOT,
    stderr: int | None = None,
) -> subprocess.Popen[str]:
    """Starts a worker, whose last line of output is its result."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        cwd=checkout,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def result_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a worker and returns its result."""
    output, _ = worker.communicate(timeout=600)
    if worker.returncode:
        raise SystemExit(f"a worker failed with exit code {worker.returncode}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def two_ceilings(batch_size: int) -> dict[str, Any]:
    """Measures the ceiling in two processes at once, on two cores that share caches and memory."""
    return {"examples_per_s": ceiling.measure_together(batch_size, 5.0, processes=2)}


def in_process(
    batch_size: int, threads: int, *, model: str = "ctr_dnn", compute: str = "float32"
) -> dict[str, Any]:
    """Trains in one process without servers."""
    arguments = worker_arguments("async", batch_size)
    more = ["--threads", str(threads), "--model", model, f"--set=train.compute={compute}"]
    return result_of(run_worker({}, [*arguments, *more]))


def cluster(
    mode: str,
    batch_size: int,
    *,
    servers: int = 2,
    workers: int = 2,
    settings: Sequence[str] = (),
    update_logs: Path | None = None,
) -> dict[str, Any]:
    """Trains in a mode, with `settings` of the job besides those of the mode; see `run_cluster`."""
    arguments = [*worker_arguments(mode, batch_size), *(f"--set={each}" for each in settings)]
    return run_cluster(arguments, servers=servers, workers=workers, update_logs=update_logs)


def run_cluster(
    arguments: list[str], *, servers: int = 2, workers: int = 2, update_logs: Path | None = None
) -> dict[str, Any]:
    """Trains with server and worker processes; returns worker 0's result, with the sum of all speeds.

    `update_logs` is the folder in which each server keeps its update log; None: they keep none.
    """
    ports = free_ports(servers)
    common = environment_of(ports, workers)
    with servers_at(ports, common, update_logs):
        running = [
            run_worker({**common, **worker_role(index)}, arguments) for index in range(workers)
        ]
        results = [result_of(worker) for worker in running]
    return {**results[0], "examples_per_s": sum(result["examples_per_s"] for result in results)}


def environment_of(ports: Sequence[int], workers: int) -> dict[str, str]:
    """Returns the environment that all processes of a job share."""
    return {
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(f"127.0.0.1:{port}" for port in ports),
        "PADDLE_TRAINERS_NUM": str(workers),
    }


def worker_role(index: int) -> dict[str, str]:
    """Returns what tells a worker from the other processes of its job."""
    return {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index)}


def start_server(
    port: int,
    common: dict[str, str],  # see `environment_of`
    *,
    update_log: Path | None = None,  # its folder; None: it keeps none
    checkout: Path = ROOT,
    stderr: Any = None,  # file for what it logs; None: nowhere
) -> subprocess.Popen[bytes]:
    """Starts a `ps-server` process, which exits when all workers have left."""
    role = {"TRAINING_ROLE": "PSERVER", "POD_IP": "127.0.0.1", "PADDLE_PORT": str(port)}
    options = [] if update_log is None else ["--update-log", str(update_log)]
    return subprocess.Popen(
        [sys.executable, "-m", "ctr_ps.ps_server.cli", "--bind", "127.0.0.1", *options],
        env={**os.environ, **common, **role},
        cwd=checkout,
        stderr=stderr or subprocess.DEVNULL,
    )


@contextlib.contextmanager
def servers_at(
    ports: list[int], common: dict[str, str], update_logs: Path | None = None
) -> Iterator[None]:
    """Runs a server at each port, each with a folder in `update_logs` if that is given."""
    processes = [
        start_server(
            port,
            common,
            update_log=None if update_logs is None else update_logs / str(index),
        )
        for index, port in enumerate(ports)
    ]
    try:
        yield
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def warmup_steps(mode: str, batch_size: int) -> int:
    """Returns the steps of a worker before the clock starts; async is young before, and slower."""
    is_young = mode in ("async", "bounded_staleness")
    return max(_WARMUP_STEPS[batch_size], BATCHES_IN_STEP // NUM_WORKERS * is_young)


def worker_arguments(mode: str, batch_size: int) -> list[str]:
    """Returns the arguments of benchmarks.train_worker for one case."""
    values = {
        "batch-size": batch_size,
        "steps": STEPS[batch_size],
        "warmup": warmup_steps(mode, batch_size),
    }
    arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return arguments + [f"--set={setting}" for setting in settings_of(mode, batch_size)]


Case = Callable[[int], dict[str, Any]]

CASES: dict[str, Case] = {
    "two_ceilings": two_ceilings,
    "in_process_1": lambda size: in_process(size, 1),
    "in_process_2": lambda size: in_process(size, 2),
    **{f"{mode}_2x2": partial(cluster, mode) for mode in MODES},
    "async_2x2_bfloat16_wire": partial(
        cluster, "async", settings=["strategy.async.wire_dtype=bfloat16"]
    ),
}
TORCH_CASES: dict[str, Case] = {
    "in_process_2_bfloat16": lambda size: in_process(size, 2, compute="bfloat16"),
    "torch_2": lambda size: in_process(size, 2, model=TORCH_MODEL),
    "torch_2_bfloat16": lambda size: in_process(size, 2, model=TORCH_MODEL, compute="bfloat16"),
}
"""In process with 2 threads, what needs PyTorch: bfloat16, and CTR-DNN as a module."""


def main() -> None:
    """Measures all cases of each batch size and prints their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, action="append", choices=BATCH_SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    named = [*CASES, *TORCH_CASES]
    parser.add_argument("--case", action="append", choices=named, help=f"default: {list(CASES)}")
    for name, what in (
        ("--peer", "PaddlePaddle's async and geo"),
        ("--torch-peer", "plain PyTorch, and the cases here that need it,"),
    ):
        variable = PEER_FOLDERS[name]
        parser.add_argument(
            name,
            type=peer_folder,
            nargs="?",
            const=os.environ.get(variable, ""),
            metavar="FOLDER",
            help=f"{what} too; the folder has a run_peer.py, by default that of {variable}",
        )
    options = parser.parse_args()
    wanted = options.case or [*CASES, *(TORCH_CASES if options.torch_peer else ())]
    own = {name: case for name, case in {**CASES, **TORCH_CASES}.items() if name in wanted}
    others: dict[str, PeerCase] = {}
    if options.peer:
        others |= paddle_cases(options.peer)
    if options.torch_peer:
        # Plain PyTorch in the precisions of the cases: without bfloat16 instructions that one takes minutes.
        precisions = {name.endswith("_bfloat16") for name in wanted}
        others |= {
            name: case
            for name, case in torch_cases(options.torch_peer).items()
            if name.endswith("_bfloat16") in precisions
        }
    for batch_size in options.batch_size or BATCH_SIZES:
        steps = STEPS[batch_size]
        cases = {**own, **{name: partial(_of_peer, run, steps) for name, run in others.items()}}
        report(batch_size, *measure(batch_size, cases, options.rounds))


def _of_peer(run: PeerCase, steps: int, batch_size: int) -> dict[str, Any]:
    return run(batch_size, steps)


def measure(
    batch_size: int, cases: Mapping[str, Case], rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Runs all cases a number of times; a peer that fails is not run again, and the others go on.

    Returns:
        The speeds of each case and of the ceiling, and what else a case says: of one that failed the `error`.
    """
    speeds: dict[str, list[float]] = {name: [] for name in ("ceiling", *cases)}
    details: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, run in cases.items():
            if "error" in details.get(name, {}):
                continue
            speeds["ceiling"].append(ceiling.measure(batch_size, 2.0))
            try:
                details[name] = run(batch_size)
            except PeerError as error:
                details[name] = {"error": str(error)}
            else:
                speeds[name].append(details[name]["examples_per_s"])
    return speeds, details


def report(
    batch_size: int, speeds: Mapping[str, list[float]], details: Mapping[str, dict[str, Any]]
) -> None:
    """Prints one line a case: median, lowest and highest speed, and ratios within this run."""
    medians = {name: statistics.median(values) for name, values in speeds.items() if values}
    for name, values in speeds.items():
        detail = details.get(name, {})
        if "error" in detail:
            say("train", case=name, batch_size=batch_size, error=detail["error"])
            continue
        median = medians[name]
        line = spread("examples_per_s", values)
        line["of_ceiling"] = round(median / medians["ceiling"], 3)
        precision = "_bfloat16" if name.endswith("_bfloat16") else ""
        if plain := medians.get(f"peer_torch_2{precision}"):
            line["of_plain_torch"] = round(median / plain, 3)
        if name == "async_2x2":
            line["sparse_merge"], line["dense_merge"] = MERGES[batch_size]
        if detail.get("auc"):
            line["auc"] = detail["auc"]
        say("train", case=name, batch_size=batch_size, **line)


if __name__ == "__main__":
    main()
