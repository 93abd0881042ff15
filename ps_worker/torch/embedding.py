"""Counterparts of torch.nn's embeddings, with rows in a table instead of a weight.

    rows = pull(unique keys)                      a leaf float32[N, D]
    F.embedding_bag(inverse, rows, offsets)       the kernels of nn.EmbeddingBag, so the same bits

In eval() mode a key without a row reads zeros, and no gradient is recorded.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.ctr_model.torch.batch import tensor_of
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import unique_keys
from ctr_ps.ps_worker.torch.prefetch import keys_of
from ctr_ps.ps_worker.torch.tables import TableModule

OptimizerChoice = str | Mapping[str, str | float]
"""As in a job: "adagrad", or {"name": "adagrad", "learning_rate": 0.1}."""


class _Output(torch.autograd.Function):
    """The output of a module; it depends on the parameter too, for DistributedDataParallel to wait for it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


class Embedding(TableModule):
    """Looks up keys; called as nn.Embedding."""

    def __init__(
        self,
        dim: int,
        *,
        table: str,
        init_range: float = 0.01,
        optimizer: OptimizerChoice | None = None,
    ) -> None:
        """Declares the table.

        Args:
            dim: D, width of the rows.
            table: Its name; embeddings that name the same table share its rows.
            init_range: New rows are uniform in [-init_range, init_range).
            optimizer: Optimizer of the rows; None: that of `open_tables`.

        Raises:
            ValueError: If the width is less than 1, the range negative or the name empty.
        """
        named = {"name": optimizer} if isinstance(optimizer, str) else optimizer
        super().__init__(
            EmbeddingTable(name=table, dim=dim, init_range=init_range, optimizer=named)
        )

    def forward(self, keys: Tensor) -> Tensor:
        """Returns the rows of keys, int64 or uint64 of any shape, as float32[*shape, D]."""
        rows, inverse = self._look_up(keys)
        return self._output(functional.embedding(inverse, rows))

    def _output(self, output: Tensor) -> Tensor:
        return _Output.apply(output, self.weight) if output.requires_grad else output

    @torch.compiler.disable  # which cannot follow it into a table
    def _look_up(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows of the unique keys, float32[N, D], and each key's index among them, int64."""
        if self.tables is None:
            raise UsageError(
                f"{self!r} is not attached: call attach(model) on the tables returned by open_tables()"
            )
        if torch.jit.is_tracing():
            raise UsageError(
                f"{self!r} cannot be traced, as the rows of these keys would become constants: trace the "
                "layers behind it"
            )
        unique, inverse = unique_keys(keys_of(keys))
        rows = tensor_of(self.tables.pull(self.spec.name, unique, trains=self.training))
        rows = rows.to(keys.device)
        if self.training and torch.is_grad_enabled() and self.weight.requires_grad:
            rows.requires_grad_()
            self.tables.watch(self.spec.name, unique, rows, inverse)
        places = torch.from_numpy(inverse).to(keys.device, torch.int64)
        return rows, places.view(keys.shape)


class EmbeddingBag(Embedding):
    """Looks up keys and adds or averages the rows of each bag; called as nn.EmbeddingBag."""

    def __init__(
        self,
        dim: int,
        *,
        table: str,
        mode: Literal["sum", "mean"] = "mean",
        init_range: float = 0.01,
        optimizer: OptimizerChoice | None = None,
    ) -> None:
        """Declares the table as `Embedding` does; a bag without keys is zeros in both modes."""
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode is {mode!r}, expected 'sum' or 'mean'")
        super().__init__(dim, table=table, init_range=init_range, optimizer=optimizer)
        self.mode = mode

    def forward(
        self,
        keys: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the bags, float32[B, D].

        Args:
            keys: int64 or uint64: [L] with offsets, or [B, L] without.
            offsets: int64[B], start of each bag in the keys.
            per_sample_weights: float32 of the keys' shape, factors of the rows; for "sum".
        """
        rows, inverse = self._look_up(keys)
        bags = functional.embedding_bag(
            inverse, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights
        )
        return self._output(bags)

    def extra_repr(self) -> str:
        """Returns the table's settings, for `print`."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
