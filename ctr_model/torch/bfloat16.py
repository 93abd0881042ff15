"""Training in bfloat16: 8 bits of precision for matrix products, which some processors compute twice as fast.

    X, W, dZ  --rounded to bfloat16-->  product, summed in float32  --rounded-->  float32 Z, dX, dW

Parameters, activations between products, the loss, gradients and all sums over examples are float32.
"""

import functools
import logging
import re
from collections.abc import Collection
from pathlib import Path

import torch

from ctr_ps.ctr_model.layers.products import Product, float32_product
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.parameters import Floats
from ctr_ps.ctr_model.torch.batch import tensor_of, use_one_thread
from ctr_ps.ctr_model.torch.model import TorchModel

logger = logging.getLogger(__name__)

MIN_WIDTH = 16
"""Narrower products stay float32: they gain no time, and the logits of the last layer lose most precision."""


def in_bfloat16(model: Model) -> Model:
    """Returns a model with gradients in bfloat16; warns without effect, ValueError for own arithmetic."""
    if isinstance(model, TorchModel):
        _warn_if_slow()
        return model.with_autocast(torch.bfloat16)
    if isinstance(model, ClickModel):
        if _has_wide_products(model):
            _warn_if_slow()
        else:
            _warn_of_no_use(type(model).__name__)
        return model.with_products(bfloat16_product)
    raise ValueError(
        f"{type(model).__name__} cannot compute in bfloat16: only PyTorch modules and classes that derive "
        "from ClickModel can"
    )


def bfloat16_product(fan_in: int, width: int, max_batch_size: int) -> Product:
    """Returns a product in bfloat16, or in float32 if it is narrow."""
    is_narrow = min(fan_in, width) < MIN_WIDTH
    new = float32_product if is_narrow else _Bfloat16
    return new(fan_in, width, max_batch_size)


def _has_wide_products(model: ClickModel) -> bool:
    made: list[Product] = []

    def remembered(fan_in: int, width: int, max_batch_size: int) -> Product:
        made.append(bfloat16_product(fan_in, width, max_batch_size))
        return made[-1]

    model.with_products(remembered).buffers(max_batch_size=1)
    return any(isinstance(product, _Bfloat16) for product in made)


class _Bfloat16:
    """The matrices of one product, each rounded once a step."""

    def __init__(self, fan_in: int, width: int, max_batch_size: int) -> None:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.empty((rows, columns), dtype=torch.bfloat16)

        self._x, self._x_grad = (matrix(max_batch_size, fan_in) for _ in range(2))
        self._weight, self._weight_grad = (matrix(fan_in, width) for _ in range(2))
        self._out = matrix(max_batch_size, width)  # Z, and dZ on the way back

    def forward(self, x: Floats, weight: Floats, out: Floats) -> None:
        use_one_thread()
        size = len(x)
        rounded_x = self._x[:size].copy_(tensor_of(x))
        rounded_weight = self._weight.copy_(tensor_of(weight))
        product = torch.mm(rounded_x, rounded_weight, out=self._out[:size])
        tensor_of(out).copy_(product)

    def backward(
        self, x: Floats, weight: Floats, grad: Floats, weight_grad: Floats, x_grad: Floats
    ) -> None:
        size = len(x)
        rounded_grad = self._out[:size].copy_(tensor_of(grad))
        torch.mm(self._x[:size].t(), rounded_grad, out=self._weight_grad)
        tensor_of(weight_grad).copy_(self._weight_grad)
        torch.mm(rounded_grad, self._weight.t(), out=self._x_grad[:size])
        tensor_of(x_grad).copy_(self._x_grad[:size])


@functools.cache
def _warn_of_no_use(name: str) -> None:
    logger.warning(
        "%s trains in float32: it computes no product of %d or more columns with self.products",
        name,
        MIN_WIDTH,
    )


@functools.cache  # once per process
def _warn_if_slow() -> None:
    if not has_bfloat16(_capabilities()):
        logger.warning(
            "this processor has no instructions for bfloat16: training will be slower than in float32"
        )


def has_bfloat16(capabilities: Collection[str]) -> bool:
    """Whether a processor with these capabilities multiplies in bfloat16; assumed if none are known."""
    return not capabilities or any(name.endswith("bf16") for name in capabilities)


def _capabilities() -> list[str]:
    """Returns the processor's capabilities, such as "avx512_bf16"; empty: unknown."""
    if hasattr(torch.cpu, "get_capabilities"):  # not in older releases
        return [name for name, has_it in torch.cpu.get_capabilities().items() if has_it]
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)  # of x86, of ARM
    return flags[1].split() if flags else []
