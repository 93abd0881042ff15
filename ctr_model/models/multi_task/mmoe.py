"""MMoE, the multi-gate mixture of experts: one model of several tasks, each with its own gate.

    X   = [ dense | pooled embedding of slot 1 | ... | of slot S ]    [B, n = num_dense + S * D]
    F_e = relu(M_e(X))                for each expert e = 1, ..., E   [B, H]
    G_k = softmax(X W_k)              for each task k = 1, ..., K     [B, E], its gate
    p_k = sigmoid(T_k(sum over e of G_k[:, e] * F_e))                 [B]

The experts M_e and the towers T_k are multilayer perceptrons with relu between their layers. A task is a
label of the schema, and the loss the sum of the log losses of the tasks.

Ma, Zhao, Yi, Chen, Hong and Chi, "Modeling task relationships in multi-task learning with multi-gate
mixture-of-experts", KDD 2018, equations 5 to 7.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.layers.products import Product
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ctr_model.models.multi_task.task_losses import tasks_loss
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Segment, Tensors
from ctr_ps.ctr_model.schema import Schema


@keeps_origin
class Mmoe(ClickModel):
    """MMoE."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        num_experts: int = 8,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        """Builds the network for a schema of two labels or more; options and errors as for `CtrDnn`.

        `expert` has the widths of the layers of each of `num_experts` experts, the last is H; `tower` those
        of the hidden layers of each task's tower.
        """
        require_widths(dim=dim, num_experts=num_experts, expert=expert, tower=tower)
        require_range(init_range=init_range)
        if not schema.other_labels:
            raise ValueError(
                "MMoE learns several labels, and the schema names none or one: write them into it, as in "
                'labels = ["click", "conversion"]'
            )
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots
        )
        width, self._expert_width, tasks = self._input.width, expert[-1], schema.labels
        self._experts = [
            Mlp((width, *expert), name=f"expert{e}.") for e in range(1, num_experts + 1)
        ]
        gates = [
            Segment(name=f"gate{k}.weight", shape=(width, num_experts), init_std=width**-0.5)
            for k in range(1, len(tasks) + 1)
        ]
        self._towers = [
            Mlp((expert[-1], *tower, 1), name=f"tower{k}.") for k in range(1, len(tasks) + 1)
        ]
        groups = [mlp.segments for mlp in self._experts]
        groups += [(gate,) for gate in gates]
        groups += [mlp.segments for mlp in self._towers]
        self._ends = [0, *np.cumsum([len(group) for group in groups]).tolist()]
        super().__init__(
            schema,
            tables=self._input.tables,
            segments=[segment for group in groups for segment in group],
            loss=tasks_loss(len(tasks)),
            tasks=[Task(name, labels=(k,)) for k, name in enumerate(tasks)],
            biases=[tower.segments[-1] for tower in self._towers],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: "_Buffers", logits: Floats
    ) -> None:
        of_experts, of_gates, of_towers = self._parts(tensors)
        x, experts = buffers.x[: batch.size], buffers.experts[: batch.size]
        self._input.forward(batch.dense, lookups, x)
        for e, (expert, own) in enumerate(zip(self._experts, buffers.of_experts, strict=True)):
            out = expert.forward(of_experts[e], own, batch.size)
            np.maximum(out, np.float32(0.0), out=experts[:, e])
        for k, (tower, own) in enumerate(zip(self._towers, buffers.of_towers, strict=True)):
            gate = buffers.gates[k][: batch.size]
            buffers.products[k].forward(x, of_gates[k][0], gate)
            _softmax(gate)
            _mix(gate, experts, own.input(batch.size))
            logits[:, k : k + 1] = tower.forward(of_towers[k], own, batch.size)

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
        of_experts, of_gates, of_towers = self._parts(tensors)
        expert_grads, gate_grads, tower_grads = self._parts(tensor_grads)
        x, experts = buffers.x[: batch.size], buffers.experts[: batch.size]
        grad, part = buffers.grad[: batch.size], buffers.part[: batch.size]  # [B, n]
        experts_grad = buffers.experts_grad[:, : batch.size]  # [E, B, H]
        experts_grad[:] = np.float32(0.0)
        grad[:] = np.float32(0.0)
        of_tasks = np.ascontiguousarray(logit_grad.T)  # [K, B]
        for k, (tower, own) in enumerate(zip(self._towers, buffers.of_towers, strict=True)):
            of_task = of_tasks[k].reshape(-1, 1)
            mixed_grad = tower.backward(of_towers[k], own, of_task, tower_grads[k])
            gate = buffers.gates[k][: batch.size]
            _unmix(gate, experts, mixed_grad, experts_grad)
            buffers.products[k].backward(x, of_gates[k][0], gate, gate_grads[k][0], part)
            grad += part
        for e, (expert, own) in enumerate(zip(self._experts, buffers.of_experts, strict=True)):
            grad += expert.backward(of_experts[e], own, experts_grad[e], expert_grads[e])
        self._input.backward(grad, lookups, sparse_grads)

    def _parts(self, tensors: Tensors) -> tuple[list[Sequence[Floats]], ...]:
        groups = [tensors[start:stop] for start, stop in pairwise(self._ends)]
        num_experts, num_tasks = len(self._experts), len(self._towers)
        return (
            groups[:num_experts],
            groups[num_experts : num_experts + num_tasks],
            groups[num_experts + num_tasks :],
        )

    def buffers(self, max_batch_size: int) -> "_Buffers":
        """Returns the buffers of the layers; the experts share their input."""
        num_experts, width = len(self._experts), self._input.width
        x = np.empty((max_batch_size, width), np.float32)
        return _Buffers(
            x=x,
            of_experts=[
                mlp.buffers(max_batch_size, self.products, self.dropout, x) for mlp in self._experts
            ],
            of_towers=[
                mlp.buffers(max_batch_size, self.products, self.dropout) for mlp in self._towers
            ],
            products=[self.products(width, num_experts, max_batch_size) for _ in self._towers],
            gates=[np.empty((max_batch_size, num_experts), np.float32) for _ in self._towers],
            experts=np.empty((max_batch_size, num_experts, self._expert_width), np.float32),
            experts_grad=np.empty((num_experts, max_batch_size, self._expert_width), np.float32),
            grad=np.empty_like(x),
            part=np.empty_like(x),
        )


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers of one thread; the gates hold G, then the gradient of X W."""

    x: Floats  # [B, n]
    of_experts: list[MlpBuffers]
    of_towers: list[MlpBuffers]
    products: list[Product]  # of the gates
    gates: list[Floats]  # [B, E] each
    experts: Floats  # [B, E, H], F
    experts_grad: Floats  # [E, B, H], of M_e(X)
    grad: Floats  # [B, n]
    part: Floats  # [B, n]


@kernel
def _softmax(values: Floats) -> None:
    """Overwrites each row of `values` float32[B, E] with its softmax."""
    for b in range(values.shape[0]):
        largest = values[b].max()
        total = np.float32(0.0)
        for e in range(values.shape[1]):
            values[b, e] = np.exp(values[b, e] - largest)
            total += values[b, e]
        for e in range(values.shape[1]):
            values[b, e] /= total


@kernel
def _mix(gate: Floats, experts: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B, H] with the experts float32[B, E, H], weighted by gate float32[B, E]."""
    out[:] = np.float32(0.0)
    for b in range(out.shape[0]):
        for e in range(gate.shape[1]):
            for h in range(out.shape[1]):
                out[b, h] += gate[b, e] * experts[b, e, h]


@kernel
def _unmix(gate: Floats, experts: Floats, grad: Floats, experts_grad: Floats) -> None:
    """Overwrites `gate` float32[B, E] with the gradient of its softmax's input, given `grad` float32[B, H].

    Adds to `experts_grad` float32[E, B, H] the gradient of the input of the relu of `experts` float32[B, E,
    H].
    """
    of_gate = np.empty(gate.shape[1], np.float32)
    for b in range(gate.shape[0]):
        mean = np.float32(0.0)
        for e in range(gate.shape[1]):
            product = np.float32(0.0)
            for h in range(grad.shape[1]):
                product += grad[b, h] * experts[b, e, h]
                if experts[b, e, h] > np.float32(0.0):
                    experts_grad[e, b, h] += gate[b, e] * grad[b, h]
            of_gate[e] = product
            mean += gate[b, e] * product
        for e in range(gate.shape[1]):
            gate[b, e] *= of_gate[e] - mean
