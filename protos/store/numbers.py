"""Numbers that workers give to be reduced over all of them: metrics, not parameters."""

import numpy as np
from numpy.typing import NDArray

from protos.chunking import PART_BYTES
from protos.errors import ProtocolError

Numbers = NDArray[np.float64]

MAX_NUMBERS = PART_BYTES // 8
"""They travel in one message."""


def require_numbers(name: str, values: Numbers) -> None:
    """Raises ProtocolError unless `values`, given to the all-reduce `name`, is float64[N] with a fit N."""
    if values.dtype != np.float64 or values.ndim != 1 or values.size > MAX_NUMBERS:
        raise ProtocolError(
            f"all_reduce {name!r} was given {values.dtype} of shape {values.shape}, expected float64[N] "
            f"with N up to {MAX_NUMBERS}"
        )
