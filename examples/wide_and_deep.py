"""Wide & deep on click logs in Criteo's layout: training, then inference by all workers in the same run.

    python examples/wide_and_deep.py --train-files 'criteo/part-[0-4].tsv.gz' --test-files 'criteo/part-[45]*'
    ps-launch --server-num 1 --worker-num 2 examples/wide_and_deep.py --train-files ... --test-files ...

Each worker predicts its own test files; metrics are merged over all workers.
"""

import argparse
import logging

from ctr_ps import ClickMetrics, criteo_schema, fleet, matching_files
from ctr_ps.models import WideDeep


def parse_args() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--train-files", default="data/criteo/train/part-*", help="glob pattern")
    parser.add_argument("--test-files", default="data/criteo/test/part-*", help="glob pattern")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
    parser.add_argument("--sync", action="store_true", help="train synchronously")
    return parser.parse_args()


def main() -> None:
    """Runs the script in the role of this process."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fleet.init()

    schema = criteo_schema()
    model = WideDeep(
        schema, dim=10, hidden=[400, 400, 400], crosses=[("C14", "C17"), ("C2", "C14")]
    )
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = not args.sync
    optimizer = fleet.distributed_optimizer(
        fleet.optimizer.Adagrad(learning_rate=0.02, initial_accumulator=0.0001),
        strategy,
        dense=fleet.optimizer.Adagrad(learning_rate=0.005),
    )
    executor = optimizer.minimize(model)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        train(executor, dataset_of(args.train_files, args.batch_size), args.epochs)
        report(executor.infer_from_dataset(dataset_of(args.test_files, args.batch_size)))
        fleet.stop_worker()


def dataset_of(pattern: str, batch_size: int) -> fleet.QueueDataset:
    """Returns a dataset of this worker's files."""
    dataset = fleet.QueueDataset(criteo_schema(), batch_size, bad_row_limit=100)
    dataset.set_filelist(fleet.split_files(matching_files(pattern)))
    return dataset


def train(executor: fleet.Executor, dataset: fleet.QueueDataset, epochs: int) -> None:
    """Trains with an explicit loop over steps, which a script can extend."""
    for epoch in range(1, epochs + 1):
        for step in executor.steps(dataset):
            if step.step % 100 == 0:
                fleet.util.print_on_rank(f"epoch {epoch} step {step.step} loss {step.loss:.5f}", 0)
        fleet.barrier_worker()


def report(own: ClickMetrics) -> None:
    """Prints the metrics over all workers' examples; collective, so every worker has to call it."""
    figures = {
        "examples": int(fleet.metrics.sum(own.examples)),
        "auc": fleet.metrics.auc(own),
        "acc": fleet.metrics.acc(own.correct, own.examples),
        "mae": fleet.metrics.mae(own.absolute_error, own.examples),
        "mse": fleet.metrics.mse(own.squared_error, own.examples),
        "rmse": fleet.metrics.rmse(own.squared_error, own.examples),
    }
    fleet.util.print_on_rank(" ".join(f"{name} {x:.6g}" for name, x in figures.items()), 0)


if __name__ == "__main__":
    main()
