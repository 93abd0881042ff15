"""One worker of bench_train and bench_data: trains in process or in a cluster, and prints one JSON line.

It trains on batches that lie in memory, or on those of files as they are read.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence

from benchmarks.rows import batches
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.protos.role import ServerRole, WorkerRole, role_from_environment
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.protos.store import Store
from ctr_ps.ps_worker.cluster.open_store import LOCAL, open_store
from ctr_ps.ps_worker.data.files.file_split import split_files
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.run.plan import model_plan_of
from ctr_ps.ps_worker.run.run import Run

TEST_ROWS = 40_000
OPTIMIZERS = (
    "optimizer.sparse={name='adagrad', learning_rate=0.05}",
    "optimizer.dense={name='adam', learning_rate=0.001}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    for name in ("batch-size", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="ctr_dnn", help="as a job's model.name")
    parser.add_argument("--files", default="", help="glob pattern; each worker reads its share")
    parser.add_argument("--stream", action="store_true", help="read files while training")
    parser.add_argument(
        "--turns", action="store_true", help="train the steps once for each line of standard input"
    )
    options = parser.parse_args()
    role = role_from_environment(os.environ) or LOCAL
    if isinstance(role, ServerRole):
        raise SystemExit("train_worker is for workers")
    job = job_of(options.batch_size, options.set)
    keep_freed_memory()  # as the commands do
    with open_store(role, job.cluster) as store:
        result = train(options, job, store, role)
    if result is not None:
        print(json.dumps(result), flush=True)


def job_of(batch_size: int, settings: Sequence[str]) -> Job:
    """Returns the job of a benchmark, which logs no progress."""
    quiet = [f"train.batch_size={batch_size}", "train.log_every_s=1e9"]
    return override_job({}, [*OPTIMIZERS, *quiet, *settings], source="bench")


def train(
    options: argparse.Namespace, job: Job, store: Store, role: WorkerRole
) -> dict[str, float | None] | None:
    """Warms up, waits for the others, trains with the clock running; worker 0 evaluates.

    Returns:
        Speed and AUC; None if it trained in turns (benchmarks.turns), whose seconds it printed.
    """
    size, worker = options.batch_size, role.worker_index
    warmup_rows, rows = data_of(options, worker, role.num_workers)
    model = build_model(options.model, criteo_schema(), {})
    with Run(store, model_plan_of(model, job, role)) as run:

        def timed(part: Iterable[Batch]) -> float:
            start = time.perf_counter()
            run.train(part, thread_num=options.threads)
            run.barrier()
            return time.perf_counter() - start

        warmup_s = timed(warmup_rows)
        if options.turns:
            print(warmup_s, flush=True)
            for _ in sys.stdin:
                print(timed(rows), flush=True)
            run.leave()
            return None
        examples = run.progress.examples
        seconds = timed(rows)
        result: dict[str, float | None] = {
            "examples_per_s": (run.progress.examples - examples) / seconds,
            "auc": None,
        }
        if run.is_first and not options.files:
            test = batches(TEST_ROWS // size, size, seed=1)
            result["auc"] = round(run.evaluate(test).auc(), 4)
        run.leave()
    return result


def data_of(
    options: argparse.Namespace, worker: int, num_workers: int
) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Returns batches to warm up with, and those to train on; unless streamed, both are in memory."""
    num_warm = options.warmup * options.threads
    if not options.files:
        number = num_warm + options.steps * options.threads
        rows = list(batches(number, options.batch_size, seed=1000 + worker))
        return rows[:num_warm], rows[num_warm:]
    dataset = QueueDataset(criteo_schema(), options.batch_size)
    dataset.set_filelist(split_files(matching_files(options.files), worker, num_workers))
    warmup_rows = list(itertools.islice(dataset, num_warm))
    return warmup_rows, dataset if options.stream else list(dataset)


if __name__ == "__main__":
    main()
