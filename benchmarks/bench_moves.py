"""Moves of shards under full load: `python -m benchmarks.bench_moves [--rows 10000000]`.

Two servers with rows of dim 10 (Adagrad), to which two clients push all the time; a third server is added,
then two are drained. Says for each move seconds a GiB, how long calls waited, the pushes of the worst second
as a share of those of a second before, and the memory of server 0 afterwards as a share of that before.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import ModelState, PushId, RowStates
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.extras.moves.move import Move, connected, states_of, weights_of
from ctr_ps.ps_worker.extras.moves.plan import with_server, without_server

DIM, KEYS_A_PUSH, PART_ROWS = 10, 2_000, 200_000
TABLE = TableSpec(
    name="embedding",
    dim=DIM,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="adagrad"),
)
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000)
    rows = parser.parse_args().rows
    with ExitStack() as stack:
        ports = [free_port() for _ in range(3)]
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        servers = [stack.enter_context(server(endpoints[:2], port)) for port in ports]
        clients = [stack.enter_context(connect(endpoints[:2])) for _ in range(2)]
        for worker, client in enumerate(clients):
            client.join(worker, 7, terms={})
        for worker, client in enumerate(clients):
            client.join(worker, 7, terms={}).result()
            client.create_table(TABLE)
        fill(clients[0], rows)
        loads = [stack.enter_context(Load(client, n, rows)) for n, client in enumerate(clients)]
        time.sleep(5.0)
        transport = GrpcTransport(endpoints[:2], stream=False)
        stack.callback(transport.close)
        shard_map = connected(transport)
        for what in ("add server 2", "drain server 1", "drain server 2"):
            memory = resident(servers[0])
            weights = weights_of(states_of(transport))
            after = (
                with_server(shard_map, endpoints[2], weights)
                if what.startswith("add")
                else without_server(shard_map, int(what[-1]), weights)
            )
            for load in loads:
                load.reset()
            before = time.monotonic()
            move = Move(transport, states_of(transport), after)
            move.run()
            seconds = time.monotonic() - before
            shard_map = after
            done = move.progress
            counts = [load.by_second(before, seconds) for load in loads]
            per_second = np.sum(counts, axis=0)
            usual = np.mean([load.usual for load in loads]) * len(loads)
            pauses = 1e3 * np.max([load.longest for load in loads])
            print(
                f"{what}: {done.copied_rows:,} rows, {done.copied_bytes / MIB:.0f} MiB in {seconds:.1f} s "
                f"({seconds * 1024 * MIB / done.copied_bytes:.1f} s a GiB); calls waited "
                f"{1e3 * done.pause_s:.0f} ms, longest push {pauses:.0f} ms; worst second "
                f"{per_second.min() / usual:.2f} of {usual:.0f} pushes/s; memory of server 0 "
                f"{resident(servers[0]) / memory:.2f}",
                flush=True,
            )
            time.sleep(3.0)


class Load:
    """A client that pushes all the time, in a thread."""

    def __init__(self, client: ClusterClient, worker: int, rows: int) -> None:
        self._client, self._worker, self._rows = client, worker, rows
        self._stop = threading.Event()
        self._times: list[float] = []
        self.longest = 0.0
        self.usual = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def reset(self) -> None:
        """Begins to count anew; `usual` are the pushes a second until now."""
        now = time.monotonic()
        self.usual = sum(now - 3.0 < at for at in self._times) / 3.0
        self._times, self.longest = [], 0.0

    def by_second(self, since: float, seconds: float) -> np.ndarray:
        """Returns the pushes of each whole second from `since` on."""
        edges = np.arange(since, since + max(seconds, 1.0) + 1e-9, 1.0)
        return np.histogram(self._times, edges)[0]

    def _run(self) -> None:
        random = np.random.default_rng(self._worker)
        sequence = -(-self._rows // PART_ROWS) if self._worker == 0 else 0  # after those of `fill`
        while not self._stop.is_set():
            keys = np.unique(random.integers(0, self._rows, KEYS_A_PUSH).astype(np.uint64))
            grad = SparseGrad(keys, np.ones((keys.size, DIM), np.float32), 100)
            began = time.monotonic()
            self._client.push_grad(
                Gradients(sparse={TABLE.name: grad}, dense={}), push_id(self._worker, sequence)
            ).result()
            now = time.monotonic()
            self.longest = max(self.longest, now - began)
            self._times.append(now)
            sequence += 1


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


def fill(client: ClusterClient, rows: int) -> None:
    for number, start in enumerate(range(0, rows, PART_ROWS)):
        keys = np.arange(start, min(start + PART_ROWS, rows), dtype=np.uint64)
        values = np.full((keys.size, DIM), 0.1, np.float32)
        state = RowStates(keys=keys, weights=values, state=values, optimizer="adagrad")
        client.push_state(ModelState({TABLE.name: state}, {}), push_id(0, number)).result()


def server(endpoints: list[str], port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": "2",
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
    import socket

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def resident(process: subprocess.Popen[bytes]) -> int:
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


if __name__ == "__main__":
    main()
