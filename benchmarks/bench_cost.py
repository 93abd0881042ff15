"""What a synchronous step costs: a model with measured constants, checked on this machine, printed for more.

    python -m benchmarks.bench_cost                  # B = 100, 512; a JSON line for each size of a cluster
    python -m benchmarks.bench_cost --gbit 25 --rtt-us 50

Of W workers and S servers, with constants that benchmarks.bench_step measures for one worker:

    worker(S), servers(S)    processor time of a step, of the worker and of its servers together: linear in S,
                             as a step is a message to each server, of one size in sum
    alone(S)                 how long a step of one worker takes: less than all of it one after the other, as
                             servers read while a worker still sends
    dense                    of servers(S), what a step takes once, not once a worker: dense parameters
    busy                     how much longer work takes where all cores have some
    work   = W (servers(S) - dense) + dense
    chain  = alone(S) + (work - servers(S)) / S                   what other workers bring comes behind
    step   = max(chain, busy (W worker(S) + work) / cores)        on one machine
    step   = keys, model, tables                                  in process, with one thread: W = 1, S = 0
    step   = chain + rtt + 2 bytes max(1, W / S) / rate           with a machine for each process; bytes: what
                                                                  a worker sends, or gets

It leaves out that workers differ in speed, and what other tenants do with the network.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks import bench_step, ceiling
from benchmarks.bench_train import cluster, in_process
from benchmarks.bench_wire import push_id
from benchmarks.figures import say
from benchmarks.rows import batches
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.protos.chunking import KEY_BYTES, VALUE_BYTES
from ctr_ps.protos.gradients import DenseGrad, Gradients
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.training.lookups import keys_of_batch

BATCH_SIZES = (100, 512)
MEASURED_SERVERS = (1, 2, 4)
CHECKED = (1, 2, 4)
"""Workers, and as many servers, of the clusters that are measured."""

NODES = (4, 8, 16, 32, 64)
"""Machines for which the model is printed, half of them servers."""

ALONE = ("keys", "compute", "scan", "apply")
"""Parts of a step that need no servers."""

ROUNDS = 3
CEILING_S = 3.0
WARMUP_PUSHES, PUSHES = 20, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a batch costs: seconds of processor time, and bytes; (a, b) of S servers are a + b S seconds."""

    batch_size: int
    worker: tuple[float, float]
    servers: tuple[float, float]  # of all together
    elapsed: tuple[float, float]  # how long the step lasts
    dense_s: float  # of the servers' time, what a step takes once, however many workers there are
    in_process_s: float  # of a step in process, without calls
    num_bytes: float  # that a worker sends, and about as many that it gets

    def costs(self, workers: int, servers: int) -> tuple[float, float]:
        """Returns the processor time of all workers and of all servers in a step."""
        one = self.servers[0] + self.servers[1] * servers
        of_servers = workers * (one - self.dense_s) + self.dense_s
        return workers * (self.worker[0] + self.worker[1] * servers), of_servers

    def chain_s(self, workers: int, servers: int) -> float:
        """Returns the seconds of a step in which nothing waits for a core, or for a network."""
        (_, of_servers), (_, of_one) = self.costs(workers, servers), self.costs(1, servers)
        alone_s = self.elapsed[0] + self.elapsed[1] * servers
        return alone_s + (of_servers - of_one) / servers

    def on_one_machine(self, workers: int, servers: int, *, cores: int, busy: float) -> float:
        """Returns examples/s of a cluster whose processes share cores, all of them busy."""
        together_s = busy * sum(self.costs(workers, servers)) / cores
        return workers * self.batch_size / max(self.chain_s(workers, servers), together_s)

    def on_many(self, workers: int, servers: int, *, rate: float, rtt_s: float) -> float:
        """Returns examples/s of a cluster with a machine for each process; `rate` in bytes/s."""
        network_s = rtt_s + 2 * self.num_bytes * max(1.0, workers / servers) / rate
        return workers * self.batch_size / (self.chain_s(workers, servers) + network_s)


def constants_of(batch_size: int) -> Constants:
    """Measures one worker with some numbers of servers."""
    lines = [bench_step.measure(batch_size, servers) for servers in MEASURED_SERVERS]
    model = build_model("ctr_dnn", criteo_schema(), {})
    rows = list(batches(20, batch_size, seed=2))
    widths = {table.name: table.dim for table in model.tables}
    keys = [keys_of_batch(batch, model.tables).unique for batch in rows]
    num_bytes = statistics.mean(
        sum((KEY_BYTES + VALUE_BYTES * widths[name]) * column.size for name, column in each.items())
        for each in keys
    )
    return Constants(
        batch_size=batch_size,
        worker=_line(lines, "worker_us"),
        servers=_line(lines, "servers_us"),
        elapsed=_line(lines, "elapsed_us"),
        dense_s=dense_s(model.num_params),
        in_process_s=sum(lines[0][f"{part}_us"] for part in ALONE) / 1e6,
        num_bytes=num_bytes + VALUE_BYTES * model.num_params,
    )


def busy_of(batch_size: int, cores: int) -> float:
    """Returns how much longer products of matrices take on each core while the others compute them, too."""
    alone = ceiling.measure(batch_size, CEILING_S)
    return cores * alone / ceiling.measure_together(batch_size, CEILING_S, processes=cores)


def dense_s(length: int) -> float:
    """Returns the seconds of processor time in which Adam applies a gradient of `length` numbers."""
    store = ParameterStore()
    store.join(0, 0, terms={}).result()
    segment = DenseSegment(length=length, initializer=InitializerSpec())
    adam = OptimizerSpec(name="adam")
    store.create_dense(DenseSpec(name="tower", segments=(segment,), optimizer=adam))
    gradients = Gradients(dense={"tower": DenseGrad(np.ones(length, np.float32), 1)})

    def push(numbers: Iterable[int]) -> None:
        for number in numbers:
            store.push_grad(gradients, push_id(number)).result()

    push(range(WARMUP_PUSHES))
    start = time.process_time()
    push(range(WARMUP_PUSHES, WARMUP_PUSHES + PUSHES))
    return (time.process_time() - start) / PUSHES


def _line(measured: list[dict[str, float]], part: str) -> tuple[float, float]:
    """Returns (a, b) of a + b S in seconds, the least squares through what was measured."""
    slope, start = np.polyfit(MEASURED_SERVERS, [line[part] / 1e6 for line in measured], 1)
    return float(start), float(slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, action="append", choices=BATCH_SIZES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument(
        "--gbit", type=float, default=10.0, help="of a machine's network; default 10"
    )
    parser.add_argument("--rtt-us", type=float, default=100.0, help="default 100")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    for batch_size in options.batch_size or BATCH_SIZES:
        constants, busy = constants_of(batch_size), busy_of(batch_size, cores)
        runs = {0: partial(in_process, batch_size, 1)} | {
            number: partial(cluster, "sync", batch_size, workers=number, servers=number)
            for number in CHECKED
        }
        for number, run in runs.items():
            measured = statistics.median(run()["examples_per_s"] for _ in range(options.rounds))
            predicted = (
                constants.on_one_machine(number, number, cores=cores, busy=busy)
                if number
                else batch_size / constants.in_process_s
            )
            line = {"predicted": round(predicted), "measured": round(measured)}
            share = round(predicted / measured, 3)
            _print(batch_size, max(1, number), number, **line, of_measured=share)
        for nodes in NODES:
            half = nodes // 2
            predicted = constants.on_many(
                half, half, rate=options.gbit * 1e9 / 8, rtt_s=options.rtt_us / 1e6
            )
            _print(batch_size, half, half, machines=nodes, predicted=round(predicted))


def _print(batch_size: int, workers: int, servers: int, **figures: float) -> None:
    sizes = {"batch_size": batch_size, "workers": workers, "servers": servers}
    say("cost", **sizes, **figures)


if __name__ == "__main__":
    main()
