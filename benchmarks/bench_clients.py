"""One server, or some, and more and more workers: whether the throughput holds.

    python -m benchmarks.bench_clients                        # 1, 4, 8, 16 workers; a JSON line each
    python -m benchmarks.bench_clients --workers 4 --workers 32
    python -m benchmarks.bench_clients --servers 4            # on a machine that has cores for them

Each worker is a process that pulls rows and pushes gradients of 1,800 keys of its own, as a batch of 100 has
them, without a model; its next pull is on its way while the push is. All start together, behind a barrier.
`of_4` is the throughput beside that of 4 workers in the same run. Workers and server share the machine's
cores, so what one worker more costs beyond its calls shows as less than 1.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

from benchmarks.bench_train import ROOT
from benchmarks.bench_wire import DIM, TABLE, push_id, server_processes
from benchmarks.figures import say, spread
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.store import Future, Missing
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect

NUM_WORKERS = (1, 4, 8, 16)
NUM_KEYS = 1_800
INCARNATION = 1
NUM_BATCHES = 16
"""Batches of keys that a worker goes through again and again."""

WARMUP_S = 1.0
LIMIT_S = 120.0


class Worker:
    """One of the workers, in a process of its own."""

    def __init__(self, client: ClusterClient, worker: int) -> None:
        """Joins, and declares the table."""
        self._client = client
        self._worker = worker
        client.join(worker, INCARNATION, terms={}).result()
        client.create_table(TABLE)
        random = np.random.default_rng(worker)
        values = random.random((NUM_KEYS, DIM), dtype=np.float32)
        self._gradients = [
            SparseGrad(random.integers(0, 2**63, NUM_KEYS, dtype=np.uint64), values, 100)
            for _ in range(NUM_BATCHES)
        ]
        self._steps = 0

    def barrier(self) -> None:
        """Waits for the other workers."""
        self._client.barrier("bench", self._worker, step=0).result()

    def run(self, seconds: float) -> int:
        """Pulls and pushes for some seconds; returns how many batches."""
        before, end = self._steps, time.perf_counter() + seconds
        pushed: Future[object] | None = None
        pulled = self._pull()
        while time.perf_counter() < end:
            pulled.result()
            if pushed is not None:
                pushed.result()
            pushed = self._push()
            self._steps += 1
            pulled = self._pull()
        pulled.result()
        if pushed is not None:
            pushed.result()
        return self._steps - before

    @property
    def _gradient(self) -> SparseGrad:
        return self._gradients[self._steps % NUM_BATCHES]

    def _pull(self) -> Future[object]:
        return self._client.pull_sparse({TABLE.name: self._gradient.keys}, missing=Missing.INITIAL)

    def _push(self) -> Future[object]:
        gradients = Gradients(sparse={TABLE.name: self._gradient})
        return self._client.push_grad(gradients, push_id(self._steps, self._worker, INCARNATION))


def work(endpoints: list[str], index: int, seconds: float) -> None:
    """Is a worker, and prints how many batches it did in a second."""
    keep_freed_memory()
    with connect(endpoints) as client:
        worker = Worker(client, index)
        worker.run(WARMUP_S)
        worker.barrier()
        start = time.perf_counter()
        batches = worker.run(seconds)
        print(json.dumps(batches / (time.perf_counter() - start)), flush=True)
        worker.barrier()


def measure(num_workers: int, num_servers: int, seconds: float) -> float:
    """Returns the batches a second of all workers."""
    with server_processes(num_servers, workers=num_workers) as (endpoints, _):
        where = ["--endpoints", ",".join(endpoints)]
        command = [sys.executable, "-m", "benchmarks.bench_clients", *where]
        workers = [
            subprocess.Popen(
                [*command, "--index", str(index), "--seconds", str(seconds)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(num_workers)
        ]
        try:
            outputs = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker failed; see above")
        return sum(map(json.loads, outputs))


def main() -> None:
    """Prints one JSON line for each number of workers: medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, action="append", help=f"default: {NUM_WORKERS}")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each; default 5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoints", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.endpoints:
        work(options.endpoints.split(","), options.index, options.seconds)
        return
    numbers = options.workers or NUM_WORKERS
    speeds: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(options.rounds):
        for number, found in speeds.items():
            found.append(measure(number, options.servers, options.seconds))
    medians = {number: statistics.median(found) for number, found in speeds.items()}
    for number, found in speeds.items():
        line = spread("batches_per_s", found)
        if 4 in medians:
            line["of_4"] = round(medians[number] / medians[4], 3)
        say("clients", workers=number, servers=options.servers, **line)


if __name__ == "__main__":
    main()
