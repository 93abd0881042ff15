"""Counterparts of torch.nn's embeddings, with rows in a table instead of a weight.

    rows = pull(unique keys)                      a leaf float32[N, D]
    F.embedding_bag(inverse, rows, offsets)       the kernels of nn.EmbeddingBag, so the same bits

In eval() mode a key without a row reads zeros, and no gradient is recorded.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.parameters import EmbeddingTable
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
        ctx.mark_dirty(output)  # and no view, which could not be changed in place
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


class Embedding(TableModule):
    """Looks up keys; called as nn.Embedding."""

    plain: type[nn.Module] | None = None  # what it was before `swap_embeddings`

    def __init__(
        self,
        dim: int,
        *,
        table: str,
        init_range: float = 0.01,
        optimizer: OptimizerChoice | None = None,
        padding_idx: int | None = None,
    ) -> None:
        """Declares the table.

        Args:
            dim: D, width of the rows.
            table: Its name; embeddings that name the same table share its rows.
            init_range: New rows are uniform in [-init_range, init_range).
            optimizer: Optimizer of the rows; None: that of `open_tables`.
            padding_idx: A key that reads zeros and is not trained; None: there is none.

        Raises:
            ValueError: If the width is less than 1, the range negative or the name empty.
        """
        named = {"name": optimizer} if isinstance(optimizer, str) else optimizer
        super().__init__(
            EmbeddingTable(name=table, dim=dim, init_range=init_range, optimizer=named)
        )
        self.embedding_dim = dim
        self.padding_idx = padding_idx

    @property
    @torch.compiler.disable
    def weight(self) -> Tensor:
        """The parameter without rows; of a swapped embedding that is attached, a copy of its rows [V, D].

        The gradient of the copy is pushed; after a write to it the next call of tables raises UsageError.
        """
        if self.num_embeddings is None or self.tables is None:
            return self.parameter
        keys = torch.arange(self.num_embeddings, device=self.parameter.device)
        rows, inverse, _ = self._look_up(keys, padding=None)
        copy = self._output(functional.embedding(inverse, rows))
        self.tables.copies[self.spec.name] = copy.detach(), rows.detach()
        return copy

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of keys, int64, uint64 or int32 of any shape, [*shape, D] of `weight`'s dtype."""
        rows, inverse, _ = self._look_up(input, self.padding_idx)
        return self._output(functional.embedding(inverse, rows))

    def _output(self, output: Tensor) -> Tensor:
        output = output.to(self.parameter.dtype)
        return _Output.apply(output, self.parameter) if output.requires_grad else output

    @torch.compiler.disable(reason="rows are in a table: compile without fullgraph=True")
    def _look_up(self, keys: Tensor, padding: int | None) -> tuple[Tensor, Tensor, int | None]:
        """Returns float32[N, D], the rows of the unique keys, each key's index among them, and padding's."""
        if self.tables is None:
            raise UsageError(
                f"{self!r} is not attached: call attach(model) on the tables returned by open_tables()"
            )
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise UsageError(
                f"{self!r} cannot be traced, as the rows of these keys would become constants: trace the "
                "layers behind it, or restore_embeddings(module) after swap_embeddings"
            )
        self.tables.require_unwritten(self.spec.name)
        unique, inverse = unique_keys(keys_of(keys))
        if self.num_embeddings is not None and unique.max(initial=0) >= self.num_embeddings:
            last, key = self.num_embeddings - 1, unique.max().view(np.int64)
            raise UsageError(f"{self!r} has no key {key}: expected 0 to {last}")
        skipped = None
        if padding is not None and (found := np.flatnonzero(unique == padding % 2**64)).size:
            skipped = int(found[0])
        rows = tensor_of(self.tables.pull(self.spec.name, unique, trains=self.training))
        rows = rows.to(keys.device)
        if skipped is not None and self.num_embeddings is None:
            rows = rows.index_fill(0, torch.tensor([skipped], device=keys.device), 0.0)
        if self.training and torch.is_grad_enabled() and self.parameter.requires_grad:
            rows.requires_grad_()
            self.tables.watch(self.spec.name, unique, rows, inverse, skipped)
        places = torch.from_numpy(inverse).to(keys.device, torch.int64)
        return rows, places.view(keys.shape), skipped


class EmbeddingBag(Embedding):
    """Looks up keys and pools the rows of each bag; called as nn.EmbeddingBag."""

    def __init__(
        self,
        dim: int,
        *,
        table: str,
        mode: Literal["sum", "mean", "max"] = "mean",
        init_range: float = 0.01,
        optimizer: OptimizerChoice | None = None,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> None:
        """Declares the table as `Embedding` does; a bag without keys is zeros in all modes.

        No bag has the key `padding_idx`. With `include_last_offset` the last offset is the number of keys.
        """
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode is {mode!r}, expected 'sum', 'mean' or 'max'")
        super().__init__(
            dim, table=table, init_range=init_range, optimizer=optimizer, padding_idx=padding_idx
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the bags, [B, D] of `weight`'s dtype.

        Args:
            input: Keys, int64, uint64 or int32: [L] with offsets, or [B, L] without.
            offsets: int64[B] or int32[B], start of each bag in the keys; [B + 1] with `include_last_offset`.
            per_sample_weights: Of the keys' shape, factors of the rows; for "sum".
        """
        rows, inverse, skipped = self._look_up(input, self.padding_idx)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.to(rows.dtype)
        bags = functional.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=skipped,
        )
        return self._output(bags)

    def extra_repr(self) -> str:
        """Returns the table's settings, for `print`."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
