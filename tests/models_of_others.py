"""Writes docs/models_of_others.md: models of other packages, as they are, with embeddings in tables.

python -m tests.models_of_others [PACKAGE ...]     # about 10 minutes for all three
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctr_ps.ps_worker.torch import (
    PushOptimizer,
    Tables,
    open_tables,
    restore_embeddings,
    swap_embeddings,
)
from tests.support.cluster import cluster
from tests.support.models_of_others import PACKAGES, Batch, Case, cases, outputs

PAGE = Path(__file__).parents[1] / "docs/models_of_others.md"
STEPS = 50
RATE = 2.0**-4  # a power of two: whether a product is rounded makes no difference
SGD = {"name": "sgd", "learning_rate": RATE}

HEAD = """# Models of others

Reference: `python -m tests.models_of_others` trains models of other packages for 50 steps of SGD, as they \
are and with [`swap_embeddings`](torch.md#models-of-others), on random rows; CI repeats it.
Difference: largest relative one of a loss, without penalties over `parameters()`. Servers: equal losses and \
digests in process and on 1, 2 and 3. Resumed: equal losses after save and load. Exported: after \
`restore_embeddings`, with equal outputs.

|package|model|difference|servers|resumed|exported|
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """What was found of a model.

    Attributes:
        difference: Largest relative difference of a loss from that with embeddings of torch.nn.
        moved: Largest change of a weight of an embedding in the steps.
        weights: Largest difference of a weight of an embedding after them.
        is_same_on_servers: Whether losses and digests are those in process.
        is_resumed: Whether the losses after a save and a load are those without.
        exported: "torch.export" or "state_dict", the first that gives equal outputs; "no": neither.
    """

    difference: float
    moved: float
    weights: float
    is_same_on_servers: bool
    is_resumed: bool
    exported: str

    def line(self, case: Case) -> str:
        """Returns its line of the page."""
        marks = ["yes" if each else "no" for each in (self.is_same_on_servers, self.is_resumed)]
        return (
            f"|{case.package}|{case.name}|{self.difference:.1g}|{marks[0]}|{marks[1]}|"
            f"{self.exported}|"
        )


@contextmanager
def tables_on(num_servers: int) -> Iterator[Tables]:
    """Opens tables on servers, or with 0 in process."""
    with ExitStack() as stack:
        servers = None
        if num_servers:
            servers = stack.enter_context(cluster(num_servers=num_servers)).endpoints
        yield stack.enter_context(open_tables(servers=servers, optimizer=SGD))


def train(
    case: Case, model: nn.Module, tables: Tables | None, steps: range = range(STEPS)
) -> list[float]:
    """Trains a model by plain SGD, on some of its batches; returns the losses."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE)]
    if tables is not None:
        optimizers.append(PushOptimizer(tables))
    losses = []
    batches = case.batches(STEPS)
    for step in steps:
        batch, labels = batches[step]
        torch.manual_seed(step)  # of dropout
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = case.loss(outputs(model, batch), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def weights_of(model: nn.Module) -> list[Tensor]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [each.weight.detach().clone() for each in model.modules() if isinstance(each, kinds)]


def largest(first: list[Tensor], second: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def measure(case: Case, folder: Path) -> Row:
    """Trains a model in all ways."""
    plain = case.model(0)
    start = weights_of(plain)
    expected = train(case, plain, None)
    found, digests = [], []
    for num_servers in range(4):
        with tables_on(num_servers) as tables:
            model = case.model(0)
            tables.attach(swap_embeddings(model))
            found.append(train(case, model, tables))
            digests.append(tables._store.digest())
            restored = restore_embeddings(model)
    return Row(
        difference=max(abs(a - b) / abs(a) for a, b in zip(expected, found[0], strict=True)),
        moved=largest(start, weights_of(plain)),
        weights=largest(weights_of(restored), weights_of(plain)),
        is_same_on_servers=found == [found[0]] * 4 and digests == [digests[0]] * 4,
        is_resumed=resumed(case, folder) == found[0][STEPS // 2 :],
        exported=exported(case, restored),
    )


def resumed(case: Case, folder: Path) -> list[float]:
    """Returns the losses of the second half, by another model in other tables that are loaded."""
    rows = str(folder / "rows")
    model = case.model(0)
    with tables_on(0) as tables:
        tables.attach(swap_embeddings(model))
        train(case, model, tables, range(STEPS // 2))
        tables.save(rows)
        torch.save([model.state_dict(), PushOptimizer(tables).state_dict()], folder / "dense.pt")
    model = case.model(1)
    with tables_on(0) as tables:
        tables.attach(swap_embeddings(model))
        tables.load(rows, resume=True)
        dense, state = torch.load(folder / "dense.pt")
        model.load_state_dict(dense)
        PushOptimizer(tables).load_state_dict(state)
        return train(case, model, tables, range(STEPS // 2, STEPS))


def exported(case: Case, restored: nn.Module) -> str:
    """Says how a model that is one of torch.nn again can leave the process."""
    batch, _ = case.batches(1)[0]
    expected = evaluated(restored, batch)
    again = case.model(1)
    again.load_state_dict(restored.state_dict())
    if not is_same(evaluated(again, batch), expected):
        return "no"
    try:
        program = torch.export.export(_Called(restored.eval()), (batch,)).module()
        torch.manual_seed(0)
        return "torch.export" if is_same(program(batch), expected) else "state_dict"
    except Exception:  # of the model's own code, such as branches on values
        return "state_dict"


class _Called(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        return outputs(self.model, batch)


def evaluated(model: nn.Module, batch: Batch) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return outputs(model.eval(), batch)


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        first, second = tuple(first.values()), tuple(second.values())
    if isinstance(first, tuple):
        return all(map(is_same, first, second))
    return torch.allclose(first, second, rtol=1e-5, atol=1e-6)


def main(packages: list[str]) -> None:
    torch.set_num_threads(1)
    lines = []
    for package in packages or PACKAGES:
        for case in cases(package).values():
            with tempfile.TemporaryDirectory() as folder:
                lines.append(measure(case, Path(folder)).line(case))
                print(lines[-1], flush=True)
    versions = ", ".join(f"{package} {version(package)}" for package in packages or PACKAGES)
    PAGE.write_text(HEAD + "\n".join(lines) + f"\n\n{len(lines)} models of {versions}.\n")


if __name__ == "__main__":
    main(sys.argv[1:])
