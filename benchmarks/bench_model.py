"""Speed of a model: the gradient including embeddings, relative to the ceiling.

    python -m benchmarks.bench_model                 # CTR-DNN; a JSON line per batch size and thread count
    python -m benchmarks.bench_model --model deepfm  # another model
    python -m benchmarks.bench_model --model all     # every model, at B=512 on one thread
    python -m benchmarks.bench_model --compute bfloat16  # with a column for that (needs PyTorch)

The ceiling is CTR-DNN's network for every model, so that models can be compared.

There are no tables and no servers: the rows of a batch's unique keys are given, as after a pull. Each thread
has its own workspace and gradients. Short rounds of model and ceiling (benchmarks.ceiling) alternate, so that
both see the same load of the machine, and the median of the ratios is reported. So do rounds in bfloat16.
"""

import argparse
import itertools
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import get_args

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks import ceiling, rows
from benchmarks.figures import say
from ctr_ps.ctr_model.models.model import Compute
from ctr_ps.ctr_model.registry import MODELS, ZOO, build_model, with_compute
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.ps_worker.training.lookups import keys_of_batch

ROUND_SECONDS = 0.25
# Of keys alone: which slots share them matters to no models but `din` and `bst`.
SCHEMA = replace(criteo_schema(), shares={"C2": "C1"})
ALL = "all"

Step = Callable[[], object]


def model_step(name: str, batch_size: int, compute: Compute) -> Step:
    """Returns a function that computes all gradients of one batch."""
    model = with_compute(build_model(name, SCHEMA, {}), compute)
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


def measure(
    name: str, batch_size: int, threads: int, *, compute: Compute, rounds: int
) -> dict[str, object]:
    """Returns the medians of model and ceiling, and of their ratio; of the model in `compute` as well."""
    contenders = {
        "model": [model_step(name, batch_size, "float32") for _ in range(threads)],
        "ceiling": [ceiling.Network(batch_size).step for _ in range(threads)],
    }
    if compute != "float32":
        contenders[compute] = [model_step(name, batch_size, compute) for _ in range(threads)]
    speeds: dict[str, list[float]] = {contender: [] for contender in contenders}
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        for step in itertools.chain(*contenders.values()):
            step()
        for _, (contender, steps) in itertools.product(range(rounds), contenders.items()):
            speeds[contender].append(speed(pool, steps, batch_size))
    line: dict[str, object] = {
        "model": name,
        "batch_size": batch_size,
        "threads": threads,
        "examples_per_s": round(statistics.median(speeds["model"])),
        "ceiling": round(statistics.median(speeds["ceiling"])),
        "of_ceiling": median_ratio(speeds["model"], speeds["ceiling"]),
        "blas": ceiling.blas_kernels(),
    }
    if compute in speeds:
        line[compute] = round(statistics.median(speeds[compute]))
        line[f"{compute}_of_float32"] = median_ratio(speeds[compute], speeds["model"])
    return line


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median of the ratios of rounds that were measured together."""
    return round(statistics.median(map(operator.truediv, ours, theirs)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ctr_dnn", choices=[*MODELS, *ZOO, ALL])
    parser.add_argument("--compute", default="float32", choices=get_args(Compute))
    parser.add_argument("--batch-size", type=int, action="append", help="default: 100, 512, 4096")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.model == ALL:
        cases = itertools.product(MODELS, [512], [1])
    else:
        sizes = options.batch_size or ceiling.BATCH_SIZES
        cases = itertools.product([options.model], sizes, [1, 2])
    for case in cases:
        say("model", **measure(*case, compute=options.compute, rounds=options.rounds))


if __name__ == "__main__":
    main()
