"""How kernels are compiled, and the arrays that they take."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")
ScalarT = TypeVar("ScalarT", bound=np.generic)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` to machine code on first use.

    It runs without the GIL, or threads would queue behind one call; the result is cached on disk;
    division follows IEEE 754, as in numpy. No fast-math: sums must not depend on the compiler.
    """
    return cast("Callable[P, R]", numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` into the kernels that call it, always; for what they do to each row.

    The compiler leaves out calls of small functions by itself, by a guess of what is small. A call that stays
    counts references to every array that it is handed, atomically: for a whole table 60 ns and more.
    """
    compiled = numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)(function)
    return cast("Callable[P, R]", compiled)


def read_only(array: NDArray[ScalarT]) -> NDArray[ScalarT]:
    """Returns a read-only view, as arrays off the wire are: so kernels are compiled for one type only."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
