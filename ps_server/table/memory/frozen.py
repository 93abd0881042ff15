"""Arrays as kernels take them."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

ScalarT = TypeVar("ScalarT", bound=np.generic)


def frozen(array: NDArray[ScalarT]) -> NDArray[ScalarT]:
    """Returns a read-only view: kernels are compiled once, for arrays as they come off the wire."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
