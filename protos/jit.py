"""How kernels are compiled, said once."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` to machine code on first use.

    It runs without the GIL, or threads would queue behind one call; the result is cached on disk;
    division follows IEEE 754, as in numpy. No fast-math: sums must not depend on the compiler.
    """
    return cast("Callable[P, R]", numba.njit(nogil=True, cache=True, error_model="numpy")(function))
