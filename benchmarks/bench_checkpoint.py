"""Saving a table during pushes, and loading it.

    python -m benchmarks.bench_checkpoint                        # 10 M rows, about a minute, 2 GB of disk
    python -m benchmarks.bench_checkpoint --rows 1000000 --folder /mnt/checkpoints

Rows have dim 10 with Adagrad. Prints one JSON line per case:

    push    time of pushes without a save
    train   saves while one thread pushes: time of saves and pushes, and peak memory of a save as a fraction
            of the table's
    save    saves without pushes, compared with sequential writes of a plain file of the same size, synced,
            through the page cache and past it
    load    time to load all rows, rows per second and core, and time to touch the same amount of new memory

Everything runs in one process, so pushes and saves share the interpreter.
"""

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.background import meanwhile
from benchmarks.bench_table import all_keys
from benchmarks.bench_wire import push_id
from benchmarks.figures import say
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.store import ParameterStore

DIM = 10
FILL_KEYS = 100_000
CHUNK_BYTES = 8 * 2**20
REPEATS = 5
SAMPLE_S = 0.005
PUSH_SECONDS = 5.0
SPEC = TableSpec(
    name="bench",
    dim=DIM,
    initializer=InitializerSpec(scale=0.01),
    optimizer=OptimizerSpec(name="adagrad"),
)


class Pusher:
    """Pushes random keys at a fixed rate, and records the time of each push."""

    def __init__(
        self, store: ParameterStore, keys: Keys, push_keys: int, pushes_per_s: float
    ) -> None:
        """Pushes to `store`."""
        random = np.random.default_rng(3)
        self._store = store
        self._pause_s = 1 / pushes_per_s
        self._drawn = [keys[random.choice(keys.size, push_keys, replace=False)] for _ in range(200)]
        self._grads = random.normal(size=(push_keys, DIM)).astype(np.float32)
        self._sequence = 0

    def push(self, keys: Keys) -> None:
        """Pushes once."""
        grad = SparseGrad(keys, self._grads[: keys.size], 512)
        gradients = Gradients({SPEC.name: grad}, {})
        self._store.push_grad(gradients, push_id(self._sequence, incarnation=1)).result()
        self._sequence += 1

    @contextmanager
    def pushing(self) -> Iterator[list[float]]:
        """Pushes in a thread; yields the list of seconds per push, which grows."""
        seconds: list[float] = []

        def run(is_over: threading.Event) -> None:
            due = time.perf_counter()
            while not is_over.wait(max(0.0, due - time.perf_counter())):
                start = time.perf_counter()
                self.push(self._drawn[self._sequence % len(self._drawn)])
                seconds.append(time.perf_counter() - start)
                due = max(due + self._pause_s, start)

        with meanwhile(run):
            yield seconds


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yields a list whose only element is, at the end, the peak growth of this process in bytes."""
    before = anonymous_bytes()
    peak = [0]

    def watch(is_over: threading.Event) -> None:
        while not is_over.wait(SAMPLE_S):
            peak[0] = max(peak[0], anonymous_bytes() - before)

    with meanwhile(watch):
        yield peak


def anonymous_bytes() -> int:
    """Returns the resident memory of this process in bytes, without mapped files."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def plain_write_s(path: Path, size_bytes: int, flags: int) -> float:
    """Returns the seconds to write a file sequentially and sync it."""
    chunk = mmap.mmap(-1, CHUNK_BYTES)  # page-aligned, as O_DIRECT needs
    chunk.write(np.random.default_rng(0).bytes(CHUNK_BYTES))
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    for _ in range(-(-size_bytes // CHUNK_BYTES)):
        if os.write(descriptor, memoryview(chunk)) < CHUNK_BYTES:
            raise OSError(f"{path} was not written at once: choose another --folder")
    os.fsync(descriptor)
    seconds = time.perf_counter() - start
    os.close(descriptor)
    path.unlink()
    return seconds


def save_rates(store: ParameterStore, folder: Path, file_bytes: int) -> dict[str, float]:
    """Saves several times, each after writing plain files of the same size, as a disk's speed varies."""
    saves, cached, direct = [], [], []
    for number in range(REPEATS):
        cached.append(plain_write_s(folder / "plain", file_bytes, 0))
        direct.append(plain_write_s(folder / "plain", file_bytes, os.O_DIRECT))
        saves.append(
            seconds_of(partial(store.save, SaveRequest(url=str(folder / f"save-{number}"))))
        )
        shutil.rmtree(folder / f"save-{number}")
    seconds, cached_s, direct_s = map(statistics.median, (saves, cached, direct))
    return {
        "seconds": round(seconds, 2),
        "mb_per_s": round(file_bytes / seconds / 1e6),
        "cached_mb_per_s": round(file_bytes / cached_s / 1e6),
        "direct_mb_per_s": round(file_bytes / direct_s / 1e6),
        "of_cached": round(cached_s / seconds, 2),
        "of_direct": round(direct_s / seconds, 2),
    }


def filled_store(keys: Keys) -> ParameterStore:
    """Returns a store with a row for each key."""
    store = ParameterStore()
    store.create_table(SPEC)
    fill(store, SPEC, keys)
    return store


def fill(store: ParameterStore, spec: TableSpec, keys: Keys) -> None:
    """Pushes each key once, so that a table has a row for it."""
    grads = np.random.default_rng(1).normal(size=(FILL_KEYS, spec.dim)).astype(np.float32)
    for first in range(0, keys.size, FILL_KEYS):
        part = keys[first : first + FILL_KEYS]
        store.engine.parameters.table(spec.name).push(SparseGrad(part, grads[: part.size], 512))


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def touch(size_bytes: int) -> None:
    """Maps new memory, in huge pages if possible, and writes to each page."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def latency(seconds: list[float]) -> dict[str, float]:
    """Returns median and 99th percentile of push times in milliseconds."""
    return {
        "pushes": len(seconds),
        "push_p50_ms": round(1e3 * statistics.median(seconds), 2),
        "push_p99_ms": round(1e3 * float(np.quantile(seconds, 0.99)), 2),
    }


report = partial(say, "checkpoint")


def measure(rows: int, folder: Path, push_keys: int, pushes_per_s: float) -> None:
    """Fills a table and prints a line per case."""
    keys = all_keys(rows)
    filled_store(keys[:FILL_KEYS]).save(SaveRequest(url=str(folder / "first")))  # compiles
    store = filled_store(keys)
    pusher = Pusher(store, keys, push_keys, pushes_per_s)
    with pusher.pushing() as before:
        time.sleep(PUSH_SECONDS)
    report(rows=rows, case="push", **latency(before))
    measure_pushed(store, pusher, folder, before)
    report(rows=rows, case="save", **save_rates(store, folder, rows * 4 * (2 + 2 * DIM)))
    url = str(folder / "last")
    store.save(SaveRequest(url=url))
    measure_load(rows, url)


def measure_pushed(
    store: ParameterStore, pusher: Pusher, folder: Path, before: list[float]
) -> None:
    """Saves several times while `pusher` pushes; `before` has push times without a save."""
    during: list[float] = []
    seconds = []
    table = store.status().tables[SPEC.name]
    with pusher.pushing() as pushes, peak_memory() as peak:
        for number in range(REPEATS):
            time.sleep(0.2)
            quiet = len(pushes)
            url = folder / f"train-{number}"
            seconds.append(seconds_of(partial(store.save, SaveRequest(url=str(url)))))
            during.extend(pushes[quiet:])
            shutil.rmtree(url)
    last_save = store.status().last_save
    assert last_save is not None
    report(
        rows=table.rows,
        case="train",
        seconds=round(statistics.median(seconds), 2),
        **latency(during),
        push_p99_of_before=round(float(np.quantile(during, 0.99) / np.quantile(before, 0.99)), 2),
        pause_ms=round(1e3 * last_save.pause_s, 2),
        extra_memory_of_table=round(peak[0] / table.size_bytes, 3),
    )


def measure_load(rows: int, url: str) -> None:
    """Loads into an empty store, twice; the first time compiles.

    On a virtual machine, getting new memory from the host can take longer than the load itself, so the time
    to touch the same amount is reported too.
    """
    ParameterStore().load(url)
    store = ParameterStore()
    used = time.process_time()
    seconds = seconds_of(partial(store.load, url))
    used = time.process_time() - used
    size_bytes = store.status().tables[SPEC.name].size_bytes
    report(
        rows=rows,
        case="load",
        seconds=round(seconds, 2),
        m_rows_per_s=round(rows / seconds / 1e6, 2),
        m_rows_per_s_a_core=round(rows / used / 1e6, 2),
        touch_seconds=round(seconds_of(partial(touch, size_bytes)), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--push-keys", type=int, default=5_400)
    parser.add_argument("--pushes-per-s", type=float, default=50.0)
    arguments = parser.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench_checkpoint-") as folder:
        measure(arguments.rows, Path(folder), arguments.push_keys, arguments.pushes_per_s)


if __name__ == "__main__":
    main()
