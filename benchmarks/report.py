"""Runs the benchmarks and writes their tables between the markers of docs/benchmarks.md.

    python -m benchmarks.report                      # about 40 minutes on an idle machine
    python -m benchmarks.report --from results.jsonl # tables from an earlier run

With CTR_PEER_DIR set, PaddlePaddle is measured in the same run, with CTR_TORCH_PEER_DIR plain PyTorch. All
lines are written to benchmarks/results.jsonl.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench_train import PEER_FOLDERS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = Path(__file__).parent / "results.jsonl"

Line = dict[str, Any]

TRAIN_CASES = {
    "ceiling": "the ceiling: bare numpy, one core, no embeddings",
    "two_ceilings": "two of it at once, on both cores",
    "in_process_1": "in process, 1 thread",
    "in_process_2": "in process, 2 threads",
    "sync_2x2": "2 servers x 2 workers, sync",
    "half_async_2x2": "2 servers x 2 workers, half_async",
    "async_2x2": "2 servers x 2 workers, async",
    "async_2x2_bfloat16_wire": "2 servers x 2 workers, async, bfloat16 on the wire",
    "bounded_staleness_2x2": "2 servers x 2 workers, bounded_staleness",
    "geo_2x2": "2 servers x 2 workers, geo, k = 100, SGD",
    "in_process_2_bfloat16": "in process, 2 threads, bfloat16",
    "torch_2": "in process, 2 threads, a module of PyTorch",
    "torch_2_bfloat16": "in process, 2 threads, a module of PyTorch, bfloat16",
    "peer_torch_2": "plain PyTorch, 2 threads",
    "peer_torch_2_bfloat16": "plain PyTorch, 2 threads, bfloat16 by autocast",
    "peer_async_2x2": "PaddlePaddle 3.0, 2 x 2, async",
    "peer_geo_2x2": "PaddlePaddle 3.0, 2 x 2, geo, k = 100",
}


def measure() -> list[Line]:
    """Runs all benchmarks and returns their lines."""
    modules = ("table", "wire", "clients", "cost", "train")
    commands = [[f"bench_{module}"] for module in modules]
    for option, variable in PEER_FOLDERS.items():
        if variable in os.environ:
            commands[-1].append(option)
    lines = [{"benchmark": "machine", "cpu": cpu_name(), "cores": os.cpu_count()}]
    for module, *arguments in commands:
        output = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments],
            check=True,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        lines += [json.loads(line) for line in output.splitlines()]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def cpu_name() -> str:
    """Returns the model name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table, all columns but the first right-aligned."""
    marks = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, marks, *rows])


def train_cell(line: Line | None) -> str:
    """Returns the figure of a case, which may not have been measured, or have failed."""
    if line is None:
        return "-"
    if "error" in line:
        return "failed"
    return f"{line['examples_per_s']:,} ({line['of_ceiling']:.0%})"


def train_table(lines: list[Line]) -> str:
    """Returns a table of examples/s by case and batch size, with the share of the ceiling."""
    cells = {(line["case"], line["batch_size"]): line for line in lines}
    sizes = sorted({size for _, size in cells})
    rows = []
    for case, title in TRAIN_CASES.items():
        found = [cells.get((case, size)) for size in sizes]
        if any(found):
            rows.append([title, *map(train_cell, found)])
    failed = "".join(
        f"\n{TRAIN_CASES[case]}, B={size}, failed: {line['error']}\n"
        for (case, size), line in cells.items()
        if "error" in line
    )
    merges = ", ".join(
        f"{line['sparse_merge']} sparse and {line['dense_merge']} dense (B={size})"
        for (case, size), line in sorted(cells.items())
        if case == "async_2x2"
    )
    learnt = ", ".join(
        f"B={size}: {line['auc']}"
        for (case, size), line in sorted(cells.items())
        if case == "async_2x2"
    )
    header = ["examples/s, all workers (share of the ceiling)", *(f"B={size}" for size in sizes)]
    return (
        f"{table(header, rows)}\n\n"
        f"Maximum batches merged per async push: {merges}. AUC after the run ({learnt}), "
        f"best possible 0.84.\n{failed}"
    ).rstrip()


def table_table(lines: list[Line]) -> str:
    """Returns a table of keys/s of one sparse table on one core."""
    rows = [
        [
            f"{line['optimizer']}, calls of {line['keys_per_call']:,} keys",
            f"{line['pull_m_keys_per_s']:.1f}",
            f"{line['push_m_keys_per_s']:.1f}",
        ]
        for line in lines
        if line["case"] == "calls"
    ]
    sizes = ", ".join(
        f"{line['optimizer']} {line['bytes_per_row']:.0f} bytes a row ({line['of_row']:.2f} times key, "
        f"weights and state)"
        for line in lines
        if line["case"] == "fill"
    )
    header = ["20 M rows of dim 10, one core", "pull, M keys/s", "push, M keys/s"]
    return f"{table(header, rows)}\n\nMemory, index included: {sizes}."


def wire_table(lines: list[Line]) -> str:
    """Returns a table of the cost of calls over loopback."""
    rows = [
        [
            f"{line['case']}, {line['size']:,} {'keys' if 'dense' not in line['case'] else 'floats'}",
            f"{line['in_flight']}",
            f"{line['calls_per_s']:,}",
            f"{line['cpu_us']:,}",
        ]
        for line in lines
    ]
    header = ["one server over loopback", "in flight", "calls/s", "processor time a call, µs"]
    return table(header, rows)


def clients_table(lines: list[Line]) -> str:
    """Returns a table of one server's throughput by the number of its workers."""
    rows = [
        [
            str(line["workers"]),
            f"{line['batches_per_s']:,}",
            f"{line['low']:,} to {line['high']:,}",
            f"{line['of_4']:.2f}" if "of_4" in line else "-",
        ]
        for line in lines
    ]
    return table(
        ["workers of one server", "batches/s", "lowest and highest", "relative to 4 workers"], rows
    )


def cost_table(lines: list[Line]) -> str:
    """Returns two tables: the model of a step beside what was measured, and what it says of more machines."""
    sizes = sorted({line["batch_size"] for line in lines})
    cells = {(line["servers"], "machines" in line, line["batch_size"]): line for line in lines}

    def rows(is_far: bool) -> list[list[str]]:
        numbers = sorted({servers for servers, far, _ in cells if far == is_far})
        return [
            [
                str(servers or "in process"),
                *(_cost_cell(cells[servers, is_far, size]) for size in sizes),
            ]
            for servers in numbers
        ]

    batch_sizes = [f"B={size}" for size in sizes]
    here = table(["workers, and as many servers, on one machine", *batch_sizes], rows(False))
    far = table(["workers, and as many servers, a machine each", *batch_sizes], rows(True))
    return f"{here}\n\n{far}"


def _cost_cell(line: Line) -> str:
    if "measured" not in line:
        return f"{line['predicted']:,}"
    return f"{line['predicted']:,} / {line['measured']:,} ({line['of_measured']:.2f})"


TABLES: dict[str, Callable[[list[Line]], str]] = {
    "train": train_table,
    "table": table_table,
    "wire": wire_table,
    "clients": clients_table,
    "cost": cost_table,
}


def write_page(lines: list[Line]) -> None:
    """Replaces the tables between their markers in docs/benchmarks.md."""
    text = PAGE.read_text()
    for bench, render in TABLES.items():
        chosen = [line for line in lines if line["benchmark"] == bench]
        if not chosen:
            continue
        start, end = f"<!-- bench:{bench} -->", f"<!-- /bench:{bench} -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"docs/benchmarks.md has no markers {start} ... {end}")
        text = f"{before}{start}\n{render(chosen)}\n{end}{after}"
    PAGE.write_text(text)


def main() -> None:
    """Measures or reads lines, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, help="JSON lines of an earlier run")
    source = parser.parse_args().source
    if source is None:
        write_page(measure())
    else:
        write_page([json.loads(line) for line in source.read_text().splitlines()])


if __name__ == "__main__":
    main()
