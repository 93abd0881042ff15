"""The wire alone: pulls and pushes over loopback to one `ps-server` process, no model.

    python -m benchmarks.bench_wire              # one JSON line a case
    python -m benchmarks.bench_wire --seconds 1  # shorter

Processor time is that of client and server together, a call; it counts everything: encoding, both
gRPC stacks, the tables. `in_flight` calls overlap, as those of a trainer do.
"""

import argparse
import itertools
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.bench_train import environment_of, free_ports, start_server
from benchmarks.figures import say
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Future, Missing, PushId, Version
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect

DIM = 10
NUM_KEYS = (1_800, 20_000)
DENSE_LENGTH = 430_000
IN_FLIGHT = (1, 4)
TABLE = TableSpec(
    name="table",
    dim=DIM,
    initializer=InitializerSpec(kind="uniform", scale=0.1),
    optimizer=OptimizerSpec(name="adagrad"),
)

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Case:
    """A call to measure."""

    name: str
    size: int  # keys of dim 10, or dense elements
    payload_bytes: int  # of the numbers that one call moves, in both directions
    start: Callable[[], Future[object]]  # sends one call


@contextmanager
def server_processes(number: int, workers: int = 1) -> Iterator[tuple[list[str], list[int]]]:
    """Runs servers of a job with some workers; yields their endpoints and process ids."""
    ports = free_ports(number)
    common = environment_of(ports, workers)
    processes = [start_server(port, common) for port in ports]
    try:
        yield [f"127.0.0.1:{port}" for port in ports], [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


def cases(client: ClusterClient) -> Iterator[Case]:
    """Yields the cases, over a table that holds the keys already."""
    client.create_table(TABLE)
    segment = DenseSegment(length=DENSE_LENGTH, initializer=TABLE.initializer)
    client.create_dense(DenseSpec(name="tower", segments=(segment,), optimizer=TABLE.optimizer))
    sequence = itertools.count()

    def push(gradients: Gradients) -> Future[Version]:
        return client.push_grad(gradients, push_id(next(sequence)))

    random = np.random.default_rng(0)
    for num_keys in NUM_KEYS:
        keys = random.integers(0, 2**63, num_keys, dtype=np.uint64)
        values = random.random((num_keys, DIM), dtype=np.float32)
        sparse = Gradients(sparse={"table": SparseGrad(keys, values, 512)})
        payload = keys.nbytes + values.nbytes
        yield Case("push", num_keys, payload, partial(push, sparse))
        yield Case(
            "pull",
            num_keys,
            payload,
            partial(client.pull_sparse, {"table": keys}, missing=Missing.INITIAL),
        )
    vector = np.zeros(DENSE_LENGTH, np.float32)
    dense = Gradients(dense={"tower": DenseGrad(vector, 512)})
    yield Case("push_dense", DENSE_LENGTH, vector.nbytes, partial(push, dense))
    into = {"tower": np.empty(DENSE_LENGTH, np.float32)}
    yield Case("pull_dense", DENSE_LENGTH, vector.nbytes, lambda: client.pull_dense(into))


def push_id(sequence: int, worker: int = 0, incarnation: int = 0) -> PushId:
    """Returns the id of a worker's push of one batch; one whose `sequence` comes again is not applied."""
    return PushId(
        worker=worker,
        incarnation=incarnation,
        sequence=sequence,
        step=0,
        examples=512,
        batches=1,
        pulled=0,
    )


def own_cpu_s() -> float:
    """Returns the processor time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_s_of(process: int) -> float:
    """Returns the processor time of another process, to 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measure(case: Case, in_flight: int, server: int, seconds: float) -> dict[str, object]:
    """Repeats a call for some seconds, and returns the figures of one."""
    waiting: deque[Future[object]] = deque()

    def repeat(limit_s: float) -> int:
        calls, end = 0, time.perf_counter() + limit_s
        while time.perf_counter() < end:
            waiting.append(case.start())
            if len(waiting) >= in_flight:
                waiting.popleft().result()
            calls += 1
        return calls

    repeat(0.2)
    cpu = (own_cpu_s(), cpu_s_of(server))
    start = time.perf_counter()
    calls = repeat(seconds)
    wall_s = time.perf_counter() - start
    client_us = (own_cpu_s() - cpu[0]) / calls * 1e6
    server_us = (cpu_s_of(server) - cpu[1]) / calls * 1e6
    while waiting:
        waiting.popleft().result()
    return {
        "case": case.name,
        "size": case.size,
        "in_flight": in_flight,
        "calls_per_s": round(calls / wall_s),
        "mb_per_s": round(calls * case.payload_bytes / wall_s / 1e6),
        "cpu_us": round(client_us + server_us),
        "client_cpu_us": round(client_us),
        "server_cpu_us": round(server_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case; default 2")
    seconds = parser.parse_args().seconds
    keep_freed_memory()
    with server_processes(1) as (endpoints, (server,)), connect(endpoints) as client:
        client.join(0, 0, terms={}).result()
        for case in cases(client):
            for in_flight in IN_FLIGHT:
                say("wire", **measure(case, in_flight, server, seconds))


if __name__ == "__main__":
    main()
