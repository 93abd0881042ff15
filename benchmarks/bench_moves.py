"""Moves of shards under full load: `python -m benchmarks.bench_moves [--rows 10000000]`.

Two servers with rows of dim 10 (Adagrad), to which two clients push all the time; a third server is added,
then two are drained. Says for each move seconds a GiB, how long calls waited and pushes took, the pushes of
the worst second as a share of those of a second before, and the most memory of the servers that shards leave
as a share of that before.
"""

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import ModelState, PushId, RowStates
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.extras.moves.move import Move, connected, states_of, weights_of
from ctr_ps.ps_worker.extras.moves.plan import with_server, without_server

DIM, KEYS_A_PUSH, PART_ROWS = 10, 2_000, 200_000
NUM_CLIENTS = 2
TABLE = TableSpec(
    name="embedding",
    dim=DIM,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="adagrad"),
)
USUAL_S = 5.0
"""Pushes are counted for so long before a move."""
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    with ExitStack() as stack:
        ports = [free_port() for _ in range(3)]
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        servers = [stack.enter_context(server(endpoints[:2], port)) for port in ports]
        loads = [stack.enter_context(Load(endpoints[:2], n, rows)) for n in range(NUM_CLIENTS)]
        for load in loads:
            load.wait()
        transport = GrpcTransport(endpoints[:2])
        stack.callback(transport.close)
        shard_map = connected(transport)
        for what in ("add server 2", "drain server 1", "drain server 2"):
            time.sleep(USUAL_S + 1.0)
            weights = weights_of(states_of(transport))
            after = (
                with_server(shard_map, endpoints[2], weights)
                if what.startswith("add")
                else without_server(shard_map, int(what[-1]), weights)
            )
            memory = Memory([servers[n] for n in sources(shard_map, after)])
            before = time.monotonic()
            move = Move(transport, states_of(transport), after)
            with memory:
                move.run()
            seconds = time.monotonic() - before
            shard_map = after
            say(what, move, before, seconds, loads, memory)


def say(
    what: str, move: Move, began: float, seconds: float, loads: list["Load"], memory: "Memory"
) -> None:
    """Prints the figures of a move that began then."""
    ended, took = np.concatenate([load.pushes() for load in loads]).T
    usual = np.sum((ended > began - USUAL_S) & (ended <= began)) / USUAL_S
    edges = np.arange(began, began + max(seconds, 1.0) + 1e-9, 1.0)
    worst = np.histogram(ended, edges)[0].min() / usual
    during = 1e3 * took[(ended > began) & (ended - took < began + seconds)]
    done = move.progress
    print(
        f"{what}: {done.copied_rows:,} rows, {done.copied_bytes / MIB:.0f} MiB in {seconds:.1f} s "
        f"({seconds * 1024 * MIB / done.copied_bytes:.1f} s a GiB); calls waited "
        f"{1e3 * done.pause_s:.0f} ms; pushes took {np.percentile(during, 99):.0f} ms (p99), "
        f"{during.max():.0f} ms (longest); worst second {worst:.2f} of {usual:.0f} pushes/s; memory of "
        f"sources {memory.most:.2f}",
        flush=True,
    )


def sources(before: ShardMap, after: ShardMap) -> list[int]:
    """Returns the servers that places leave."""
    owners = zip(before.owners, after.owners, strict=True)
    return sorted({old for old, new in owners if old != new})


class Load:
    """A process that pushes all the time."""

    def __init__(self, endpoints: list[str], worker: int, rows: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=push_always, args=(endpoints, worker, rows, theirs))

    def __enter__(self) -> "Load":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def wait(self) -> None:
        """Waits until it pushes."""
        self._pipe.recv()

    def pushes(self) -> NDArray[np.float64]:
        """Returns when each push since the last call ended, and how long it took, in seconds, [N, 2]."""
        self._pipe.send(None)
        return np.array(self._pipe.recv())


def push_always(endpoints: list[str], worker: int, rows: int, pipe: Connection) -> None:
    with connect(endpoints) as client:
        client.join(worker, 7, terms={}).result()
        client.create_table(TABLE)
        sequence = fill(client, worker, rows)
        random = np.random.default_rng(worker)
        pipe.send(None)
        pushes: list[tuple[float, float]] = []
        while True:
            keys = np.unique(random.integers(0, rows, KEYS_A_PUSH).astype(np.uint64))
            grad = SparseGrad(keys, np.ones((keys.size, DIM), np.float32), 100)
            gradients = Gradients(sparse={TABLE.name: grad}, dense={})
            began = time.monotonic()
            client.push_grad(gradients, push_id(worker, sequence)).result()
            ended = time.monotonic()
            pushes.append((ended, ended - began))
            sequence += 1
            if pipe.poll():
                pipe.recv()
                pipe.send(pushes)
                pushes = []


def push_id(worker: int, sequence: int) -> PushId:
    return PushId(
        worker=worker,
        incarnation=7,
        sequence=sequence,
        step=sequence + 1,
        examples=100,
        batches=1,
        pulled=2**40,
    )


def fill(client: ClusterClient, worker: int, rows: int) -> int:
    """Writes the worker's part of the rows; returns the number of pushes."""
    starts = range(worker * PART_ROWS, rows, NUM_CLIENTS * PART_ROWS)
    for number, start in enumerate(starts):
        keys = np.arange(start, min(start + PART_ROWS, rows), dtype=np.uint64)
        values = np.full((keys.size, DIM), 0.1, np.float32)
        state = RowStates(keys=keys, weights=values, state=values, optimizer="adagrad")
        client.push_state(ModelState({TABLE.name: state}, {}), push_id(worker, number)).result()
    return len(starts)


class Memory:
    """The memory of processes within a `with` block."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.most = 0.0  # as a share of that before, of the process with the largest share
        self._before = {each: resident(each) for each in processes}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            shares = (resident(each) / before for each, before in self._before.items())
            self.most = max(self.most, *shares)


def server(endpoints: list[str], port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(NUM_CLIENTS),
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": str(port),
    }
    command = [sys.executable, "-m", "ctr_ps.ps_server.cli", "--spare", "--log-level=warning"]
    return Stopped(command, env=environment)


class Stopped(subprocess.Popen[bytes]):
    """A process that is killed when its `with` block ends."""

    def __exit__(self, *arguments: object) -> None:
        self.kill()
        self.wait()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def resident(process: subprocess.Popen[bytes]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


if __name__ == "__main__":
    main()
