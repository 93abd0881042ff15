"""Where the processor time of a synchronous step goes, by part: worker, servers, and the calls between them.

    python -m benchmarks.bench_step                  # B = 100, 512, 4096; a JSON line each
    python -m benchmarks.bench_step --servers 4 --batch-size 512

One worker trains CTR-DNN in `sync` on servers, twice: on stores of this process, by calls that are encoded,
decoded and handled here, each part under a clock of this thread's processor time; and on `ps-server`
processes. What the second takes more, on both sides together, is gRPC, sockets, and going from thread to
thread.

    keys       the unique keys of a batch
    compute    forward and backward
    encode     arrays -> messages -> bytes, on both sides
    decode     bytes -> messages -> arrays, on both sides
    scan       rows and dense parameters that a pull reads
    apply      gradients that a step adds to rows and dense parameters
    client     the rest of a worker: routing keys, checking and cutting a push, putting answers together
    calls      what processes take more
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from benchmarks.bench_model import model_step
from benchmarks.bench_wire import cpu_s_of, own_cpu_s, server_processes
from benchmarks.figures import say
from benchmarks.rows import batches
from benchmarks.train_worker import job_of
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.protos.futures import Answer, Answered
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.store import Member
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.encoding.codec import Codec
from ctr_ps.ps_server.rpc.handlers import Handlers, answer_of_parts
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import connect
from ctr_ps.ps_worker.communicators.lockstep import SyncCommunicator
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.training.lookups import keys_of_batch
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.step_loop import StepLoop

STEPS = {100: 600, 512: 300, 4096: 60}
WARMUP_STEPS = {100: 100, 512: 60, 4096: 10}
SCANS = frozenset({"PullSparse", "PullDense"})

T = TypeVar("T")


class Clock:
    """Seconds of processor time of this thread, by part of a step."""

    def __init__(self) -> None:
        """Has measured nothing."""
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, part: str, work: Callable[[], T]) -> T:
        """Returns what `work` returns, and adds the time it took."""
        start = time.thread_time()
        try:
            return work()
        finally:
            self.seconds[part] += time.thread_time() - start


class _AtOnce(Answered[Any]):
    """An answer that was there from the start."""

    def sent(self) -> Any:
        """No-op: no call is made again, as no shard moves."""

    def wait(self, seconds: float) -> bool:
        return True

    def when_failed(self, tell: Callable[[Exception], None]) -> None:
        """No-op: it has not failed."""

    def fail(self, error: Exception) -> None:
        """No-op: it has ended."""


class TimedTransport:
    """Calls stores of this process as servers would be called, under a clock."""

    servers_recover = False
    retries = 0

    def __init__(self, stores: Sequence[ParameterStore], clock: Clock) -> None:
        """Calls `stores`, in their order."""
        endpoints = [f"store-{index}:0" for index in range(len(stores))]
        self.shard_map = ShardMap.of(len(stores), endpoints)
        self._handlers = [Handlers(store.engine) for store in stores]
        self._clock = clock

    def call(
        self, server: int, call: Call[Any, Any], argument: Any, *, ready_s: float | None = None
    ) -> Answer[Any]:
        """Answers at once, all but a synchronous step that lacks parts."""
        handlers, clock = self._handlers[server], self._clock

        def carried_out() -> list[Any]:
            return [
                clock.timed(
                    "scan" if part.name in SCANS else "apply",
                    lambda part=part, of=of: handlers.start(part, of).result(),
                )
                for part, of in handlers.parts_of(call, self._through(call.request, argument))
            ]

        answered = self._through(call.answer, answer_of_parts(carried_out()))
        return _AtOnce(answered)

    def _through(self, codec: Codec[T], value: T) -> T:
        data = self._clock.timed("encode", lambda: codec.encode(value))
        return self._clock.timed("decode", lambda: codec.decode(data))

    def use(self, shard_map: ShardMap) -> None:
        """No-op: no shard moves."""

    def close(self) -> None:
        """No-op: the stores stay."""


class Training:
    """One worker's synchronous training on a store."""

    def __init__(self, client: ClusterClient, batch_size: int) -> None:
        """Joins the store, and declares the model there."""
        member = Member(0, 1)
        client.join(member.worker, member.incarnation, terms={}).result()
        self.model = build_model("ctr_dnn", criteo_schema(), {})
        declare(client, specs_of(self.model, job_of(batch_size, ["strategy.mode=sync"])))
        self._loop = StepLoop(
            self.model,
            SyncCommunicator(client, member=member, num_params=self.model.num_params),
            batch_size=batch_size,
            progress=Progress(every_s=math.inf),
        )

    def train(self, rows: Sequence[Batch]) -> None:
        """Takes a step for each batch."""
        self._loop.train(rows)


def parts_in_process(rows: Sequence[Batch], num_warm: int, num_servers: int) -> dict[str, float]:
    """Returns seconds of processor time by part; `total` is that of this process."""
    clock = Clock()
    stores = [
        ParameterStore(server_index=index, num_servers=num_servers) for index in range(num_servers)
    ]
    training = Training(ClusterClient(TimedTransport(stores, clock)), rows[0].size)
    training.train(rows[:num_warm])
    clock.seconds.clear()
    start = time.process_time()
    training.train(rows[num_warm:])
    found = {"total": time.process_time() - start, **clock.seconds}
    for batch in rows[num_warm:]:
        clock.timed("keys", lambda batch=batch: keys_of_batch(batch, training.model.tables))
    found["keys"] = clock.seconds["keys"]
    return found


def compute_s(rows: Sequence[Batch], num_warm: int) -> float:
    """Returns seconds of processor time of the model alone."""
    step = model_step("ctr_dnn", rows[0].size, "float32")
    for _ in range(num_warm):
        step()
    start = time.process_time()
    for _ in range(len(rows) - num_warm):
        step()
    return time.process_time() - start


def seconds_of_processes(
    rows: Sequence[Batch], num_warm: int, num_servers: int
) -> tuple[float, float, float]:
    """Returns seconds of processor time of a worker, of its servers together, and how long it took."""
    with server_processes(num_servers) as (endpoints, servers), connect(endpoints) as client:
        training = Training(client, rows[0].size)
        training.train(rows[:num_warm])
        worker_s, servers_s = own_cpu_s(), sum(map(cpu_s_of, servers))
        start = time.perf_counter()
        training.train(rows[num_warm:])
        elapsed_s = time.perf_counter() - start
        return own_cpu_s() - worker_s, sum(map(cpu_s_of, servers)) - servers_s, elapsed_s


def measure(batch_size: int, num_servers: int) -> dict[str, object]:
    """Returns microseconds of processor time a step, by part."""
    num_warm, num_steps = WARMUP_STEPS[batch_size], STEPS[batch_size]
    rows = list(batches(num_warm + num_steps, batch_size, seed=1))
    with threadpool_limits(limits=1, user_api="blas"):
        found = parts_in_process(rows, num_warm, num_servers)
        found["compute"] = compute_s(rows, num_warm)
        in_process = found.pop("total")
        found["client"] = in_process - sum(found.values())
        of_worker, of_servers, elapsed = seconds_of_processes(rows, num_warm, num_servers)
    total = of_worker + of_servers
    found["calls"] = total - in_process
    found |= {"total": total, "worker": of_worker, "servers": of_servers, "elapsed": elapsed}
    order = ("keys", "compute", "client", "encode", "decode", "scan", "apply", "calls")
    sums = ("total", "worker", "servers", "elapsed")
    return {
        "batch_size": batch_size,
        "servers": num_servers,
        **{f"{part}_us": round(found[part] / num_steps * 1e6) for part in (*order, *sums)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, action="append", choices=tuple(STEPS))
    parser.add_argument("--servers", type=int, default=2)
    options = parser.parse_args()
    keep_freed_memory()
    for batch_size in options.batch_size or STEPS:
        say("step", **measure(batch_size, options.servers))


if __name__ == "__main__":
    main()
