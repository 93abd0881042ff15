"""A saved model in PyTorch as a program for other runtimes: ONNX, or what `torch.export` saves."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ctr_ps.ctr_model import PROGRAM_FORMATS
from ctr_ps.ctr_model.models.model import Model, module_class_of
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.checkpoints.attachments import (
    job_of_checkpoint,
    model_of_checkpoint,
    require_consent,
    schema_of_checkpoint,
)
from ctr_ps.ps_worker.job.model import DENSE_BLOCK

if TYPE_CHECKING:
    from ctr_ps.ctr_model.torch import TorchModel


def export(model_dir: str, output: Path, *, allow_code: bool = False) -> dict[str, Any]:
    """Writes the dense part of a saved model as a program; its embeddings are looked up outside.

    `model_dir` is a checkpoint, or a folder of checkpoints, whose newest is taken. `output` appears when it
    is whole, and ends with ".onnx" or ".pt2". With `allow_code` the file of the model, which the checkpoint
    names, is run. Returns the model's digest, and the shape of each input by name, in their order. Raises
    CtrPsError if the model is none of PyTorch, or cannot be a program, or the file cannot be written.
    """
    if output.suffix not in PROGRAM_FORMATS:
        raise UsageError(f"{str(output)!r} does not end with {' or '.join(PROGRAM_FORMATS)}")
    checkpoint = Checkpoint.open(model_dir)
    checkpoint.verify()
    schema, job = schema_of_checkpoint(checkpoint), job_of_checkpoint(checkpoint)
    require_consent(checkpoint.url, job, ["model.name"], allow_code=allow_code)
    model = torch_model(model_of_checkpoint(checkpoint, job, schema))
    from ctr_ps.ctr_model.torch.export import export as write  # late: an extra

    dense = checkpoint.read_dense(DENSE_BLOCK, slice(0, checkpoint.blocks[DENSE_BLOCK].length))
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            inputs = write(model, dense.weights, Path(folder) / output.name)
            # The program after its weights, if these are in a file of their own.
            for written in sorted(Path(folder).iterdir(), reverse=True):
                written.replace(output.parent / written.name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{output.name} needs {error.name}, which is not installed: pip install 'ctr-ps[onnx]'"
        ) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot write {str(output)!r}: {error}") from error
    return {"model_digest": checkpoint.digest_of_files(), "inputs": inputs}


def torch_model(model: Model) -> "TorchModel":
    """Returns the model if it is a module of PyTorch; else raises UsageError."""
    if module_class_of(model) is None:
        raise UsageError(
            f"only PyTorch models have programs and outputs, but this model is a {type(model).__name__}: "
            "predict with it"
        )
    return cast("TorchModel", model)
