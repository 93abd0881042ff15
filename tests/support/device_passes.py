"""Examples a second of passes on a device, for a machine that has one.

python -m tests.support.device_passes cuda
"""

import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from ctr_model.torch import Batch as SeenBatch
from ctr_model.torch import Embedding, TorchModel
from ps_server.store import ParameterStore
from ps_worker.job import override_job
from ps_worker.run.run import Run

NUM_DENSE, NUM_SLOTS = 13, 26
KEYS_OF_A_SLOT = 200_000


class CtrDnn(nn.Module):
    """The shape of the built-in model of that name."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embedding = Embedding(dim=10, init_range=0.01)
        width = schema.num_dense + len(schema.slots) * 10
        self.mlp = nn.Sequential(
            nn.Linear(width, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 1)
        )

    def forward(self, batch: SeenBatch) -> Tensor:
        return self.mlp(torch.cat([batch.dense, self.embedding(batch).flatten(1)], dim=1))


def random_batches(num_batches: int, batch_size: int) -> Iterator[Batch]:
    """Yields batches with one key a slot, of which few are frequent."""
    rng = np.random.default_rng(0)
    slots = np.arange(NUM_SLOTS, dtype=np.uint64) << np.uint64(32)
    for _ in range(num_batches):
        ranks = KEYS_OF_A_SLOT * rng.random((batch_size, NUM_SLOTS)) ** 4
        yield Batch(
            labels=(rng.random(batch_size) < 0.25).astype(np.float32),
            dense=rng.normal(size=(batch_size, NUM_DENSE)).astype(np.float32),
            keys=(ranks.astype(np.uint64) + slots).reshape(-1),
            offsets=np.arange(batch_size * NUM_SLOTS + 1, dtype=np.int32),
            num_slots=NUM_SLOTS,
        )


def pass_rate(
    kind: str, *, batch_size: int = 4096, pass_batches: int = 50, num_passes: int = 4
) -> dict[str, float]:
    """Trains passes in process; returns examples a second, from pull to write back, and their number.

    The first pass, which compiles and fills caches, does not count.
    """
    settings = [
        "strategy.mode=half_async",
        "data.in_memory=true",
        f"train.batch_size={batch_size}",
        "device.tables=pass",
        f"device.kind={kind}",
        f"device.pass_rows={pass_batches * batch_size}",
    ]
    job = override_job({}, settings, source="benchmark")
    batches = list(random_batches(pass_batches * (1 + num_passes), batch_size))
    ends: list[float] = []
    model = TorchModel(Schema.numbered(NUM_DENSE, NUM_SLOTS), CtrDnn)
    with Run(ParameterStore(), model, job) as run:
        run.train(batches, after_step=lambda: ends.append(time.perf_counter()))
    examples = num_passes * pass_batches * batch_size
    return {"examples": examples, "examples_per_s": examples / (ends[-1] - ends[0])}


if __name__ == "__main__":
    print(json.dumps(pass_rate(sys.argv[1])))
