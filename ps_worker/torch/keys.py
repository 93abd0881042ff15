"""Keys of tables as tensors."""

import numpy as np
import torch
from torch import Tensor

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys


def keys_of(tensor: Tensor) -> Keys:
    """Returns the keys of a tensor of any shape and device as uint64[L]; int64 is read as its 64 bits.

    Raises UsageError for another dtype.
    """
    if tensor.dtype not in (torch.int64, torch.uint64):
        raise UsageError(
            f"keys are {tensor.dtype}, expected torch.int64 or torch.uint64: convert them with .long()"
        )
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(-1).view(np.uint64)
