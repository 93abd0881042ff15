"""Wide & deep as a module of PyTorch: one script for servers, CPU trainers and heter trainers.

    python examples/heter_wide_deep.py --train-files 'criteo/part-[0-4].tsv.gz' --test-files 'criteo/part-5*'
    ps-launch --server-num 2 --worker-num 2 --heter-num 1 examples/heter_wide_deep.py --train-files ...

The counterpart of the script in Paddle's tutorial on heterogeneous parameter servers (docs/fleet.md).
"""

import argparse
import logging

# Before torch: without that, the error names the extra to install.
from ctr_ps import criteo_schema, fleet, matching_files
from ctr_ps.torch import TorchModel

# isort: split
from torch_wide_deep import WideDeep  # examples/torch_wide_deep.py


def parse_args() -> argparse.Namespace:
    """Returns the parsed command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--train-files", default="data/criteo/train/part-*", help="glob pattern")
    parser.add_argument("--test-files", default="data/criteo/test/part-*", help="glob pattern")
    parser.add_argument("--passes", type=int, default=1, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=256, help="examples per step")
    return parser.parse_args()


def main() -> None:
    """Runs the script in the role of this process."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    fleet.init(fleet.PaddleCloudRoleMaker())

    model = TorchModel(criteo_schema(), WideDeep, {"dim": 10, "hidden": [64, 32]}, seed=1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    optimizer = fleet.distributed_optimizer(fleet.optimizer.Adam(learning_rate=0.001), strategy)
    executor = optimizer.minimize(model, seed=1)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    elif fleet.is_heter_worker():
        fleet.init_heter_worker()
        fleet.run_heter_worker()
    else:
        fleet.init_worker()
        train(executor, args)
        test = fleet.QueueDataset(criteo_schema(), args.batch_size)
        test.set_filelist(fleet.split_files(matching_files(args.test_files)))
        auc = fleet.metrics.auc(executor.infer_from_dataset(test))
        fleet.util.print_on_rank(f"auc {auc:.5f}", 0)
        fleet.stop_worker()


def train(executor: fleet.Executor, args: argparse.Namespace) -> None:
    """Trains this worker's files, in memory and in another order each pass."""
    dataset = fleet.InMemoryDataset(criteo_schema(), args.batch_size)
    dataset.set_filelist(fleet.split_files(matching_files(args.train_files)))
    dataset.load_into_memory()
    for _ in range(args.passes):
        dataset.local_shuffle()
        executor.train_from_dataset(dataset)
        fleet.barrier_worker()


if __name__ == "__main__":
    main()
