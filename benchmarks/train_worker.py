"""One worker of bench_train and bench_data: trains in process or in a cluster, and prints one JSON line.

It trains on batches in memory, or on files while it reads them.
"""

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterable

from benchmarks.rows import batches
from ctr_model.batch import Batch
from ctr_model.registry import build_model
from ctr_model.schema import criteo_schema
from protos.role import WorkerRole, role_from_environment
from protos.runtime.malloc import keep_freed_memory
from protos.store import Store
from ps_server.store import ParameterStore
from ps_worker.cluster.connect import connect
from ps_worker.communicators.choice import communicator_of
from ps_worker.data.files.file_split import split_files
from ps_worker.data.files.listing import matching_files
from ps_worker.data.queue_dataset import QueueDataset
from ps_worker.job import override_job
from ps_worker.job.specs import declare
from ps_worker.training.evaluator import evaluate
from ps_worker.training.meter import Progress
from ps_worker.training.trainer import Trainer

TEST_ROWS = 40_000
OPTIMIZERS = (
    "optimizer.sparse={name='adagrad', learning_rate=0.05}",
    "optimizer.dense={name='adam', learning_rate=0.001}",
)


def main() -> None:
    """Runs the worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    for name in ("batch-size", "steps", "warmup"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--files", default="", help="glob pattern; each worker reads its share")
    parser.add_argument("--stream", action="store_true", help="read files while training")
    options = parser.parse_args()
    role = role_from_environment(os.environ)
    if isinstance(role, WorkerRole):
        with connect(role.endpoints) as client:
            result = run(options, client, role.worker_index, role.num_workers)
    else:
        result = run(options, ParameterStore(), 0, 1, is_in_process=True)
    print(json.dumps(result), flush=True)


def run(
    options: argparse.Namespace,
    store: Store,
    worker: int,
    num_workers: int,
    *,
    is_in_process: bool = False,
) -> dict[str, float | None]:
    """Warms up, waits for the other workers, and times training; worker 0 also evaluates."""
    model = build_model("ctr_dnn", criteo_schema(), {})
    job = override_job({}, [*OPTIMIZERS, *options.set], source="bench")
    size = options.batch_size
    keep_freed_memory()  # as the commands do
    warmup_rows, rows = data_of(options, worker, num_workers)
    declare(store, model, job)
    store.barrier("declared", worker, step=0).result()
    communicator = communicator_of(
        job, store, model, worker=worker, num_workers=num_workers, is_in_process=is_in_process
    )
    progress = Progress(every_s=math.inf)
    trainer = Trainer(
        model,
        communicator,
        batch_size=size,
        thread_num=options.threads,
        progress=progress,
    )

    def timed(name: str, part: Iterable[Batch]) -> float:
        start = time.perf_counter()
        trainer.train(part)
        communicator.rejoin(store.barrier(name, worker, step=communicator.version).result())
        return time.perf_counter() - start

    timed("warm", warmup_rows)
    examples = progress.examples
    seconds = timed("trained", rows)
    result: dict[str, float | None] = {
        "examples_per_s": (progress.examples - examples) / seconds,
        "auc": None,
    }
    if worker == 0 and not options.files:
        test = batches(TEST_ROWS // size, size, seed=1)
        result["auc"] = round(evaluate(store, model, test, batch_size=size).auc(), 4)
    communicator.close()
    store.leave(worker, step=communicator.version)
    return result


def data_of(
    options: argparse.Namespace, worker: int, num_workers: int
) -> tuple[Iterable[Batch], Iterable[Batch]]:
    """Returns warm-up and training batches; all in memory, unless `--stream` is given."""
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
