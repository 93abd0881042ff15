"""Heterogeneous training gives the model of the same job without heter trainers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_model.batch import Batch as NumpyBatch  # noqa: E402
from ctr_model.schema import Schema  # noqa: E402
from ctr_model.torch import Batch, Embedding, TorchModel  # noqa: E402
from protos.store import Missing, ReduceOp, Store  # noqa: E402
from ps_worker.job import Job  # noqa: E402
from ps_worker.job.model import DENSE_BLOCK  # noqa: E402
from ps_worker.run.run import Run  # noqa: E402
from tests.support.heter import HeterCluster, run_job  # noqa: E402
from tests.support.torch_models import WideDeep  # noqa: E402
from tests.support.training import NUM_DENSE, NUM_SLOTS, job, random_batches  # noqa: E402

SCHEMA = Schema.numbered(NUM_DENSE, NUM_SLOTS)
ADAGRAD = ("optimizer.sparse=adagrad", "optimizer.dense=adagrad")


def wide_deep() -> TorchModel:
    return TorchModel(SCHEMA, WideDeep, {"dim": 4, "hidden": [16, 8]}, seed=3)


class Attention(nn.Module):
    """The rows of slots stay apart, and their number differs from batch to batch."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embedding = Embedding(dim=4, init_range=0.1, pooling="none")
        self.query = nn.Parameter(torch.full((4,), 0.5))
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: Batch) -> Tensor:
        rows, is_there = self.embedding(batch)
        scores = (rows * self.query).sum(-1).masked_fill(~is_there, -30.0)
        return self.layer((scores.softmax(-1).unsqueeze(-1) * rows).sum((1, 2)))


def attention() -> TorchModel:
    return TorchModel(SCHEMA, Attention, seed=3)


class Parameters:
    """All parameters at the end of a job."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self.dense: Any = None
        self.rows: dict[str, Any] = {}

    def read(self, store: Store) -> None:
        keys = np.unique(np.concatenate([each.keys for each in random_batches(40, 64, seed=5)]))
        self.dense = np.empty(self._model.num_params, np.float32)
        store.pull_dense({DENSE_BLOCK: self.dense}).result()
        of_tables = {table.name: keys for table in self._model.tables}
        self.rows = dict(store.pull_sparse(of_tables, missing=Missing.ZEROS).result().rows)


def batches_of(worker: int, num_batches: int, *, several_keys: bool = False) -> list[NumpyBatch]:
    found = random_batches(num_batches, 16 + 5 * worker, seed=worker)
    return [with_several_keys(each, 2 + worker) for each in found] if several_keys else found


def with_several_keys(batch: NumpyBatch, per_slot: int) -> NumpyBatch:
    """Returns a batch whose first example has `per_slot` keys in its first slot."""
    return NumpyBatch(
        labels=batch.labels,
        dense=batch.dense,
        keys=np.concatenate([np.arange(per_slot - 1, dtype=np.uint64), batch.keys]),
        offsets=np.concatenate([[0], batch.offsets[1:] + per_slot - 1]).astype(np.int32),
        num_slots=batch.num_slots,
    )


def trained(
    build: Any,
    settings: Job,
    *,
    num_heter: int,
    num_batches: Sequence[int] = (12, 12),
    several_keys: bool = False,
    **cluster: Any,
) -> tuple[Parameters, HeterCluster, list[float]]:
    """Returns the parameters after two epochs, and the mean loss of each worker."""
    found, losses = Parameters(build()), [0.0] * len(num_batches)

    def work(run: Run, index: int) -> None:
        data = batches_of(index, num_batches[index], several_keys=several_keys)
        for _ in range(2):
            run.train(data)
            run.barrier()
        assert run.all_reduce(np.array([1.0]), ReduceOp.SUM) == len(num_batches)
        assert run.all_reduce(np.array([-1.0 * index]), ReduceOp.MAX) == 0.0
        losses[index] = run.progress.mean_loss
        if index == 0:
            found.read(run.store)

    job_ = run_job(
        build, settings, work, num_workers=len(num_batches), num_heter=num_heter, **cluster
    )
    return found, job_, losses


@pytest.mark.parametrize(
    ("build", "num_batches", "num_heter", "options"),
    [
        (wide_deep, (12, 12), 1, {"num_servers": 2}),
        (wide_deep, (12, 5, 9), 2, {}),
        (attention, (8, 8), 1, {"several_keys": True}),
    ],
    ids=["two-servers", "uneven-data-and-two-heter-trainers", "attention"],
)
def test_sync_gives_the_model_of_the_same_job_without_heter_trainers(
    build: Any, num_batches: Sequence[int], num_heter: int, options: Any
) -> None:
    settings = job("sync", *ADAGRAD)
    expected, _, losses = trained(build, settings, num_heter=0, num_batches=num_batches, **options)

    found, job_, own_losses = trained(
        build, settings, num_heter=num_heter, num_batches=num_batches, **options
    )

    np.testing.assert_allclose(found.dense, expected.dense, atol=1e-5)
    for table, rows in expected.rows.items():
        assert np.abs(rows).max() > 0.01
        np.testing.assert_allclose(found.rows[table], rows, atol=1e-5)
    assert own_losses == pytest.approx(losses, rel=1e-4)
    examples = sum(2 * n * (16 + 5 * worker) for worker, n in enumerate(num_batches))
    assert sum(each["examples"] for each in job_.figures) == examples
