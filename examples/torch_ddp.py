"""A PyTorch loop of one's own: embeddings on servers, the dense part in DistributedDataParallel.

    python examples/torch_ddp.py                                      # alone, with the tables in this process
    MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
        ps-launch --server-num 1 --worker-num 2 examples/torch_ddp.py # a server and two processes that train

Both train the same model, as each process takes its share of every batch. On many machines the script is
started once for each server and each worker, with the variables of docs/operations.md.
"""

import argparse
import os
from pathlib import Path

# Before torch: without that, the error names the extra to install.
from ctr_ps import fleet
from ctr_ps.torch import Embedding, EmbeddingBag, PushOptimizer, Tables, open_tables

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

NUM_USERS, NUM_ITEMS, NUM_SEEN = 50, 40, 4


class Net(nn.Module):
    """The chance that a user clicks an item, given those seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.user = Embedding(8, table="users", init_range=0.1)
        self.item = Embedding(8, table="items", init_range=0.1)
        self.seen = EmbeddingBag(8, table="items", init_range=0.1, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, items: Tensor, seen: Tensor) -> Tensor:
        """Returns logits float32[B] for keys int64[B], int64[B] and int64[B, NUM_SEEN]."""
        parts = [self.user(users), self.item(items), self.seen(seen)]
        return self.mlp(torch.cat(parts, dim=1)).squeeze(1)


def batches(number: int, size: int, seed: int) -> list[tuple[Tensor, ...]]:
    """Returns users, items, items seen and clicks; some users click more, and some items are liked more."""
    random = torch.Generator().manual_seed(seed)
    users = torch.randint(NUM_USERS, (number, size), generator=random)
    items = torch.randint(NUM_ITEMS, (number, size), generator=random)
    seen = torch.randint(NUM_ITEMS, (number, size, NUM_SEEN), generator=random)
    clicks = (users % 5 + items % 4 > 3).float()
    return list(zip(users, items, seen, clicks, strict=True))


def train(tables: Tables, model: nn.Module, args: argparse.Namespace) -> None:
    """Trains on this process's share of each batch."""
    rows = PushOptimizer(tables)
    dense = torch.optim.SGD(model.parameters(), lr=0.2)
    share = slice(tables.worker, None, tables.num_workers)
    own = [tuple(part[share] for part in batch) for batch in batches(50, args.batch_size, seed=1)]
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        ahead = tables.prefetching(
            own,
            lambda batch: {"users": batch[0], "items": torch.cat([batch[1], batch[2].flatten()])},
        )
        for users, items, seen, clicks in ahead:
            rows.zero_grad()
            dense.zero_grad()
            loss = binary_cross_entropy_with_logits(model(users, items, seen), clicks)
            loss.backward()
            rows.step()
            dense.step()
            total += loss.item()
        if tables.worker == 0:
            print(f"epoch {epoch} loss {total / len(own):.4f}", flush=True)


def main() -> None:
    """Runs the script in the role of this process."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="examples of a step, of all processes"
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data")
    parser.add_argument("--output", type=Path, default=Path("output/torch_ddp"), help="a folder")
    args = parser.parse_args()
    if os.environ.get("TRAINING_ROLE") == "PSERVER":
        fleet.init()
        fleet.init_server()
        fleet.run_server()
        return

    with open_tables(mode="sync", optimizer={"name": "sgd", "learning_rate": 4.0}) as tables:
        torch.set_num_threads(1)  # batches are small
        torch.manual_seed(0)
        net = Net()
        tables.attach(net)
        model: nn.Module = net
        if tables.num_workers > 1:
            dist.init_process_group("gloo", rank=tables.worker, world_size=tables.num_workers)
            model = DistributedDataParallel(net)
        train(tables, model, args)
        tables.save(str(args.output / "model"), state=net.state_dict())
        if tables.num_workers > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
