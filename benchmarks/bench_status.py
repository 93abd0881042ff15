"""How long `status()` takes while large synchronous steps are applied, in process and over gRPC.

    python -m benchmarks.bench_status              # one JSON line a case
    python -m benchmarks.bench_status --seconds 5  # shorter

One worker pushes steps of some 50 ms without a pause, in a thread or a process of its own; meanwhile the
status is asked for every 2 ms, as it was before the first push (`idle_p99_ms`: the noise of the machine). A
health check takes the same way through a server's event loop.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.background import meanwhile
from benchmarks.bench_wire import push_id, server_processes
from benchmarks.figures import say
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.precompile import KERNELS
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.connect import connect

DIM = 1
NUM_KEYS = 400_000
PAUSE_S = 0.002

TABLE = TableSpec(
    name="table",
    dim=DIM,
    initializer=InitializerSpec(kind="uniform", scale=0.1),
    optimizer=OptimizerSpec(name="adam"),
)


def push_steps(store: Store, is_over: Callable[[], bool]) -> None:
    """Pushes synchronous steps until told to end."""
    random = np.random.default_rng(0)
    keys = random.integers(0, 2**63, NUM_KEYS, dtype=np.uint64)
    values = random.random((NUM_KEYS, DIM), dtype=np.float32)
    gradients = Gradients(sparse={"table": SparseGrad(keys, values, 512)})
    step = 0
    while not is_over():
        push = replace(push_id(step), step=step, pulled=step)
        store.push_grad(gradients, push, at=step).result()
        step += 1


def push_steps_to(endpoint: str, seconds: float) -> None:
    """Pushes steps to a server from a process of its own."""
    end = time.perf_counter() + seconds
    with connect([endpoint]) as client:
        client.join(0, 0, terms={}).result()
        client.create_table(TABLE)
        push_steps(client, lambda: time.perf_counter() > end)


def latencies_of(store: Store, seconds: float) -> list[float]:
    """Asks for the status again and again; returns the seconds that each call took."""
    took_s, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        store.status()
        took_s.append(time.perf_counter() - before)
        time.sleep(PAUSE_S)
    return took_s


def poll(name: str, store: Store, seconds: float, idle_s: list[float]) -> dict[str, object]:
    """Returns the figures of a store to which steps are pushed; `idle_s` are those from before."""
    while store.status().version < 3:  # rows are created, and all code is loaded
        time.sleep(PAUSE_S)
    first, start = store.status().version, time.perf_counter()
    took_s = latencies_of(store, seconds)
    steps = store.status().version - first
    p50, p99, longest = np.percentile(took_s, [50, 99, 100]) * 1e3
    return {
        "case": name,
        "steps": steps,
        "ms_a_step": round((time.perf_counter() - start) / max(steps, 1) * 1e3, 1),
        "calls": len(took_s),
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "max_ms": round(longest, 2),
        "idle_p99_ms": round(float(np.percentile(idle_s, 99)) * 1e3, 2),
    }


def measure_in_process(seconds: float) -> dict[str, object]:
    """Measures a store in this process."""
    KERNELS.prepare(TABLE)
    store = ParameterStore()
    store.create_table(TABLE)
    idle_s = latencies_of(store, seconds / 4)
    with meanwhile(lambda is_over: push_steps(store, is_over.is_set)):
        return poll("in_process", store, seconds, idle_s)


def measure_server(seconds: float) -> dict[str, object]:
    """Measures one `ps-server` process over loopback."""
    with server_processes(1) as (endpoints, _), connect(endpoints) as client:
        idle_s = latencies_of(client, seconds / 4)
        processes = multiprocessing.get_context("spawn")
        pusher = processes.Process(target=push_steps_to, args=(endpoints[0], seconds + 5.0))
        pusher.start()
        try:
            return poll("grpc", client, seconds, idle_s)
        finally:
            pusher.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case; default 20")
    seconds = parser.parse_args().seconds
    keep_freed_memory()
    for measure in (measure_in_process, measure_server):
        say("status", **measure(seconds))


if __name__ == "__main__":
    main()
