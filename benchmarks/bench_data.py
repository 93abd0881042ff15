"""Data: rows/s per core by format, size of rows in memory, and training speed with streaming.

    python -m benchmarks.bench_data                              # one JSON line per case; 200 MB of disk
    python -m benchmarks.bench_data --case read --format tsv     # some cases only
    python -m benchmarks.bench_data --rows-in-memory 10000000

    read       one thread reads files into batches of 100, 512 and 4096 rows: parsed, checked, hashed
    memory     an InMemoryDataset is loaded, shuffled and iterated, in a process of its own
    train      2 servers x 2 workers train at B=512 on streamed files, and on the same rows in memory

Rows are synthetic (ps-data generate); files are in the page cache. Rounds of compared cases alternate, and
medians are reported.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench_train import ROOT, run_cluster
from benchmarks.figures import say, spread
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.extras.data_tools.generate import generate

BATCH_SIZES = (100, 512, 4096)
FORMATS = {
    "tsv": "train/*.tsv",
    "parquet": "parquet/*.parquet",
    "keys": "keys/*.parquet",
}
CASES = ("read", "memory", "train")
NUM_FILES = 4
WARMUP_STEPS = 50
TRAIN_MODE = (
    "--set=strategy.mode=async",
    "--set=strategy.async.max_merge_var_num=2",
    "--set=strategy.async.max_merge_dense_num=16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--format", action="append", choices=FORMATS, help="default: all")
    parser.add_argument("--rows", type=int, default=400_000, help="rows of the files")
    parser.add_argument("--rows-in-memory", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    formats = options.format or list(FORMATS)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        folder = Path(name)
        write_files(folder, options.rows)
        lines: dict[str, Iterator[dict[str, Any]]] = {
            "read": read_lines(folder, formats, options.rounds),
            "memory": memory_lines(folder, options.rows, options.rows_in_memory),
            "train": train_lines(folder, formats, options.rounds),
        }
        for line in itertools.chain.from_iterable(lines[case] for case in options.case or CASES):
            say("data", **line)


def write_files(folder: Path, rows: int) -> None:
    """Writes the same rows in each format."""
    generate(folder, rows=rows, test_rows=1000, files=NUM_FILES, test_files=1, seed=1)
    files = sorted(str(path) for path in folder.glob(FORMATS["tsv"]))
    per_file = -(-rows // NUM_FILES)
    for name, keys in (("parquet", False), ("keys", True)):
        convert(files, folder / name, criteo_schema(), keys=keys, rows_per_file=per_file)


def read_lines(folder: Path, formats: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Measures reading."""
    for batch_size in BATCH_SIZES:
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in formats}
        for _ in range(rounds):
            for name in formats:
                results[name].append(read(folder / FORMATS[name], "--batch-size", str(batch_size)))
        for name, runs in results.items():
            speeds = [run["rows_per_s"] for run in runs]
            yield {
                "case": "read",
                "format": name,
                "batch_size": batch_size,
                **spread("rows_per_s", speeds),
                "peak_mb": max(run["peak_mb"] for run in runs),
            }


def memory_lines(folder: Path, rows: int, rows_in_memory: int) -> Iterator[dict[str, Any]]:
    """Measures rows in memory."""
    copies = -(-rows_in_memory // rows)
    result = read(folder / FORMATS["tsv"], "--in-memory", "--copies", str(copies))
    yield {"case": "memory", **result}


def read(pattern: Path, *arguments: str) -> dict[str, Any]:
    """Runs benchmarks.read_files and returns its result."""
    command = [sys.executable, "-m", "benchmarks.read_files", str(pattern), *arguments]
    output = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def train_lines(folder: Path, formats: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Measures training on streamed files, and on the same rows in memory."""
    for name in formats:
        pattern = folder / FORMATS[name]
        speeds: dict[str, list[float]] = {"memory": [], "stream": []}
        for _ in range(rounds):
            speeds["memory"].append(train(pattern, is_streamed=False))
            speeds["stream"].append(train(pattern, is_streamed=True))
        losses = [
            1 - stream / memory
            for memory, stream in zip(speeds["memory"], speeds["stream"], strict=True)
        ]
        yield {
            "case": "train",
            "format": name,
            "batch_size": 512,
            **{name: round(statistics.median(found)) for name, found in speeds.items()},
            "loss": round(statistics.median(losses), 3),
        }


def train(pattern: Path, *, is_streamed: bool) -> float:
    """Trains 2x2; returns the sum of examples/s of both workers."""
    arguments = ["--batch-size", "512", "--steps", "0", "--warmup", str(WARMUP_STEPS)]
    arguments += [*TRAIN_MODE, "--files", str(pattern), *(["--stream"] if is_streamed else [])]
    speed: float = run_cluster(arguments)["examples_per_s"]
    return speed


if __name__ == "__main__":
    main()
