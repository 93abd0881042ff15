"""Throughput and memory of one table on one core: pulls, pushes, inserts, bytes a row.

    python -m benchmarks.bench_table                     # 20 M rows, about 2 minutes
    python -m benchmarks.bench_table --rows 1000000
    python -m benchmarks.bench_table --subscribers 2     # table that records changed rows
    python -m benchmarks.bench_table --statistics        # table that counts shows and clicks
    python -m benchmarks.bench_table --bfloat16          # weights as bfloat16

Prints one JSON line a case: millions of keys a second, the median of five passes over random keys. With
subscribers it also measures `take_changed` when no rows changed, and when the rows of one call did.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.figures import say
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.memory.hash_index import STATISTICS_WIDTH
from ctr_ps.ps_server.table.sparse_table import SparseTable

DIM = 10
CALL_SIZES = (1_800, 20_000, 100_000)
KEYS_A_PASS = 1_000_000
PASSES = 5
EXAMPLES = 512
OPTIMIZERS = ("sgd", "adagrad", "adagrad_row")


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def all_keys(rows: int) -> Keys:
    """Returns `rows` distinct keys in an order without locality."""
    return np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def m_per_s(calls: list[Keys], call: Callable[[Keys], object]) -> float:
    """Returns millions of keys a second, the median over passes."""
    speeds = []
    for _ in range(PASSES):
        start = time.perf_counter()
        for keys in calls:
            call(keys)
        speeds.append(sum(keys.size for keys in calls) / (time.perf_counter() - start) / 1e6)
    return statistics.median(speeds)


def measure(
    optimizer: str, rows: int, subscribers: int, *, is_counting: bool, is_bfloat16: bool
) -> None:
    """Fills and measures a table and prints its lines."""
    table = SparseTable(
        TableSpec(
            name="bench",
            dim=DIM,
            initializer=InitializerSpec(scale=0.01),
            optimizer=OptimizerSpec(name=optimizer, params={"learning_rate": 0.05}),
            is_bfloat16=is_bfloat16,
            statistics=StatisticsSpec() if is_counting else None,
        ),
        num_subscribers=subscribers,
    )
    grads = np.random.default_rng(1).normal(size=(max(CALL_SIZES), DIM)).astype(np.float32)
    counts = np.ones((max(CALL_SIZES), 2), np.uint32)

    def push(keys: Keys) -> None:
        counted = counts[: keys.size] if is_counting else None
        table.push(SparseGrad(keys, grads[: keys.size], EXAMPLES, counted))

    def pull(keys: Keys) -> None:
        table.pull(keys, Missing.INITIAL)

    keys = all_keys(rows)
    push(keys[:1])  # compiles
    pull(keys[:1])
    before = resident_bytes()
    start = time.perf_counter()
    for first in range(0, rows, max(CALL_SIZES)):
        push(keys[first : first + max(CALL_SIZES)])
    seconds = time.perf_counter() - start
    report = partial(
        say,
        "table",
        optimizer=optimizer,
        rows=rows,
        statistics=is_counting,
        bfloat16=is_bfloat16,
    )
    row_bytes = 8 + 4 * (DIM + table.state_width + is_counting * STATISTICS_WIDTH)
    row_bytes -= is_bfloat16 * 2 * DIM
    size = (resident_bytes() - before) / rows
    report(
        case="fill",
        insert_m_rows_per_s=round(rows / seconds / 1e6, 2),
        bytes_per_row=round(size, 1),
        of_row=round(size / row_bytes, 2),
    )
    rng = np.random.default_rng(2)
    for call_size in CALL_SIZES:
        num_calls = max(1, KEYS_A_PASS // call_size)
        calls = [keys[rng.integers(0, rows, call_size)] for _ in range(num_calls)]
        report(
            case="calls",
            keys_per_call=call_size,
            pull_m_keys_per_s=round(m_per_s(calls, pull), 1),
            push_m_keys_per_s=round(m_per_s(calls, push), 1),
        )
    if subscribers:
        table.take_changed(0, rows)
        none_s = take_seconds(table)
        push(keys[: max(CALL_SIZES)])
        some_s = take_seconds(table)
        took_ms = {"none": 1e3 * none_s, str(max(CALL_SIZES)): 1e3 * some_s}
        report(case="changes", **{f"take_{of}_ms": round(ms, 1) for of, ms in took_ms.items()})


def take_seconds(table: SparseTable) -> float:
    """Returns the seconds that one `take_changed` of all changed rows takes."""
    start = time.perf_counter()
    table.take_changed(0, table.status.rows)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--subscribers", type=int, default=0)
    parser.add_argument("--statistics", action="store_true")
    parser.add_argument("--bfloat16", action="store_true")
    arguments = parser.parse_args()
    for optimizer in OPTIMIZERS:
        measure(
            optimizer,
            arguments.rows,
            arguments.subscribers,
            is_counting=arguments.statistics,
            is_bfloat16=arguments.bfloat16,
        )


if __name__ == "__main__":
    main()
