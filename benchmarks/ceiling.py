"""The ceiling: speed of CTR-DNN's arithmetic on one core of this machine.

    python -m benchmarks.ceiling

Forward and backward pass of the 273-400-400-400-2 network in plain numpy float32 with preallocated buffers,
including the gradient of the input, which embeddings need: no embeddings, no servers, one BLAS thread. Other
benchmarks report their speed relative to this one, measured at the same time. It shares no code with
`ctr_model`, so that it does not change with the models. The output names the processor whose kernels BLAS
runs; the environment variable OPENBLAS_CORETYPE can set an older one.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.figures import say

WIDTHS = (273, 400, 400, 400, 2)  # 13 dense columns and 26 slots of dim 10, hidden layers, classes
BATCH_SIZES = (100, 512, 4096)


class Network:
    """The network, and the buffers of a step over `batch_size` examples."""

    def __init__(self, batch_size: int) -> None:
        rng = np.random.default_rng(1)
        shapes = list(pairwise(WIDTHS))
        self.weights = [rng.normal(0, n**-0.5, (n, m)).astype(np.float32) for n, m in shapes]
        self.biases = [np.zeros(m, np.float32) for m in WIDTHS[1:]]
        self.weight_grads = [np.empty_like(weight) for weight in self.weights]
        self.bias_grads = [np.empty_like(bias) for bias in self.biases]
        self.outputs = [np.empty((batch_size, n), np.float32) for n in WIDTHS]
        self.output_grads = [np.empty((batch_size, n), np.float32) for n in WIDTHS]
        self.masks = [np.empty((batch_size, n), np.bool_) for n in WIDTHS]
        self.row = np.empty((batch_size, 1), np.float32)
        self.outputs[0][:] = rng.random((batch_size, WIDTHS[0]), np.float32)
        self.onehot = np.eye(2, dtype=np.float32)[rng.integers(0, 2, batch_size)]

    def step(self) -> None:
        """Computes every gradient once."""
        self._forward()
        self._softmax()
        self._backward()

    def _forward(self) -> None:
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            output = self.outputs[i + 1]
            np.matmul(self.outputs[i], weight, out=output)
            np.add(output, bias, out=output)
            if i < last:
                np.maximum(output, 0, out=output)

    def _softmax(self) -> None:
        logits, grad = self.outputs[-1], self.output_grads[-1]
        np.subtract(logits, np.max(logits, axis=1, keepdims=True, out=self.row), out=grad)
        np.exp(grad, out=grad)
        np.divide(grad, np.sum(grad, axis=1, keepdims=True, out=self.row), out=grad)
        np.subtract(grad, self.onehot, out=grad)

    def _backward(self) -> None:
        for i in reversed(range(len(self.weights))):
            grad = self.output_grads[i + 1]
            np.matmul(self.outputs[i].T, grad, out=self.weight_grads[i])
            np.sum(grad, axis=0, out=self.bias_grads[i])
            np.matmul(grad, self.weights[i].T, out=self.output_grads[i])
            if i > 0:
                np.greater(self.outputs[i], 0, out=self.masks[i])
                np.multiply(self.output_grads[i], self.masks[i], out=self.output_grads[i])


def measure(batch_size: int, seconds: float = 2.0) -> float:
    """Returns examples/s of one core, measured for at least `seconds` after a warm-up step."""
    network = Network(batch_size)
    with threadpool_limits(limits=1, user_api="blas"):
        network.step()
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            network.step()
            steps += 1
    return steps * batch_size / elapsed


def measure_together(batch_size: int, seconds: float, processes: int) -> float:
    """Returns examples/s of several processes at once, a core each, which share caches and memory."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        speeds = [pool.submit(measure, batch_size, seconds) for _ in range(processes)]
        return sum(speed.result() for speed in speeds)


def blas_kernels() -> str:
    """Returns the processor whose kernels BLAS uses, such as "SkylakeX"."""
    libraries = [entry for entry in threadpool_info() if entry["user_api"] == "blas"]
    return ", ".join(sorted({str(entry.get("architecture", "unknown")) for entry in libraries}))


def main() -> None:
    for batch_size in BATCH_SIZES:
        speed = round(measure(batch_size))
        say("ceiling", batch_size=batch_size, examples_per_s=speed, blas=blas_kernels())


if __name__ == "__main__":
    main()
