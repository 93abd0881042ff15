"""Online prediction: time to load a predictor, and latency of predictions.

    python -m benchmarks.bench_predictor                  # one JSON line per case; 2 GB of disk, 3 of memory
    python -m benchmarks.bench_predictor --rows 1000000

    load     from Predictor.load to the first prediction, in a fresh process that has imported it, with
             kernels compiled and cached, and the files in the page cache
    predict  one thread predicts batches of 1, 32 and 512 examples, with keys drawn from all rows; BLAS has
             one thread, as in a server that predicts in several

The model is the CTR-DNN of the other benchmarks, with dim 10 and Adagrad, as saved by a job.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.bench_table import all_keys
from benchmarks.bench_wire import push_id
from benchmarks.figures import say, spread
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.attachments import attachments_of
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.run.plan import plan_of

BATCH_SIZES = (1, 32, 512)
ROWS_A_PUSH = 1_000_000
REPEATS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", help=argparse.SUPPRESS)  # URL for the fresh process
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(answered(options.answer, options.rows)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-predictor-") as name:
        url = str(Path(name) / "model")
        save_model(url, options.rows)
        rounds = [in_fresh_process(url, options.rows) for _ in range(options.rounds + 1)]
    for case in rounds[0]:
        numbers = [line[case] for line in rounds[1:]]  # the first round compiles
        say("predictor", case=case, rows=options.rows, **spread("ms", numbers, 3))


def save_model(url: str, rows: int) -> None:
    """Saves a model with `rows` rows."""
    job = override_job({}, ["model.dim=10", "model.hidden=[400, 400, 400]"], source="benchmark")
    plan = plan_of(job)
    store = ParameterStore()
    declare(store, specs_of(plan.model, job))
    (table,) = plan.model.tables
    for number, keys in enumerate(np.split(all_keys(rows), range(ROWS_A_PUSH, rows, ROWS_A_PUSH))):
        grad = SparseGrad(keys, np.ones((keys.size, table.dim), np.float32), examples=1)
        push = push_id(number, incarnation=1)
        store.push_grad(Gradients(sparse={table.name: grad}), push).result()
    store.save(SaveRequest(url=url, attachments=attachments_of(job, plan.schema)))


def in_fresh_process(url: str, rows: int) -> dict[str, float]:
    """Runs `answered` in a fresh process and returns its result."""
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_predictor", "--answer", url, "--rows", str(rows)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    ).stdout
    numbers: dict[str, float] = json.loads(output)
    return numbers


def answered(url: str, rows: int) -> dict[str, float]:
    """Loads and predicts; returns milliseconds by case."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    predictor = Predictor.load(url)
    predictor.predict(random_batch(predictor, rng, rows, 1))
    milliseconds = {"load": 1000 * (time.perf_counter() - start)}
    for size in BATCH_SIZES:
        batches = [random_batch(predictor, rng, rows, size) for _ in range(REPEATS)]
        seconds = []
        for batch in batches:
            start = time.perf_counter()
            predictor.predict(batch)
            seconds.append(time.perf_counter() - start)
        milliseconds[f"predict_{size}"] = 1000 * statistics.median(seconds)
        milliseconds[f"predict_{size}_p99"] = 1000 * float(np.quantile(seconds, 0.99))
    return milliseconds


def random_batch(predictor: Predictor, rng: np.random.Generator, rows: int, size: int) -> Batch:
    """Returns examples with the key of a random row in each slot."""
    num_slots = len(predictor.schema.slots)
    drawn = rng.integers(0, rows, size * num_slots, np.uint64) + np.uint64(1)
    return Batch(
        labels=None,
        dense=rng.random((size, predictor.schema.num_dense), np.float32),
        keys=drawn * np.uint64(0x9E3779B97F4A7C15),
        offsets=np.arange(size * num_slots + 1, dtype=np.int32),
        num_slots=num_slots,
    )


if __name__ == "__main__":
    main()
