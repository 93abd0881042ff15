"""One worker of bench_train: trains on batches in memory, alone or in a cluster, and prints one JSON line."""

import argparse
import json
import math
import os
import time

from benchmarks.rows import batches
from ctr_model.batch import Batch
from ctr_model.registry import build_model
from ctr_model.schema import criteo_schema
from protos.memory import keep_freed_memory
from protos.role import WorkerRole, role_from_environment
from protos.store import Store
from ps_server.store import ParameterStore
from ps_worker.communicators.choice import communicator_of
from ps_worker.connect import connect
from ps_worker.declaring import declare
from ps_worker.evaluator import evaluate
from ps_worker.job import override_job
from ps_worker.progress import Progress
from ps_worker.trainer import Trainer

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
    options = parser.parse_args()
    role = role_from_environment(os.environ)
    if isinstance(role, WorkerRole):
        with connect(role.endpoints) as client:
            result = run(options, client, role.worker_index, role.num_workers)
    else:
        result = run(options, ParameterStore(), 0, 1, is_embedded=True)
    print(json.dumps(result), flush=True)


def run(
    options: argparse.Namespace,
    store: Store,
    worker: int,
    num_workers: int,
    *,
    is_embedded: bool = False,
) -> dict[str, float | None]:
    """Warms up, meets the others, trains with the clock running; worker 0 evaluates."""
    model = build_model("ctr_dnn", criteo_schema(), {})
    job = override_job({}, [*OPTIMIZERS, *options.set], source="bench")
    size = options.batch_size
    keep_freed_memory()  # as the commands do
    rows = list(
        batches((options.warmup + options.steps) * options.threads, size, seed=1000 + worker)
    )
    declare(store, model, job)
    store.barrier("declared", worker, step=0).result()
    communicator = communicator_of(
        job, store, model, worker=worker, num_workers=num_workers, is_embedded=is_embedded
    )
    trainer = Trainer(
        model,
        communicator,
        batch_size=size,
        thread_num=options.threads,
        progress=Progress(every_s=math.inf),
    )

    def timed(name: str, part: list[Batch]) -> float:
        start = time.perf_counter()
        trainer.train(part)
        communicator.rejoin(store.barrier(name, worker, step=communicator.version).result())
        return time.perf_counter() - start

    num_warm = options.warmup * options.threads
    timed("warm", rows[:num_warm])
    seconds = timed("trained", rows[num_warm:])
    result: dict[str, float | None] = {
        "examples_per_s": (len(rows) - num_warm) * size / seconds,
        "auc": None,
    }
    if worker == 0:
        test = batches(TEST_ROWS // size, size, seed=1)
        result["auc"] = round(evaluate(store, model, test, batch_size=size).auc(), 4)
    communicator.close()
    store.done(worker, step=communicator.version)
    return result


if __name__ == "__main__":
    main()
