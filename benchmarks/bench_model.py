"""Speed of a model: the gradient including embeddings, relative to the ceiling.

    python -m benchmarks.bench_model                 # CTR-DNN; a JSON line per batch size and thread count
    python -m benchmarks.bench_model --model deepfm  # another model
    python -m benchmarks.bench_model --model all     # every model, at B=512 on one thread

The ceiling is CTR-DNN's network for every model, so that models can be compared.

There are no tables and no servers: the rows of a batch's unique keys are given, as after a pull. Each thread
has its own workspace and gradients. Short rounds of model and ceiling (benchmarks.ceiling) alternate, so that
both see the same load of the machine, and the median of the ratios is reported.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import ceiling, rows
from ctr_model.registry import MODELS, build_model
from ctr_model.schema import criteo_schema
from ps_worker.lookups import keys_of_batch

ROUND_SECONDS = 0.25
ALL = "all"

Step = Callable[[], object]


def model_step(name: str, batch_size: int) -> Step:
    """Returns a function that computes all gradients of one batch."""
    model = build_model(name, criteo_schema(), {})
    rng = np.random.default_rng(1)
    batch = next(rows.batches(1, batch_size, seed=1))
    keys = keys_of_batch(batch, model.tables)
    embeddings = {
        table.name: rng.uniform(-0.01, 0.01, (keys.unique[table.name].size, table.dim)).astype(
            np.float32
        )
        for table in model.tables
    }
    lookups = keys.lookups(embeddings)
    params = rng.normal(0, 0.05, model.num_params).astype(np.float32)
    workspace = model.workspace(batch_size)
    dense_grad = np.empty_like(params)
    sparse_grads = {name: np.empty_like(values) for name, values in embeddings.items()}
    return lambda: model.gradient(params, batch, lookups, workspace, dense_grad, sparse_grads)


def speed(pool: ThreadPoolExecutor, steps: Sequence[Step], batch_size: int) -> float:
    """Returns examples/s of one round, with a thread per step function."""

    def repeat(step: Step) -> float:
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < ROUND_SECONDS:
            step()
            count += 1
        return count * batch_size / elapsed

    return sum(pool.map(repeat, steps))


def measure(name: str, batch_size: int, threads: int, rounds: int) -> dict[str, object]:
    """Returns the medians of model and ceiling, and of their ratio."""
    models = [model_step(name, batch_size) for _ in range(threads)]
    ceilings = [ceiling.Network(batch_size).step for _ in range(threads)]
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        for step in (*models, *ceilings):
            step()
        pairs = [
            (speed(pool, models, batch_size), speed(pool, ceilings, batch_size))
            for _ in range(rounds)
        ]
    return {
        "bench": "model",
        "model": name,
        "batch_size": batch_size,
        "threads": threads,
        "examples_per_s": round(statistics.median(model for model, _ in pairs)),
        "ceiling": round(statistics.median(top for _, top in pairs)),
        "of_ceiling": round(statistics.median(model / top for model, top in pairs), 3),
        "blas": ceiling.blas_kernels(),
    }


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ctr_dnn", choices=[*MODELS, ALL])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.model == ALL:
        cases = itertools.product(MODELS, [512], [1])
    else:
        cases = itertools.product([options.model], ceiling.BATCH_SIZES, [1, 2])
    for case in cases:
        print(json.dumps(measure(*case, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
