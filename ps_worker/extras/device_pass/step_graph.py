"""A step as a CUDA graph: the host launches all of its kernels at once, for batches of the same shapes."""

from collections.abc import Callable

import torch
from torch import Tensor

from ctr_ps.ctr_model.torch.device import DeviceBatch
from ctr_ps.protos.errors import UsageError


class StepGraph:
    """One step, recorded for a batch, and replayed for others of the same shapes and weight."""

    def __init__(self, step: Callable[[DeviceBatch], Tensor], batch: DeviceBatch) -> None:
        """Records `step`, without running it, on the current device.

        Raises UsageError if the step waits for the device, or does anything else that cannot be recorded.
        """
        self._batch = batch.on(torch.device("cuda"))
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Other threads go on to copy batches.
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._figures = step(self._batch)
                finally:
                    self._graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UsageError(
                "a step cannot be recorded as a CUDA graph: do not read values of tensors in forward "
                f"(.item(), if, print), or leave out device.cuda_graph ({str(error).splitlines()[0]})"
            ) from error
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, batch: DeviceBatch) -> Tensor:
        """Runs the step for a batch; returns what it returns, until the next run."""
        self._batch.write(batch)
        self._graph.replay()
        return self._figures
