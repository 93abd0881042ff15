"""ESMM, the entire space multi-task model: clicks, and conversions after them.

    X = [ dense | pooled embedding of slot 1 | ... | of slot S ]     [B, n = num_dense + S * D]
    pCTR   = sigmoid(M(X))        probability of a click
    pCVR   = sigmoid(N(X))        probability of a conversion, given a click
    pCTCVR = pCTR * pCVR          probability of both

M and N are multilayer perceptrons with relu between their layers; they share the embeddings. The loss is that
of the click under pCTR and of click and conversion under pCTCVR, over all rows (`task_losses.ENTIRE_SPACE`):
so pCVR learns from all rows, and predicts for all.

Ma, Zhao, Huang, Wang, Hu, Zhu and Gai, "Entire space multi-task model: an effective approach for estimating
post-click conversion rate", SIGIR 2018. The hidden layers are those of the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ctr_model.models.multi_task.task_losses import ENTIRE_SPACE
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Tensors
from ctr_ps.ctr_model.schema import Schema

LABELS = 2


@keeps_origin
class Esmm(ClickModel):
    """ESMM."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (360, 200, 80),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        """Builds the network for a schema of two labels; options and errors are those of `CtrDnn`."""
        require_widths(dim=dim, hidden=hidden)
        require_range(init_range=init_range)
        if len(schema.labels) != LABELS:
            raise ValueError(
                f"ESMM learns two labels, the click and the conversion, and the schema names "
                f'{len(schema.labels)}: write them into it, as in labels = ["click", "conversion"]'
            )
        click, conversion = schema.labels
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots
        )
        widths = (self._input.width, *hidden, 1)
        self._ctr, self._cvr = Mlp(widths, name="ctr"), Mlp(widths, name="cvr")
        super().__init__(
            schema,
            tables=self._input.tables,
            segments=[*self._ctr.segments, *self._cvr.segments],
            loss=ENTIRE_SPACE,
            tasks=(
                Task(click, labels=(0,)),
                Task(conversion, labels=(1,), given=(0,)),
                Task(f"{click}_and_{conversion}", labels=(0, 1)),
            ),
            biases=[self._ctr.segments[-1], self._cvr.segments[-1]],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: "_Buffers", logits: Floats
    ) -> None:
        of_ctr, of_cvr = self._parts(tensors)
        self._input.forward(batch.dense, lookups, buffers.ctr.input(batch.size))
        logits[:, :1] = self._ctr.forward(of_ctr, buffers.ctr, batch.size)
        logits[:, 1:] = self._cvr.forward(of_cvr, buffers.cvr, batch.size)

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
        of_ctr, of_cvr = self._parts(tensors)
        ctr_grads, cvr_grads = self._parts(tensor_grads)
        of_click, of_conversion = np.ascontiguousarray(logit_grad.T)  # [B] each
        grad = self._ctr.backward(of_ctr, buffers.ctr, of_click.reshape(-1, 1), ctr_grads)
        grad += self._cvr.backward(of_cvr, buffers.cvr, of_conversion.reshape(-1, 1), cvr_grads)
        self._input.backward(grad, lookups, sparse_grads)

    def _parts(self, tensors: Tensors) -> tuple[Sequence[Floats], Sequence[Floats]]:
        num_ctr = len(self._ctr.segments)
        return tensors[:num_ctr], tensors[num_ctr:]

    def buffers(self, max_batch_size: int) -> "_Buffers":
        shared = np.empty((max_batch_size, self._input.width), np.float32)
        ctr, cvr = (
            mlp.buffers(max_batch_size, self.products, self.dropout, shared)
            for mlp in (self._ctr, self._cvr)
        )
        return _Buffers(ctr, cvr)


@dataclass(frozen=True, slots=True)
class _Buffers:
    ctr: MlpBuffers
    cvr: MlpBuffers
