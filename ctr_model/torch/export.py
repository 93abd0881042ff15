"""Export of a trained module as a program for other runtimes; embeddings are looked up outside it.

    batch, rows --fronts--> dense, and the fronts' outputs, by name --program--> probabilities

Probabilities are float32[B], of K tasks float32[B, K].
A program is an ONNX graph, or the output of `torch.export`; the cut is explained in
ctr_model/torch/embedding.py. The number of examples is free, and so is the number of keys of a slot whose
rows are not pooled.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ctr_ps.ctr_model import PROGRAM_FORMATS
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.delayed_labels import calibrated
from ctr_ps.ctr_model.parameters import Floats, Lookup, Lookups
from ctr_ps.ctr_model.torch import batch as tensors
from ctr_ps.ctr_model.torch.embedding import fronts_of
from ctr_ps.ctr_model.torch.halves import receive_instead, returned
from ctr_ps.ctr_model.torch.model import TorchModel

Inputs = dict[str, NDArray[Any]]
"""By name: `dense` float32[B, num_dense], and outputs of fronts, `deep:0` of the attribute `deep`."""

OUTPUT = "probabilities"

_EXPORTERS = ("torch", "onnxscript", "onnx_ir")
_MAX_ONNX_BYTES = 2**31  # of one file; the weights of a larger model are in another one beside it
_CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # another number of examples may be summed in another order


class ProgramInputs:
    """Computes the inputs of a model's program; for one thread."""

    def __init__(self, model: TorchModel) -> None:
        """Builds the module; raises ValueError if it cannot be cut."""
        module = model.workspace(1).module.eval()
        self._fronts = fronts_of(module)

    def of(self, batch: Batch, lookups: Lookups) -> Inputs:
        """Returns the inputs for a batch and its rows."""
        seen = tensors.batch_of(batch, lookups, needs_grad=False)
        inputs: Inputs = {"dense": batch.dense}
        with torch.no_grad():
            for name, front in self._fronts.items():
                found = returned(name, front(seen), batch.size)
                inputs |= {f"{name}:{place}": each.numpy() for place, each in enumerate(found)}
        return inputs


def export(model: TorchModel, params: Floats, path: Path) -> dict[str, list[int | str]]:
    """Writes a model with dense parameters float32[P] as a program; returns the shape of each input.

    `path` ends with ".onnx", which needs the extra `onnx` (else ModuleNotFoundError), or with ".pt2". Inputs
    are in order, and free dimensions have names. Raises ValueError for another suffix, a module that cannot
    be cut, or a computation that the format cannot express; nothing is written then.
    """
    if path.suffix not in PROGRAM_FORMATS:
        raise ValueError(f"{str(path)!r} does not end with {' or '.join(PROGRAM_FORMATS)}")
    inputs, others = _example(model, size=3, num_keys=2), _example(model, size=5, num_keys=4)
    module = _Behind(model, params, inputs)
    shapes = {name: _free(each.shape, others[name].shape) for name, each in inputs.items()}
    with _quiet(), torch.no_grad():
        program = _traced(module, inputs, shapes)
        _require_same(module, program, others)
        if path.suffix == ".pt2":
            torch.export.save(program, str(path))
        else:
            graph = _in_onnx(module, program, list(inputs))
            graph.save(str(path), external_data=4 * model.num_params >= _MAX_ONNX_BYTES)
    return shapes


class _Behind(nn.Module):
    """The module behind the cut, as a function of the inputs in their order."""

    def __init__(self, model: TorchModel, params: Floats, inputs: Inputs) -> None:
        super().__init__()
        self._own = model.workspace(1)
        self._own.take(tensors.tensor_of(params))
        for parameter in self._own.parameters:
            parameter.data = (
                parameter.data.clone()
            )  # a program saves the memory that a tensor is a view of
        self.module = self._own.module.eval()
        self.name = model.module_class.__name__
        self._of_tasks, self._delay = model.of_tasks, model.delay
        self._names = list(inputs)
        self._fronts = receive_instead(self.module)

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self._names, inputs, strict=True))
        dense = given.pop("dense")
        for front, received in self._fronts.items():
            received.outputs = [
                value for name, value in given.items() if name.partition(":")[0] == front
            ]
        batch = tensors.Batch(dense=dense, labels=None, rows={})
        output = self.module(batch)
        if hasattr(self.module, "probabilities"):
            return self.module.probabilities(batch, output).float()
        found = torch.sigmoid(output.float()).reshape(batch.size, *self._of_tasks)
        return calibrated(found) if self._delay == "fnc" else found


def _traced(
    module: _Behind, inputs: Inputs, shapes: Mapping[str, Sequence[int | str]]
) -> ExportedProgram:
    free = {"batch": Dim("batch"), "keys": Dim.AUTO}
    dynamic = tuple(
        {place: free[size] for place, size in enumerate(shape) if isinstance(size, str)}
        for shape in shapes.values()
    )
    try:
        program = torch.export.export(module, _tensors(inputs), dynamic_shapes=(dynamic,))
    except Exception as error:  # of the user's code under tracing: PyTorch raises many kinds
        raise ValueError(
            f"{module.name} cannot be exported for a variable number of examples; PyTorch says: {error}"
        ) from error
    # ONNX has no guards: beyond the limit the graph would compute something else than the module.
    for size in program.range_constraints.values():
        if size.upper.is_Integer:
            raise ValueError(
                f"{module.name} cannot be exported for a variable number of keys: forward branches on it, so "
                f"the program would accept at most {size.upper} keys. Compute with tensors and the mask"
            )
    return program


def _require_same(module: _Behind, program: ExportedProgram, inputs: Inputs) -> None:
    try:
        expected, found = module(*_tensors(inputs)), program.module()(*_tensors(inputs))
    except Exception as error:  # a guard of the program, or the user's code
        sizes = ", ".join(f"{name} {list(each.shape)}" for name, each in inputs.items())
        raise ValueError(
            f"the exported program of {module.name} accepts only inputs of the sizes that it was "
            f"exported with, not {sizes}: {_named(error, list(inputs))}. forward must not use sizes in "
            "Python, as in 'for i in range(rows.shape[2])' or 'if rows.shape[2] > 3': compute with tensors "
            "and the mask"
        ) from error
    if not torch.allclose(found, expected, **_CLOSE):
        raise ValueError(
            f"the exported program of {module.name} differs from the module for another number of examples: "
            "forward must not turn tensors into Python numbers"
        )


def _named(error: Exception, names: Sequence[str]) -> str:
    """Returns the first line of PyTorch's error, with the names of inputs instead of numbers."""
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return re.sub(
        r"\binputs_(\d+)\b",
        lambda found: names[int(found[1])] if int(found[1]) < len(names) else found[0],
        line,
    )


def _in_onnx(
    module: _Behind, program: ExportedProgram, names: Sequence[str]
) -> torch.onnx.ONNXProgram:
    try:
        graph = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=names, output_names=[OUTPUT]
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:  # PyTorch raises many kinds
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise ValueError(
            f"{module.name} has an operation that ONNX lacks; PyTorch says: {first}. Use another operation "
            "in forward, or export a .pt2, which has all operations of PyTorch"
        ) from error
    assert graph is not None, "dynamo=True returns a program"
    return graph


def _example(model: TorchModel, *, size: int, num_keys: int) -> Inputs:
    """Returns inputs for a batch of `size` examples whose slots have `num_keys` keys each."""
    rng = np.random.default_rng(0)
    schema = model.schema
    batch = Batch(
        labels=None,
        dense=rng.random((size, schema.num_dense), np.float32),
        keys=np.empty(0, np.uint64),  # a front only sees lookups
        offsets=np.zeros(1, np.int32),
        num_slots=len(schema.slots),
    )
    lookups = {}
    for table in model.tables:
        num_slots = table.num_slots(len(schema.slots))
        lookups[table.name] = Lookup(
            rows=rng.random((1, table.dim), np.float32),
            inverse=np.zeros(size * num_slots * num_keys, np.int32),
            offsets=num_keys * np.arange(size * num_slots + 1, dtype=np.int32),
            num_slots=num_slots,
        )
    return ProgramInputs(model).of(batch, lookups)


def _free(shape: Sequence[int], other: Sequence[int]) -> list[int | str]:
    """Returns a shape with names for the dimensions in which two examples differ."""
    return [
        one if one == two else "batch" if place == 0 else "keys"
        for place, (one, two) in enumerate(zip(shape, other, strict=True))
    ]


def _tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(tensors.tensor_of(each) for each in inputs.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences logs of the exporters that a user cannot act on."""
    loggers = [logging.getLogger(name) for name in _EXPORTERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
