"""DCN-v2: cross layers, stacked with or parallel to a multilayer perceptron.

    X0     = [ dense | pooled embedding of slot 1 | ... | of slot S ]         [B, n = num_dense + S * D]
    X(l+1) = X0 * (Xl Wl + bl) + Xl     for l = 0, ..., L - 1                 [B, n]
    M(X)   = relu(... relu(X U1 + c1) ... Un + cn) u + c                      [B], the perceptron

    stacked    sigmoid(M(XL))
    parallel   sigmoid(XL w + M(X0))

XL w + M(X0) is the layer on [ XL | An ] of the paper, An the perceptron's last hidden layer. W is [n, n], or
of low rank.

Wang, Shivanna, Cheng, Jain, Lin, Hong and Chi, "DCN V2: improved deep & cross network and practical lessons
for web-scale learning to rank systems", WWW 2021.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.cross import Cross, CrossBuffers
from ctr_ps.ctr_model.layers.linear import outer
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Segment, Tensors
from ctr_ps.ctr_model.schema import Schema

EMBEDDING = "embedding"


@keeps_origin
class DcnV2(ClickModel):
    """DCN-v2."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        structure: Literal["stacked", "parallel"] = "stacked",
        num_cross_layers: int = 2,
        cross_rank: int | None = None,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        """Builds the network; other options and errors are those of `CtrDnn`.

        `structure` says whether the input of the perceptron is XL ("stacked") or X0; `num_cross_layers` is L,
        and `cross_rank` the rank of the cross layers' W, None: full.
        """
        require_widths(dim=dim, hidden=hidden, num_cross_layers=num_cross_layers)
        require_range(init_range=init_range)
        if cross_rank is not None:
            require_widths(cross_rank=cross_rank)
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots, table=EMBEDDING
        )
        self._width = width = self._input.width
        self._cross = Cross(width, num_cross_layers, rank=cross_rank)
        self._mlp = Mlp((width, *hidden, 1))
        self._is_stacked = structure == "stacked"
        head = Segment(name="head.weight", shape=(width,), init_std=width**-0.5)
        heads = () if self._is_stacked else (head,)
        super().__init__(
            schema,
            tables=self._input.tables,
            segments=[*self._cross.segments, *self._mlp.segments, *heads],
            biases=self._mlp.segments[-1:],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: "_Buffers", logits: Floats
    ) -> None:
        of_cross, of_mlp, of_head = self._parts(tensors)
        crossed = self._crossed(buffers, batch.size)
        self._input.forward(batch.dense, lookups, crossed[0])
        last = self._cross.forward(of_cross, crossed, buffers.cross)  # [B, n]
        deep = self._mlp.forward(of_mlp, buffers.mlp, batch.size).reshape(-1)  # [B]
        if self._is_stacked:
            logits[:] = deep
        else:
            np.add(np.matmul(last, of_head[0], out=logits), deep, out=logits)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: "_Buffers",
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        of_cross, of_mlp, of_head = self._parts(tensors)
        cross_grads, mlp_grads, head_grads = self._parts(tensor_grads)
        crossed = self._crossed(buffers, batch.size)
        grad = self._mlp.backward(of_mlp, buffers.mlp, logit_grad.reshape(-1, 1), mlp_grads)
        if self._is_stacked:
            self._cross.backward(of_cross, crossed, buffers.cross, grad, cross_grads)
        else:
            cross_grad = buffers.cross_grad[: batch.size]  # [B, n]
            np.matmul(crossed[-1].T, logit_grad, out=head_grads[0])
            outer(logit_grad, of_head[0], cross_grad)
            self._cross.backward(of_cross, crossed, buffers.cross, cross_grad, cross_grads)
            grad += cross_grad
        self._input.backward(grad, lookups, sparse_grads)

    def _parts(self, tensors: Tensors) -> tuple[Sequence[Floats], ...]:
        mlp = len(self._cross.segments)
        head = mlp + len(self._mlp.segments)
        return tensors[:mlp], tensors[mlp:head], tensors[head:]

    def _crossed(self, buffers: "_Buffers", size: int) -> list[Floats]:
        mlp_input, crossed = buffers.mlp.input(size), buffers.cross.outputs(size)
        return [*crossed, mlp_input] if self._is_stacked else [mlp_input, *crossed]

    def buffers(self, max_batch_size: int) -> "_Buffers":
        return _Buffers(
            cross=self._cross.buffers(max_batch_size, self.products),
            mlp=self._mlp.buffers(max_batch_size, self.products, self.dropout),
            cross_grad=np.empty((max_batch_size, self._width), np.float32),
        )


@dataclass(frozen=True, slots=True)
class _Buffers:
    cross: CrossBuffers
    mlp: MlpBuffers
    cross_grad: Floats  # [B, n]
