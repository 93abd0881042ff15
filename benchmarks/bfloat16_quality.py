"""AUC after training in float32 and in bfloat16, on planted clicks.

    python -m benchmarks.bfloat16_quality                          # 3 seeds, a JSON line for each
    python -m benchmarks.bfloat16_quality --hidden 400 400 400     # CTR-DNN in full
    python -m benchmarks.bfloat16_quality --setting row_dtype      # rows in place of matrix products

One thread trains in process, in sync mode, so that both runs see the same batches in the same order, from the
same initial values, and differ in rounding alone. Matrix products need PyTorch.
"""

import argparse
import json
from collections.abc import Sequence

from benchmarks import rows
from benchmarks.bench_model import SCHEMA
from benchmarks.train_worker import job_of
from ctr_ps.ctr_model.registry import MODELS, build_model
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.run.plan import model_plan_of
from ctr_ps.ps_worker.run.run import Run

BATCH_SIZE = 512
TEST_SEED = 1_000_000


def auc_after(
    name: str, hidden: Sequence[int], precision: str, *, num_batches: int, seed: int
) -> float:
    """Returns the AUC on other rows than those that were trained on."""
    settings = ["strategy.mode=sync", f"train.seed={seed}", precision]
    job = job_of(BATCH_SIZE, settings)
    model = build_model(name, SCHEMA, {"hidden": hidden})
    with Run(ParameterStore(), model_plan_of(model, job)) as run:
        run.train(rows.batches(num_batches, BATCH_SIZE, seed=seed))
        return run.evaluate(rows.batches(100, BATCH_SIZE, seed=TEST_SEED)).auc()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    deep = [name for name in MODELS if name not in ("lr", "fm")]  # those have no matrix products
    parser.add_argument("--model", default="ctr_dnn", choices=deep)
    parser.add_argument("--setting", default="compute", choices=["compute", "row_dtype"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for seed in range(options.seeds):
        exact, rounded = (
            auc_after(
                options.model,
                options.hidden,
                f"train.{options.setting}={dtype}",
                num_batches=options.batches,
                seed=seed,
            )
            for dtype in ("float32", "bfloat16")
        )
        line = {
            "bench": "bfloat16_quality",
            "setting": options.setting,
            "model": options.model,
            "hidden": options.hidden,
            "seed": seed,
            "float32": round(exact, 5),
            "bfloat16": round(rounded, 5),
            "difference": round(rounded - exact, 5),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
