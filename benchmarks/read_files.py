"""Reads files into batches in a process of its own; prints rows/s and peak memory as a JSON line."""

import argparse
import itertools
import json
import resource
import time
from collections.abc import Iterable

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset


def main() -> None:
    """Reads a first batch to compile, then times reading all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", help="pattern")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--copies", type=int, default=1, help="times to read each file")
    parser.add_argument("--in-memory", action="store_true", help="load, shuffle, then iterate")
    options = parser.parse_args()
    files = matching_files(options.files)
    stream = QueueDataset(criteo_schema(), options.batch_size)
    stream.set_filelist(files)
    list(itertools.islice(stream, 1))
    before_mb = peak_mb()
    if options.in_memory:
        result = in_memory(files * options.copies, options.batch_size)
    else:
        rows, seconds = counted(stream)
        result = {"rows": rows, "rows_per_s": round(rows / seconds)}
    print(json.dumps({**result, "peak_mb": peak_mb(), "peak_mb_before": before_mb}), flush=True)


def in_memory(files: list[str], batch_size: int) -> dict[str, float]:
    """Loads files, shuffles their rows, and iterates once."""
    dataset = InMemoryDataset(criteo_schema(), batch_size)
    dataset.set_filelist(files)
    start = time.perf_counter()
    dataset.load_into_memory()
    loaded = time.perf_counter()
    dataset.local_shuffle()
    shuffled = time.perf_counter()
    rows, seconds = counted(dataset)
    return {
        "rows": rows,
        "load_rows_per_s": round(rows / (loaded - start)),
        "shuffle_s": round(shuffled - loaded, 2),
        "rows_per_s": round(rows / seconds),
    }


def counted(dataset: Iterable[Batch]) -> tuple[int, float]:
    """Iterates over a dataset; returns its number of rows and the time in seconds."""
    start = time.perf_counter()
    rows = sum(batch.size for batch in dataset)
    return rows, time.perf_counter() - start


def peak_mb() -> int:
    """Returns the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
