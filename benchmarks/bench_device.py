"""Training on a device: a module of PyTorch with tables in this process, beside plain PyTorch.

    python -m benchmarks.bench_device                      # on a GPU; says so if there is none
    python -m benchmarks.bench_device --device cpu         # to try it
    python -m benchmarks.bench_device --case plain_float32 --case halves_float32

A JSON line per case and batch size: examples/s, the most memory that it takes on the device, and the ratio to
plain PyTorch in the same precision. Short rounds of the cases alternate, and medians are compared. CTR-DNN
(13 numbers, 26 slots of dim 10, 3 layers of 400), Adagrad for embeddings, Adam for the rest; batches are in
memory.

    plain    an nn.Embedding on the device, and all of the network
    halves   tables in main memory, embeddings pooled on the CPU, the rest of the network on the device
    passes   rows on the device for a pass of 20 batches, pulled before and written back after it
    graphs   the same, each step as a CUDA graph; on a GPU alone

A further way to train is a line in `CASES`.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import rows
from benchmarks.figures import say, spread
from benchmarks.torch_models import CtrDnn, perceptron
from benchmarks.train_worker import job_of
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Compute, Model, StepResult
from ctr_ps.ctr_model.parameters import Floats, Lookup
from ctr_ps.ctr_model.registry import with_compute
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.ctr_model.torch import TorchModel
from ctr_ps.ctr_model.torch.halves import BackHalf, FrontHalf
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
from ctr_ps.ps_worker.run.plan import model_plan_of
from ctr_ps.ps_worker.run.run import Run

BATCH_SIZES = (512, 4096, 16384)
NUM_BATCHES = 20  # each is trained on again and again
TABLE_ROWS = 4_000_037  # of plain PyTorch, which takes keys modulo this
DIM = 10

MIN_ROUND_S = 2.0  # several passes: nothing trains while the first is prepared

Train = Callable[[Iterable[Batch]], object]
"""Trains on batches; may return before the device is done."""


def plain(device: torch.device, batch_size: int, *, compute: Compute) -> Train:
    """Returns the training of plain PyTorch, all of it on the device."""
    embedding = nn.Embedding(TABLE_ROWS, DIM, sparse=True, device=device)
    nn.init.uniform_(embedding.weight, -0.01, 0.01)
    width = rows.NUM_DENSE + rows.NUM_SLOTS * DIM
    dense = perceptron([width, 400, 400, 400, 2]).to(device)
    optimizers = [
        torch.optim.Adagrad(embedding.parameters(), lr=0.05),
        torch.optim.Adam(dense.parameters(), lr=1e-3, fused=True),
    ]

    def step(batch: Batch) -> None:
        assert batch.labels is not None
        keys = (batch.keys % np.uint64(TABLE_ROWS)).astype(np.int64).reshape(batch.size, -1)
        ids, numbers = (torch.from_numpy(each).to(device) for each in (keys, batch.dense))
        labels = torch.from_numpy(batch.labels).to(device).long()
        with torch.autocast(device.type, torch.bfloat16, enabled=compute == "bfloat16"):
            logits = dense(torch.cat([embedding(ids).flatten(1), numbers], dim=1))
        loss = functional.cross_entropy(logits.float(), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    def train(batches: Iterable[Batch]) -> None:
        for batch in batches:
            step(batch)

    return train


def halves(device: torch.device, batch_size: int, *, compute: Compute) -> Train:
    """Returns training with tables in this process, and the network behind its embeddings on the device."""
    module = TorchModel(criteo_schema(), CtrDnn, {})
    return run_of(_OnDevice(module, with_compute(module, compute), device), batch_size)


def passes(
    device: torch.device, batch_size: int, *, compute: Compute, has_graphs: bool = False
) -> Train:
    """Returns training in passes, all of it on the device but for pulls and writing back."""
    module = with_compute(TorchModel(criteo_schema(), CtrDnn, {}), compute)
    where = ["device.tables=pass", f"device.kind={device.type}", "data.in_memory=true"]
    where.append(f"device.cuda_graph={str(has_graphs).lower()}")
    return run_of(module, batch_size, *where, f"device.pass_rows={NUM_BATCHES * batch_size}")


def run_of(model: Model, batch_size: int, *settings: str) -> Train:
    """Returns the training of a run in process."""
    job = job_of(batch_size, settings)
    return Run(ParameterStore(), model_plan_of(model, job, new_pass_trainer=new_pass_trainer)).train


class _OnDevice:
    """A `Model` whose gradient is computed by its two halves, the one behind the cut on a device."""

    def __init__(self, module: TorchModel, trained: Model, device: torch.device) -> None:
        assert isinstance(trained, TorchModel)
        self.tables, self.segments = module.tables, module.segments
        self.num_params, self.initial_values = module.num_params, module.initial_values
        self._trained = trained
        self._device = device

    def workspace(self, max_batch_size: int) -> "_Halves":
        return _Halves(
            FrontHalf(self._trained),
            BackHalf(self._trained, device=str(self._device)),
            max_batch_size,
        )

    def predict(self, *_: Any) -> Floats:
        raise NotImplementedError("this benchmark does not evaluate")

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Mapping[str, Lookup],
        workspace: "_Halves",
        dense_grad: Floats,
        sparse_grads: Mapping[str, Floats],
    ) -> StepResult:
        passed = workspace.front.forward(batch, lookups)
        (result,) = workspace.back.gradient(params, [passed.activations], dense_grad)
        passed.backward(result.grads, sparse_grads)
        return StepResult(result.loss, result.probabilities)


@dataclass(frozen=True, slots=True)
class _Halves:
    front: FrontHalf
    back: BackHalf
    max_batch_size: int


Case = Callable[[torch.device, int], Train]

CASES: dict[str, Case] = {
    f"{name}_{compute}": partial(way, compute=compute)
    for name, way in (
        ("plain", plain),
        ("halves", halves),
        ("passes", passes),
        ("graphs", partial(passes, has_graphs=True)),
    )
    for compute in ("float32", "bfloat16")
}


def seconds_of(train: Train, batches: Iterable[Batch], device: torch.device) -> float:
    """Returns how long it takes until the device has done all of it."""
    start = time.perf_counter()
    train(batches)
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(names: list[str], batch_size: int, device: torch.device, rounds: int) -> None:
    """Prints a line for each case."""
    batches = list(rows.batches(NUM_BATCHES, batch_size, seed=1))
    cases: dict[str, Train] = {}
    memory_mb, repeats = {}, {}
    for name in names:
        before = peak_mb(device)
        cases[name] = CASES[name](device, batch_size)
        seconds_of(cases[name], batches, device)
        memory_mb[name] = peak_mb(device, since=before)
        repeats[name] = math.ceil(MIN_ROUND_S / seconds_of(cases[name], batches, device))
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for _, name in itertools.product(range(rounds), names):
        seconds = seconds_of(cases[name], batches * repeats[name], device)
        speeds[name].append(repeats[name] * NUM_BATCHES * batch_size / seconds)
    for name, values in speeds.items():
        line = {**spread("examples_per_s", values), "device_mb": round(memory_mb[name], 1)}
        of_plain = speeds.get(f"plain_{name.rpartition('_')[2]}")
        if of_plain is not None:
            pairs = zip(values, of_plain, strict=True)
            line["of_plain_torch"] = round(statistics.median(a / b for a, b in pairs), 3)
        say("device", case=name, batch_size=batch_size, **line)


def peak_mb(device: torch.device, *, since: float | None = None) -> float:
    """Returns the memory that tensors take on a GPU, or the most that they took above `since`; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    if since is not None:
        return torch.cuda.max_memory_allocated(device) / 2**20 - since
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1" or "cpu"')
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--batch-size", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that PyTorch can use: nothing was measured (--device cpu to try it)")
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say("device", device=name, torch=torch.__version__)
    for batch_size in options.batch_size or BATCH_SIZES:
        measure(options.case or list(CASES), batch_size, device, options.rounds)


if __name__ == "__main__":
    main()
