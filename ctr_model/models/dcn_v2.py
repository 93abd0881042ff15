"""DCN-v2: cross layers, stacked with or parallel to a multilayer perceptron.

    X0     = [ dense | pooled embedding of slot 1 | ... | of slot S ]         [B, n = num_dense + S * D]
    X(l+1) = X0 * (Xl Wl + bl) + Xl     for l = 0, ..., L - 1                 [B, n]
    M(X)   = relu(... relu(X U1 + c1) ... Un + cn) u + c                      [B], the perceptron

    stacked    sigmoid(M(XL))
    parallel   sigmoid(XL w + M(X0))

XL w + M(X0) is the layer on [ XL | An ] of the paper, An the perceptron's last hidden layer. A cross layer
multiplies its input with the input of the network:

    forward    P = X W + b,   X' = X0 * P + X                 * element by element, X0 the first X
    backward   dP = dX' * X0,   db = sum of dP over examples,   dX = dX' + dP W^T,   dX0 += dX' * P

W is [n, n], or of low rank the product of two factors, [n, rank] and [rank, n]. Initial factors are normal
with standard deviation 1/sqrt(fan-in), biases zero.

Wang, Shivanna, Cheng, Jain, Lin, Hong and Chi, "DCN V2: improved deep & cross network and practical lessons
for web-scale learning to rank systems", WWW 2021.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.layers.products import NewProduct, float32_product, outer
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Lookups, Segment, SparseGrads, Tensors
from ctr_ps.ctr_model.schema import Schema


class CrossBuffers:
    """Buffers of one step, each for the largest batch.

    `outputs` are those of the layers but for the input or the last one, which is a buffer of the neighbouring
    layer; `products` those with each factor of a layer, the last is P; `grads` are of one layer's X through P
    and of its products, `first_grad` is of X0 through its products with P.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_layers: int,
        max_batch_size: int,
        new_product: NewProduct,
    ) -> None:
        self.factors = [
            [new_product(*shape, max_batch_size) for shape in pairwise(widths)]
            for _ in range(num_layers)
        ]

        def matrix(width: int) -> Floats:
            return np.empty((max_batch_size, width), np.float32)

        self.outputs = [matrix(widths[0]) for _ in range(num_layers)]
        self.products = [[matrix(width) for width in widths[1:]] for _ in range(num_layers)]
        self.grads = [matrix(width) for width in widths]
        self.first_grad = matrix(widths[0])


class Cross:
    """A network of cross layers."""

    def __init__(self, width: int, num_layers: int, *, rank: int | None = None) -> None:
        self._widths = (width, width) if rank is None else (width, rank, width)
        self._num_layers = num_layers
        factors = ("weight",) if rank is None else ("weight_in", "weight_out")
        self._stride = len(factors) + 1
        self.segments = tuple(
            segment
            for i in range(1, num_layers + 1)
            for segment in (
                *(
                    Segment(name=f"cross{i}.{factor}", shape=shape, init_std=shape[0] ** -0.5)
                    for factor, shape in zip(factors, pairwise(self._widths), strict=True)
                ),
                Segment(name=f"cross{i}.bias", shape=(width,), init_std=0.0),
            )
        )

    def buffers(
        self, max_batch_size: int, new_product: NewProduct = float32_product
    ) -> CrossBuffers:
        """Returns buffers for batches of up to `max_batch_size` examples, with products of a precision."""
        return CrossBuffers(self._widths, self._num_layers, max_batch_size, new_product)

    def forward(self, tensors: Tensors, outputs: Sequence[Floats], buffers: CrossBuffers) -> Floats:
        """Fills `outputs[1:]` from `outputs[0]` and the tensors of `segments`; returns the last."""
        size = len(outputs[0])
        for i, (x, out) in enumerate(pairwise(outputs)):
            *factors, bias = self._of_layer(tensors, i)
            chain = [x, *(product[:size] for product in buffers.products[i])]
            for j, factor in enumerate(factors):
                buffers.factors[i][j].forward(chain[j], factor, chain[j + 1])  # [B, n] or [B, rank]
            cross(outputs[0], x, bias, chain[-1], out)
        return outputs[-1]

    def backward(
        self,
        tensors: Tensors,
        outputs: Sequence[Floats],
        buffers: CrossBuffers,
        grad: Floats,
        tensor_grads: Tensors,
    ) -> None:
        """Fills the gradients of all tensors, and overwrites `grad`, of the last output, with that of X0."""
        size = len(grad)
        first_grad, grads = buffers.first_grad[:size], [each[:size] for each in buffers.grads]
        first_grad[:] = np.float32(0.0)
        for i in range(self._num_layers - 1, -1, -1):
            factors = self._of_layer(tensors, i)[:-1]
            *factor_grads, bias_grad = self._of_layer(tensor_grads, i)
            chain = [outputs[i], *(product[:size] for product in buffers.products[i])]
            cross_backward(outputs[0], chain[-1], grad, first_grad, grads[-1], bias_grad)
            for j in range(len(factors) - 1, -1, -1):
                buffers.factors[i][j].backward(
                    chain[j], factors[j], grads[j + 1], factor_grads[j], grads[j]
                )
            np.add(grad, grads[0], out=grad)  # [B, n]
        np.add(grad, first_grad, out=grad)

    def _of_layer(self, tensors: Tensors, layer: int) -> Sequence[Floats]:
        return tensors[layer * self._stride : (layer + 1) * self._stride]


@kernel
def cross(first: Floats, x: Floats, bias: Floats, product: Floats, out: Floats) -> None:
    """Overwrites `out` with X' and `product` float32[B, n], X W, with P; `first` is X0."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            product[i, j] += bias[j]
            out[i, j] = first[i, j] * product[i, j] + x[i, j]


@kernel
def cross_backward(
    first: Floats,
    product: Floats,
    grad: Floats,
    first_grad: Floats,
    product_grad: Floats,
    bias_grad: Floats,
) -> None:
    """Overwrites `product_grad`, dP, and `bias_grad`, db; adds to `first_grad`, dX0; `grad` is dX'."""
    bias_grad[:] = np.float32(0.0)
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            first_grad[i, j] += grad[i, j] * product[i, j]
            g = grad[i, j] * first[i, j]
            product_grad[i, j] = g
            bias_grad[j] += g


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
        require_widths(hidden=hidden, num_cross_layers=num_cross_layers)
        if cross_rank is not None:
            require_widths(cross_rank=cross_rank)
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots
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
        mlp_input, crossed = (
            buffers.mlp.input(size),
            [each[:size] for each in buffers.cross.outputs],
        )
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
