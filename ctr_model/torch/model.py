"""A module of PyTorch as a `Model`: autograd gives the gradients.

    params float32[P] --views--> parameters of the module --.
    rows float32[N, D] of the batch's keys, as leaves ------+--> forward --> loss, summed --> backward

The module that a user writes:

    forward(batch)                  logits, float32[B] or float32[B, 1]; anything else needs the next two
    loss(batch, output)             optional: float32[B], float32[B, 1], or their mean; else the log loss
    probabilities(batch, output)    optional: float32[B] of a click; else the sigmoid of the logits
    logit_biases                    optional: the biases of logits, see `TorchModel.initial_biases`

One that learns several labels has K `tasks`, names of labels or `Task`s, the first label first:

    self.tasks = schema.labels      batch.labels are float32[B, T]; logits and probabilities float32[B, K]
    loss(batch, output)             optional: also float32[B, ...] or a dict of float32[B], which are summed

The default loss of a task is the log loss of its event, over the rows of its condition.

Dense parameters are in the flat vector in the order of `named_parameters`, row-major, shared ones once.
Every thread has its own module, whose parameters are views of the vector of the step.
"""

import copy
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.delayed_labels import (
    Delay,
    calibrated,
    fake_negative_weights,
    rates_of_rows,
)
from ctr_ps.ctr_model.models.checks import labels_of, require_batch, require_grads, require_tasks
from ctr_ps.ctr_model.models.model import Origin, StepResult, Task, Workspace
from ctr_ps.ctr_model.parameters import Floats, Lookups, ModelInputError, Segment, SparseGrads
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch import batch as tensors
from ctr_ps.ctr_model.torch.batch import Unchanged, use_one_thread
from ctr_ps.ctr_model.torch.embedding import name_tables, tables_of

logger = logging.getLogger(__name__)

_FIRST_BATCHES = 10  # first batches in which a table without any gradient is detected

_OF_SHAPE = {
    f"{name}Backward"
    for name in (
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Squeeze",
        "Unsqueeze",
        "Select",
        "Slice",
        "T",
        "Cat",
        "Stack",
    )
} | {"ToCopyBackward", "CloneBackward"}
"""Operations that only change the shape or type of a tensor, or join it with others."""


class TorchModel:
    """A `Model` by an nn.Module; `precision` is the context of a training forward pass on a device."""

    def __init__(
        self,
        schema: Schema,
        module_class: type[nn.Module],
        options: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        """Builds the module once, for its tables and initial values, drawn by `seed`.

        `module_class` takes the schema and `options` as keywords. Raises TypeError for an argument of another
        type, and ValueError if the module cannot be built, or has parameters, buffers or embeddings that
        servers cannot store.
        """
        _require_arguments(schema, module_class, options, seed)
        self.schema = schema
        self.module_class = module_class
        self.unreached: set[str] = set()  # parameters and tables named in a warning
        self.returns_probabilities = False  # a warning was logged
        self._options = dict(options or {})
        self._origin = Origin(schema, self._options)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed)  # of the CPU only
            module = self._new_module()
            parameters = _parameters_of(module)
            self.initial_values: Floats = np.concatenate(
                [
                    np.empty(0, np.float32),
                    *(each.numpy().reshape(-1) for each in parameters.values()),
                ]
            )
        self.segments = tuple(
            Segment(name=name, shape=tuple(each.shape), init_std=0.0)
            for name, each in parameters.items()
        )
        self.tables = tables_of(module, schema)
        self.num_labels = max(len(schema.labels), 1)
        self.tasks = _tasks_of(module, schema)
        self.num_params = self.initial_values.size
        self.has_log_loss = not hasattr(module, "loss") and not self.tasks
        self._has_probabilities = hasattr(module, "probabilities")
        self._biases = _biases_of(module, parameters)
        self.logit_offset = 0.0
        self.delay: Delay = "none"
        self.precision: Callable[[str], AbstractContextManager[object]] = nullcontext

    @property
    def of_tasks(self) -> tuple[int, ...]:
        """Dimensions of the predictions of one example: (K,) of K tasks, else ()."""
        return (len(self.tasks),) if self.tasks else ()

    def initial_biases(self, rates: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Returns the values of the parameters `logit_biases` with which each task predicts its rate."""
        return {
            name: (math.log(rate / (1.0 - rate)),)
            for name, rate in zip(self._biases, rates, strict=False)
        }

    def with_autocast(self, dtype: torch.dtype) -> Self:
        """Returns the same model with training forward passes in `torch.autocast` to a dtype."""
        other = copy.copy(self)
        other.precision = partial(torch.autocast, dtype=dtype)
        return other

    def with_logit_offset(self, offset: float) -> Self:
        """Returns the same model with a log loss of the logits plus `offset`; predictions are unchanged."""
        other = copy.copy(self)
        other.logit_offset = offset
        return other

    def with_delay(self, delay: Delay) -> Self:
        """Returns the same model with a correction for clicks that come later than their impressions.

        Raises ValueError for "fnc" if the module has `probabilities` of its own.
        """
        if delay == "fnc" and self._has_probabilities:
            raise ValueError(
                f"{self.module_class.__name__} has its own probabilities, which 'fnc' cannot correct: set "
                "'fnw'"
            )
        other = copy.copy(self)
        other.delay = delay
        return other

    def workspace(self, max_batch_size: int, *, device: torch.device | None = None) -> "_Workspace":
        """Returns a module for one thread, on a `device` of its own, or None: on the CPU beside others."""
        with torch.random.fork_rng(devices=[]):  # its values are replaced
            module = self._new_module()
        tables_of(module, self.schema)
        return _Workspace(self, module, device)

    def predict(
        self, params: Floats, batch: Batch, lookups: Lookups, workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B], of K tasks float32[B, K]; see `Model`."""
        own, seen, output = self._evaluated(params, batch, lookups, workspace)
        with torch.no_grad():
            return own.checked(own.probabilities_of(seen, output).numpy())

    def outputs(
        self, params: Floats, batch: Batch, lookups: Lookups, workspace: Workspace
    ) -> dict[str, Floats]:
        """Returns what `forward` returns, by name; ModelInputError unless that is a dict of tensors."""
        _, _, output = self._evaluated(params, batch, lookups, workspace)
        if not isinstance(output, Mapping) or not all(
            isinstance(each, Tensor) and each.shape[:1] == (batch.size,) for each in output.values()
        ):
            raise ModelInputError(
                f"{self.module_class.__name__}.forward returns {described(output)}, expected a dict of "
                f"tensors of {batch.size} rows"
            )
        return {name: each.float().numpy() for name, each in output.items()}

    def _evaluated(
        self, params: Floats, batch: Batch, lookups: Lookups, workspace: Workspace
    ) -> tuple["_Workspace", tensors.Batch, Any]:
        own = self._own(workspace)
        require_batch(self.schema, self.tables, batch, lookups, own)
        own.take(tensors.tensor_of(params))
        own.module.eval()
        with torch.no_grad():
            seen = tensors.batch_of(batch, lookups, needs_grad=False)
            return own, seen, own.module(seen)

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Lookups,
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: SparseGrads,
    ) -> StepResult:
        """Computes the gradients of the loss summed over the examples; see `Model`."""
        own = self._own(workspace)
        labels_of(batch, self.num_labels)
        require_batch(self.schema, self.tables, batch, lookups, own)
        require_grads(lookups, sparse_grads)
        own.take(tensors.tensor_of(params))
        seen = tensors.batch_of(batch, lookups, needs_grad=True)
        result, grads = own.gradient(seen, torch.from_numpy(dense_grad))
        for name, grad in grads.items():
            sparse_grads[name][:] = 0.0 if grad is None else grad.numpy()
        return StepResult(result.loss.item(), own.checked(result.probabilities.numpy()))

    def _new_module(self) -> nn.Module:
        try:
            module = self.module_class(self.schema, **self._options)
        except ValueError:
            raise
        except Exception as error:  # user code may raise anything
            raise ValueError(
                f"{self.module_class.__name__}(schema, ...) failed: {type(error).__name__}: {error}"
            ) from error
        name_tables(module)
        return module

    def _own(self, workspace: Workspace) -> "_Workspace":
        if not isinstance(workspace, _Workspace) or workspace.model is not self:
            raise ModelInputError(
                "the workspace belongs to another model: use this model's workspace()"
            )
        return workspace


class _Workspace:
    max_batch_size = sys.maxsize  # nothing here depends on it

    def __init__(
        self, model: TorchModel, module: nn.Module, device: torch.device | None = None
    ) -> None:
        self.model = model
        _parameters_of(module)  # checks before the move to a device
        self.module = module.to(device)
        self._device = device
        self.parameters = list(self.module.parameters())
        sizes = [each.numel() for each in self.parameters]
        self._places = [slice(*each) for each in pairwise(accumulate(sizes, initial=0))]
        self._unchanged = Unchanged(module)
        self._has_trained = False
        self._zero = dict.fromkeys((table.name for table in model.tables), _FIRST_BATCHES)

    @property
    def is_watched(self) -> bool:
        """Whether `gradient` still looks for tables and parameters without a gradient."""
        return bool(self._zero) or not self._has_trained

    def take(self, vector: Tensor) -> None:
        """Points the module's parameters at `vector` float32[P], for a step in this thread."""
        if self._device is None:
            use_one_thread()
        if vector.shape != (self.model.num_params,):
            raise ModelInputError(
                f"the model has {self.model.num_params} dense parameters, the vector has shape "
                f"{tuple(vector.shape)}"
            )
        vector = vector.to(self._device)
        for parameter, place in zip(self.parameters, self._places, strict=True):
            parameter.data = vector[place].view(parameter.shape)

    def output_of(self, batch: tensors.Batch) -> Any:
        """Returns the module's output in the precision of training, as float32."""
        device = "cpu" if self._device is None else self._device.type
        with self._unchanged.required(batch), self.model.precision(device):
            output = self.module(batch)
        return in_float32(output)

    def gradient(
        self, batch: tensors.Batch, dense_grad: Tensor
    ) -> tuple["LossResult", dict[str, Tensor | None]]:
        """Computes the gradients of the loss summed over the examples, after `take`.

        Overwrites `dense_grad` float32[P]; returns the gradient float32[N, D] of each table's rows, None for
        zeros. On a device nothing is waited for.
        """
        self.module.train()
        with torch.enable_grad():
            found = self.loss_of(batch, self.output_of(batch))
        leaves = [rows.weights for rows in batch.rows.values()]
        grads = found.gradients([*self.parameters, *leaves])
        if not self._has_trained:
            self._warn_of_unreached(batch, grads)
            self._has_trained = True
        if self._zero:
            self._warn_of_zeros(dict(zip(batch.rows, grads[len(self.parameters) :], strict=True)))
        self.write(grads[: len(self.parameters)], dense_grad)
        of_rows = (None if grad is None else _dense(grad) for grad in grads[len(self.parameters) :])
        return found, dict(zip(batch.rows, of_rows, strict=True))

    def _warn_of_unreached(self, batch: tensors.Batch, grads: Sequence[Tensor | None]) -> None:
        """Warns once of parameters without a gradient, which a layer that `forward` forgot has."""
        names = [
            *(segment.name for segment in self.model.segments),
            *(f"table {name}" for name in batch.rows),
        ]
        sources = [*self.parameters, *(rows.weights for rows in batch.rows.values())]
        unreached = {
            name
            for name, source, grad in zip(names, sources, grads, strict=True)
            if grad is None and source.requires_grad and source.numel()
        }
        if new := unreached - self.model.unreached:
            self.model.unreached |= new
            logger.warning(
                "no gradient reaches %s in the first batch, so it is not trained: %s.forward does not use "
                "it, or detaches it",
                ", ".join(sorted(new)),
                self._name,
            )

    def _warn_of_zeros(self, grads: Mapping[str, Tensor | None]) -> None:
        for table, grad in grads.items():
            if table not in self._zero or grad is None or not grad.numel():
                continue
            self._zero[table] -= 1
            if grad.any():
                del self._zero[table]
            elif not self._zero[table]:
                del self._zero[table]
                logger.warning(
                    "the gradient of table %r is exactly zero in %d batches, so its rows do not change. If "
                    "the model multiplies rows by each other, rows that start at 0 stay 0: set init_range > "
                    "0",
                    table,
                    _FIRST_BATCHES,
                )

    def write(self, grads: Sequence[Tensor | None], vector: Tensor) -> None:
        """Overwrites `vector` float32[P] with the gradients of the parameters, zeros for None."""
        for grad, place in zip(grads, self._places, strict=True):
            if grad is None:
                vector[place].zero_()
            else:
                vector[place].view(grad.shape).copy_(_dense(grad))

    def loss_of(self, batch: tensors.Batch, output: Any) -> "LossResult":
        """Returns the loss summed over the examples, and the root of the backward pass."""
        own_loss = getattr(self.module, "loss", None)
        if own_loss is None:
            logits = self._logits(output, batch.size)
            is_first = not self._has_trained and not self.model.returns_probabilities
            if is_first and _are_probabilities(output):
                self.model.returns_probabilities = True
                logger.warning(
                    "%s.forward returns the output of a sigmoid or softmax, but logits are expected: leave "
                    "the sigmoid out, or define loss(batch, output) and probabilities(batch, output)",
                    self._name,
                )
            offset = self.model.logit_offset
            is_weighted = self.model.delay == "fnw"
            if is_weighted:  # by its own predictions, which are without the offset
                own = logits.detach().double().sigmoid().float()
                weights = fake_negative_weights(batch.labels, own)
                if batch.weights is not None:
                    weights = weights * batch.weights
                batch = replace(batch, weights=weights)
            found = _log_loss(logits + offset if offset else logits, batch, self.model.tasks)
            if is_weighted:
                return replace(found, probabilities=rates_of_rows(own, math.exp(-offset)))
            # With an offset, predictions of the rows that are trained on are those of the loss: the module's
            # own are of all rows.
            if offset or not hasattr(self.module, "probabilities"):
                return found
            with torch.no_grad():
                return replace(found, probabilities=self._clicks_of(batch, output))
        loss = own_loss(batch, output)
        if self.model.tasks and isinstance(loss, Mapping):
            loss = sum(loss.values())
        elif self.model.tasks and isinstance(loss, Tensor) and loss.shape[:1] == (batch.size,):
            loss = loss.reshape(batch.size, -1).sum(1)
        if isinstance(loss, Tensor) and loss.shape in ((batch.size,), (batch.size, 1)):
            losses = loss.float().reshape(batch.size)
            losses = losses if batch.weights is None else losses * batch.weights
            total = losses.sum()
        elif batch.weights is not None:
            raise ModelInputError(
                f"{self._name}.loss returned {described(loss)}, but the examples have weights: return "
                "float32[B], the loss of each example, to be weighted"
            )
        elif isinstance(loss, Tensor) and not loss.shape:
            losses = loss.float().expand(batch.size)
            total = loss.float() * batch.size
        else:
            raise ModelInputError(
                f"{self._name}.loss returned {described(loss)} for B = {batch.size} examples, expected "
                "float32[B] (the loss of each example) or a scalar (their mean)"
            )
        with torch.no_grad():
            probabilities = self._clicks_of(batch, output)
            return LossResult(total, None, total.detach(), losses.detach(), probabilities)

    def _clicks_of(self, batch: tensors.Batch, output: Any) -> Tensor:
        found = self.probabilities_of(batch, output)
        return found[:, 0].contiguous() if self.model.tasks else found

    def probabilities_of(self, batch: tensors.Batch, output: Any) -> Tensor:
        """Returns the probabilities of a click, float32[B], or of K tasks, float32[B, K].

        `checked` says whether they are some.
        """
        own_probabilities = getattr(self.module, "probabilities", None)
        if own_probabilities is None:
            found = self._logits(output, batch.size).double().sigmoid().float()
            return calibrated(found) if self.model.delay == "fnc" else found
        found = own_probabilities(batch, output)
        if not isinstance(found, Tensor) or found.shape != (batch.size, *self.model.of_tasks):
            raise ModelInputError(
                f"{self._name}.probabilities returned {described(found)} for B = {batch.size} examples, "
                f"expected {self._expected}"
            )
        return found.detach().float().contiguous()

    def checked(self, probabilities: Floats) -> Floats:
        """Returns probabilities; raises ModelInputError if one is below 0 or above 1."""
        if ((probabilities < 0) | (probabilities > 1)).any():
            raise ModelInputError(
                f"{self._name}.probabilities returned {probabilities.min():g} to {probabilities.max():g}, "
                "expected 0 to 1"
            )
        return probabilities

    def _logits(self, output: Any, size: int) -> Tensor:
        shape = (size, *self.model.of_tasks)
        if isinstance(output, Tensor) and output.shape in (shape, (*shape, 1)):
            return output.float().reshape(shape).contiguous()
        or_one = "" if self.model.tasks else " or float32[B, 1]"
        raise ModelInputError(
            f"{self._name}.forward returned {described(output)} for B = {size} examples, expected logits "
            f"{self._expected}{or_one}; a module with another output defines loss(batch, output) and "
            f"probabilities(batch, output)"
        )

    @property
    def _expected(self) -> str:
        tasks = self.model.tasks
        if not tasks:
            return "float32[B]"
        return f"float32[B, {len(tasks)}] of the tasks {', '.join(task.name for task in tasks)}"

    @property
    def _name(self) -> str:
        return type(self.module).__name__


@dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """The loss of B examples, on their device."""

    root: Tensor  # where the backward pass begins
    root_grad: Tensor | None  # the gradient there; None for a scalar loss
    loss: Tensor  # scalar: summed over the examples
    losses: Tensor  # [B], of each example
    probabilities: Tensor  # float32[B], of a click

    def gradients(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """As `gradients_of`; raises ModelInputError if the loss depends on none of the trainable inputs."""
        if not self.root.requires_grad:
            if any(each.requires_grad and each.numel() for each in inputs):
                raise ModelInputError(
                    "the loss has no gradient, so nothing would be trained: is the output computed under "
                    "torch.no_grad, or detached?"
                )
            return [None] * len(inputs)  # as for a batch without any key
        return gradients_of([self.root], [self.root_grad], inputs)


def gradients_of(
    roots: Sequence[Tensor], root_grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Returns the gradient of each input; None if it is frozen, or no root depends on it."""
    wanted = [each for each in inputs if each.requires_grad]
    if not wanted or not roots:
        return [None] * len(inputs)
    grads = iter(torch.autograd.grad(roots, wanted, root_grads, allow_unused=True))
    return [next(grads) if each.requires_grad else None for each in inputs]


def in_float32(output: Any) -> Any:
    """Returns the output of `forward` with tensors of lower precision as float32."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    if isinstance(output, Mapping):
        return {name: in_float32(each) for name, each in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):  # a named one
        return type(output)(*map(in_float32, output))
    if isinstance(output, tuple | list):
        return type(output)(map(in_float32, output))
    return output


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _log_loss(logits: Tensor, batch: tensors.Batch, tasks: Sequence[Task]) -> LossResult:
    """Returns the weighted log loss of logits float32[B], by the formula of ctr_model/layers/losses.py.

    Of K tasks, with logits float32[B, K], it is the sum of theirs. PyTorch's own loses digits of the gradient
    where a click is nearly certain.
    """
    if batch.labels is None:
        raise ModelInputError("cannot compute a gradient: the batch has no labels")
    labels, weights = batch.labels, batch.weights
    if tasks:
        given = _product_of(labels, [task.given for task in tasks])
        weights = given if weights is None else given * weights.unsqueeze(1)
        labels = _product_of(labels, [task.labels for task in tasks])
    with torch.no_grad():
        values = logits.double()
        exponentials = values.abs().neg().exp()
        probabilities = exponentials.masked_fill(values >= 0, 1.0) / (1.0 + exponentials)
        against = torch.where(labels == 0, values, -values)
        losses = against.clamp(min=0) + exponentials.log1p()
        grad = (probabilities - labels).float()
        if weights is not None:
            losses, grad = losses * weights, grad * weights
    total, probabilities = losses.sum(), probabilities.float()
    if tasks:
        losses, probabilities = losses.sum(1), probabilities[:, 0].contiguous()
    return LossResult(logits, grad, total, losses, probabilities)


def _product_of(labels: Tensor, chosen: Sequence[Sequence[int]]) -> Tensor:
    """Returns of labels float32[B, T] the products of the chosen ones, float32[B, K]; of none they are 1."""
    ones = torch.ones_like(labels[:, 0])
    return torch.stack([math.prod((labels[:, n] for n in each), start=ones) for each in chosen], 1)


def _require_arguments(schema: object, module_class: object, options: object, seed: object) -> None:
    if not isinstance(schema, Schema):
        raise TypeError(
            f"schema is {schema!r}, expected a Schema, as Schema.named('criteo') returns"
        )
    if not isinstance(module_class, type) or not issubclass(module_class, nn.Module):
        raise TypeError(
            f"module_class is {described(module_class)}, expected a class derived from torch.nn.Module, not "
            "an instance: each thread builds its own"
        )
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            f"options are {options!r}, expected keyword arguments by name, as {{'dim': 8}}"
        )
    if not isinstance(seed, int) or seed < 0:
        raise TypeError(f"seed is {seed!r}, expected an integer of at least 0")


def _tasks_of(module: nn.Module, schema: Schema) -> tuple[Task, ...]:
    """Returns the tasks that a module declares; ValueError unless they are of the schema's labels."""
    name, labels, declared = type(module).__name__, schema.labels, getattr(module, "tasks", None)
    if declared is None or isinstance(declared, nn.Module):  # a layer that has this name
        declared = ()
    if not isinstance(declared, tuple | list):
        raise ValueError(f"{name}.tasks is {declared!r}, expected a list of labels or Tasks")
    require_tasks(name, schema, declared)
    if len(labels) <= 1 >= len(declared):
        return ()
    numbers = range(len(labels))
    tasks = [Task(each, (labels.index(each),)) if each in labels else each for each in declared]
    for task in tasks:
        if (
            not isinstance(task, Task)
            or {type(task.labels), type(task.given)} != {tuple}
            or not task.labels
            or not {*task.labels, *task.given} <= {*numbers}
        ):
            raise ValueError(
                f"{name}.tasks has {task!r}, expected one of the labels {', '.join(labels) or '(none)'}, or "
                f"a Task with tuples of numbers of labels below {len(labels)}"
            )
    names = [task.name for task in tasks]
    if len({*names}) < len(names):
        raise ValueError(f"{name}.tasks has a name twice: {', '.join(names)}")
    if (tasks[0].labels, tasks[0].given) != ((0,), ()):
        raise ValueError(
            f"{name}.tasks begins with {names[0]!r}, expected {labels[0]!r}: validation compares the figures "
            "of the first label"
        )
    return tuple(tasks)


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the dense parameters by name, in the order of the vector; ValueError for other state."""
    name = type(module).__name__
    for method in ("loss", "probabilities"):
        if isinstance(getattr(module, method, None), nn.Module):
            raise ValueError(
                f"{name}: attribute {method} is a layer, but this name is reserved for a method "
                f"{method}(batch, output): rename the attribute"
            )
    for each, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            raise ValueError(
                f"{name}: {each} normalizes over the batch, so a prediction would depend on other rows, and "
                "workers would differ: use LayerNorm"
            )
        if getattr(layer, "max_norm", None) is not None:
            raise ValueError(
                f"{name}: {each} has max_norm, which changes parameters in the forward pass: remove max_norm"
            )
    parameters = dict(module.named_parameters())
    for each, parameter in parameters.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"{name}: {each} has no shape yet, but servers need it before the first batch: give the "
                "layer its number of inputs (schema.num_dense + len(schema.slots) * dim)"
            )
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"{name}: {each} is {parameter.dtype} on {parameter.device}, expected float32 on the CPU"
            )
    named = {each for each, _ in module.named_parameters(remove_duplicate=False)}
    buffers = [each for each in module.state_dict() if each not in named]
    if buffers:
        raise ValueError(
            f"{name} has the buffers {buffers}, which servers do not store, so workers would differ: use "
            "LayerNorm instead of batch norm, and register_buffer(..., persistent=False) for a constant"
        )
    return parameters


def _biases_of(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Returns the names in `logit_biases`; ValueError unless each is a parameter of one element."""
    names: tuple[str, ...] = tuple(getattr(module, "logit_biases", ()))
    for name in names:
        if name not in parameters or parameters[name].numel() != 1:
            raise ValueError(
                f"{type(module).__name__}.logit_biases has {name!r}, which is no parameter of one element; "
                f"parameters: {', '.join(parameters)}"
            )
    return names


def _are_probabilities(output: Tensor) -> bool:
    """Whether a tensor is, up to its shape, the result of a sigmoid or softmax."""
    node = output.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _OF_SHAPE:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(("SigmoidBackward", "SoftmaxBackward"))


def described(value: Any) -> str:
    """Returns what a user's function returned, for a message."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    return f"a {type(value).__name__}"
