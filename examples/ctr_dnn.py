"""CTR-DNN on click logs in Criteo's layout, as one script for servers and workers (docs/fleet.md).

    python examples/ctr_dnn.py --train-files 'criteo/part-[0-4].tsv.gz' --test-files 'criteo/part-5.tsv.gz'
    ps-launch --server-num 2 --worker-num 2 examples/ctr_dnn.py --distributed --train-files ... --mode sync

The network and the rates of examples/ctr_dnn.toml. Each epoch is saved, and the model is tested at the end.
"""

import argparse
import logging

from ctr_model.models.ctr_dnn import CtrDnn
from ctr_model.schema import Schema, criteo_schema
from ps_worker import fleet
from ps_worker.data.files.listing import matching_files


def parse_args() -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--distributed", action="store_true", help="refuse to train without servers"
    )
    parser.add_argument("--train-files", default="data/criteo/train/part-*", help="a pattern")
    parser.add_argument("--test-files", default="data/criteo/test/part-*", help="a pattern")
    parser.add_argument(
        "--output", default="output/ctr_dnn", help="folder of epoch-1, epoch-2, ..."
    )
    parser.add_argument("--load", help="saved model to go on from, as output/ctr_dnn/epoch-1")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32, help="examples of a step")
    parser.add_argument("--thread-num", type=int, default=1, help="training threads of a worker")
    parser.add_argument("--mode", default="async", help="sync, half_async, async, geo, ...")
    parser.add_argument("--print-period", type=float, default=5.0, help="seconds between figures")
    return parser.parse_args()


def minimize(args: argparse.Namespace, schema: Schema) -> fleet.Trainer:
    """Returns the trainer of the network."""
    model = CtrDnn(schema, dim=10, hidden=[400, 400, 400])
    strategy = fleet.DistributedStrategy(mode=args.mode)
    if args.mode == "async":
        strategy.max_merge_dense_num = 1
        strategy.send_queue_size = 2  # a queue that is always full makes gradients old
    optimizer = fleet.distributed_optimizer(
        fleet.optimizer.Adagrad(learning_rate=0.02),
        strategy,
        dense=fleet.optimizer.Adagrad(learning_rate=0.005),
    )
    return optimizer.minimize(model)


def dataset_of(pattern: str, args: argparse.Namespace, schema: Schema) -> fleet.QueueDataset:
    """Returns this worker's share of the files."""
    dataset = fleet.QueueDataset(schema, args.batch_size, args.thread_num, bad_row_limit=100)
    dataset.set_filelist(fleet.split_files(matching_files(pattern)))
    return dataset


def train_and_test(trainer: fleet.Trainer, args: argparse.Namespace, schema: Schema) -> None:
    """Is what a worker does between `init_worker` and `stop_worker`."""
    if args.load and fleet.is_first_worker():
        fleet.load_model(args.load)
    dataset = dataset_of(args.train_files, args, schema)
    for epoch in range(1, args.epochs + 1):
        trainer.train_from_dataset(dataset, fetch_handler=print, fetch_period=args.print_period)
        fleet.barrier_worker()  # all have learnt what there is to learn of this epoch
        if fleet.is_first_worker():
            fleet.save_persistables(f"{args.output}/epoch-{epoch}")
        fleet.barrier_worker()  # nobody learns more before it is saved

    own = trainer.infer_from_dataset(dataset_of(args.test_files, args, schema))
    of_all = fleet.metrics.merged(own)
    fleet.util.print_on_rank(
        f"test examples {of_all.examples} auc {of_all.auc():.6f} log_loss {of_all.log_loss():.6f}",
        0,
    )


def main() -> None:
    """Is the script, in every role."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fleet.init()
    if args.distributed and not fleet.server_num():
        raise SystemExit("--distributed: this process has no role, start it with ps-launch")
    schema = criteo_schema()
    trainer = minimize(args, schema)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()
        train_and_test(trainer, args, schema)
        fleet.stop_worker()


if __name__ == "__main__":
    main()
