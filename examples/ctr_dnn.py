"""CTR-DNN on click logs in Criteo's layout, as one script for servers and workers (docs/fleet.md).

    python examples/ctr_dnn.py --train-files 'criteo/part-[0-4].tsv.gz' --test-files 'criteo/part-5.tsv.gz'
    ps-launch --server-num 2 --worker-num 2 examples/ctr_dnn.py --distributed --train-files ... --mode sync

Uses the network and learning rates of examples/ctr_dnn.toml. Saves a checkpoint after each epoch and
tests the model at the end.
"""

import argparse
import logging

from ctr_ps import Schema, criteo_schema, fleet, matching_files
from ctr_ps.models import CtrDnn


def parse_args() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--distributed", action="store_true", help="refuse to train without servers"
    )
    parser.add_argument("--train-files", default="data/criteo/train/part-*", help="glob pattern")
    parser.add_argument("--test-files", default="data/criteo/test/part-*", help="glob pattern")
    parser.add_argument(
        "--output",
        default="output/ctr_dnn",
        help="folder for the checkpoints epoch-1, epoch-2, ...",
    )
    parser.add_argument("--load", help="checkpoint to start from, such as output/ctr_dnn/epoch-1")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32, help="examples per step")
    parser.add_argument("--thread-num", type=int, default=1, help="training threads per worker")
    parser.add_argument("--mode", default="async", help="sync, half_async, async, geo, ...")
    parser.add_argument(
        "--print-period", type=float, default=5.0, help="seconds between progress lines"
    )
    return parser.parse_args()


def minimize(args: argparse.Namespace, schema: Schema) -> fleet.Executor:
    """Returns an executor for CTR-DNN with the optimizers of the example."""
    model = CtrDnn(schema, dim=10, hidden=[400, 400, 400])
    strategy = fleet.DistributedStrategy(mode=args.mode)
    # A longer queue makes gradients stale.
    strategy.async_ = {"max_merge_dense_num": 1, "send_queue_size": 2}
    optimizer = fleet.distributed_optimizer(
        fleet.optimizer.Adagrad(learning_rate=0.02, initial_accumulator=0.0001),
        strategy,
        dense=fleet.optimizer.Adagrad(learning_rate=0.005),
    )
    return optimizer.minimize(model)


def dataset_of(pattern: str, args: argparse.Namespace, schema: Schema) -> fleet.QueueDataset:
    """Returns a dataset of this worker's files."""
    dataset = fleet.QueueDataset(schema, args.batch_size, args.thread_num, bad_row_limit=100)
    dataset.set_filelist(fleet.split_files(matching_files(pattern)))
    return dataset


def train_and_test(executor: fleet.Executor, args: argparse.Namespace, schema: Schema) -> None:
    """Trains, saves and tests: the work between `init_worker` and `stop_worker`."""
    if args.load and fleet.is_first_worker():
        fleet.load_model(args.load)
    dataset = dataset_of(args.train_files, args, schema)
    for epoch in range(1, args.epochs + 1):
        executor.train_from_dataset(dataset, fetch_handler=print, fetch_period=args.print_period)
        fleet.barrier_worker()  # all workers have pushed everything of this epoch
        if fleet.is_first_worker():
            fleet.save_persistables(f"{args.output}/epoch-{epoch}")
        fleet.barrier_worker()  # no worker continues before the save is complete

    own = executor.infer_from_dataset(dataset_of(args.test_files, args, schema))
    of_all = fleet.metrics.merged(own)
    fleet.util.print_on_rank(
        f"test examples {of_all.examples} auc {of_all.auc():.6f} log_loss {of_all.log_loss():.6f}",
        0,
    )


def main() -> None:
    """Runs the script in the role of this process."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fleet.init()
    if args.distributed and not fleet.server_num():
        raise SystemExit("--distributed: this process has no role, start it with ps-launch")
    schema = criteo_schema()
    executor = minimize(args, schema)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        train_and_test(executor, args, schema)
        fleet.stop_worker()


if __name__ == "__main__":
    main()
