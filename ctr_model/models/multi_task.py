"""Models that learn several labels of the same rows, such as clicks and conversions: ESMM and MMoE.

    X = [ dense | pooled embedding of slot 1 | ... | of slot S ]     [B, n = num_dense + S * D]

ESMM, the entire space multi-task model, has the labels y (click) and c (conversion):

    p = sigmoid(M(X))             probability of a click                          pCTR
    q = sigmoid(N(X))             probability of a conversion, given a click      pCVR
    p q                           probability of both                             pCTCVR

    loss = log loss of y under p + log loss of y c under p q, over all rows

So pCVR learns from all rows, and predicts for all. M and N are multilayer perceptrons with relu between their
layers; they share the embeddings. With logits z of p and v of q, and s = p q, the second term l has

    y c = 1:  l = -log p - log q      dl/dz = -(1 - p)            dl/dv = -(1 - q)
    y c = 0:  l = -log(1 - s)         dl/dz = s (1 - p)/(1 - s)   dl/dv = s (1 - q)/(1 - s)

1 - s = (1 - p) + p (1 - q) is summed in logarithms, so that no logit, however large, gives 0 / 0.

Ma, Zhao, Huang, Wang, Hu, Zhu and Gai, "Entire space multi-task model: an effective approach for estimating
post-click conversion rate", SIGIR 2018, equation 5. The hidden layers are those of the paper.

MMoE, the multi-gate mixture of experts, has a task for each label, each with its own gate:

    F_e = relu(M_e(X))                for each expert e = 1, ..., E   [B, H]
    G_k = softmax(X W_k)              for each task k = 1, ..., K     [B, E], its gate
    p_k = sigmoid(T_k(sum over e of G_k[:, e] * F_e))                 [B]
    loss = sum over tasks k of the log loss of label k under p_k

The experts M_e and the towers T_k are multilayer perceptrons with relu between their layers.

Ma, Zhao, Yi, Chen, Hong and Chi, "Modeling task relationships in multi-task learning with multi-gate
mixture-of-experts", KDD 2018, equations 5 to 7.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.losses import Loss, logistic, softplus
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.layers.products import Product
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import Task, keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Lookups, Segment, SparseGrads, Tensors
from ctr_ps.ctr_model.schema import Schema


@kernel
def task_probabilities(logits: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B, T] with the probabilities under `logits` float32[B, T]."""
    for b in range(out.shape[0]):
        for k in range(out.shape[1]):
            logit = np.float64(logits[b, k])
            out[b, k] = np.float32(logistic(logit, math.exp(-abs(logit))))


@kernel
def task_cross_entropy(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, logit_grad: Floats
) -> float:
    """Returns the log losses summed over examples and tasks; as `binary_cross_entropy`, of shape [B, T]."""
    loss = 0.0
    for b in range(labels.shape[0]):
        for k in range(labels.shape[1]):
            logit, label = np.float64(logits[b, k]), labels[b, k]
            exponential = math.exp(-abs(logit))
            probability = logistic(logit, exponential)
            loss += weights[b] * softplus(logit if label == 0 else -logit, exponential)
            probabilities[b, k] = np.float32(probability)
            logit_grad[b, k] = np.float32(probability - label) * weights[b]
    return loss


@kernel
def entire_space_probabilities(logits: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B, 3] with p, q and p q under `logits` float32[B, 2]."""
    for b in range(out.shape[0]):
        z, v = np.float64(logits[b, 0]), np.float64(logits[b, 1])
        click, conversion = logistic(z, math.exp(-abs(z))), logistic(v, math.exp(-abs(v)))
        out[b, 0] = np.float32(click)
        out[b, 1] = np.float32(conversion)
        out[b, 2] = np.float32(click * conversion)


@kernel
def entire_space_cross_entropy(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, logit_grad: Floats
) -> float:
    """Returns the log losses of clicks and of conversions; as `binary_cross_entropy`.

    Logits and labels are [B, 2], click and conversion; probabilities float32[B, 3] are p, q and p q.
    """
    entire_space_probabilities(logits, probabilities)
    loss = 0.0
    for b in range(labels.shape[0]):
        y, both = np.float64(labels[b, 0]), np.float64(labels[b, 0] * labels[b, 1])
        z, v = np.float64(logits[b, 0]), np.float64(logits[b, 1])
        exp_z, exp_v = math.exp(-abs(z)), math.exp(-abs(v))
        log_no_click, log_no_conversion = -softplus(z, exp_z), -softplus(v, exp_v)
        of_click = logistic(z, exp_z) - y
        loss += weights[b] * softplus(z if y == 0 else -z, exp_z)
        if both == 1:
            loss += weights[b] * (softplus(-z, exp_z) + softplus(-v, exp_v))
            of_click += -logistic(-z, exp_z)
            of_conversion = -logistic(-v, exp_v)
        else:
            log_p, log_q = -softplus(-z, exp_z), -softplus(-v, exp_v)
            unconverted = log_p + log_no_conversion
            larger, smaller = max(log_no_click, unconverted), min(log_no_click, unconverted)
            log_neither = larger + math.log1p(math.exp(smaller - larger))  # of 1 - s
            loss -= weights[b] * log_neither
            of_click += math.exp(log_p + log_q + log_no_click - log_neither)
            of_conversion = math.exp(log_p + log_q + log_no_conversion - log_neither)
        logit_grad[b, 0] = np.float32(of_click) * weights[b]
        logit_grad[b, 1] = np.float32(of_conversion) * weights[b]
    return loss


ENTIRE_SPACE = Loss((2,), entire_space_probabilities, entire_space_cross_entropy)


LABELS = 2

_Pair = tuple[MlpBuffers, MlpBuffers]


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
        require_widths(hidden=hidden)
        if len(schema.labels) != LABELS:
            raise ValueError(
                "ESMM learns two labels, the click and the conversion, but the schema names "
                f'{len(schema.labels)}: set labels = ["click", "conversion"] in it, for example'
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
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: _Pair, logits: Floats
    ) -> None:
        (of_ctr, of_cvr), (ctr, cvr) = self._parts(tensors), buffers
        self._input.forward(batch.dense, lookups, ctr.input(batch.size))
        logits[:, :1] = self._ctr.forward(of_ctr, ctr, batch.size)
        logits[:, 1:] = self._cvr.forward(of_cvr, cvr, batch.size)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: _Pair,
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        (of_ctr, of_cvr), (ctr, cvr) = self._parts(tensors), buffers
        ctr_grads, cvr_grads = self._parts(tensor_grads)
        of_click, of_conversion = np.ascontiguousarray(logit_grad.T)  # [B] each
        grad = self._ctr.backward(of_ctr, ctr, of_click.reshape(-1, 1), ctr_grads)
        grad += self._cvr.backward(of_cvr, cvr, of_conversion.reshape(-1, 1), cvr_grads)
        self._input.backward(grad, lookups, sparse_grads)

    def _parts(self, tensors: Tensors) -> tuple[Sequence[Floats], Sequence[Floats]]:
        num_ctr = len(self._ctr.segments)
        return tensors[:num_ctr], tensors[num_ctr:]

    def buffers(self, max_batch_size: int) -> _Pair:
        """Returns the buffers of both perceptrons, which share their input."""
        shared = np.empty((max_batch_size, self._input.width), np.float32)
        ctr = self._ctr.buffers(max_batch_size, self.products, self.dropout, shared)
        return ctr, self._cvr.buffers(max_batch_size, self.products, self.dropout, shared)


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
        require_widths(num_experts=num_experts, expert=expert, tower=tower)
        if not schema.other_labels:
            raise ValueError(
                'MMoE learns several labels, but the schema names none or one: set labels = ["click", '
                '"conversion"] in it, for example'
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
            loss=Loss((len(tasks),), task_probabilities, task_cross_entropy),
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

    Adds that of the input of the relu of `experts` float32[B, E, H] to `experts_grad` float32[E, B, H].
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
