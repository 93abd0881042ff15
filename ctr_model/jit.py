"""The one way in which this package compiles a kernel."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Returns `function` compiled by numba, typed as the plain Python that it reads as.

    `nogil`: trainer threads run kernels at the same time instead of one after the other.
    `cache`: compiled once a machine, not once a process.
    `error_model="numpy"`: a division by zero gives inf or nan as in numpy; the check that would
    raise instead costs vectorisation. With `NUMBA_DISABLE_JIT=1` kernels run as plain Python.
    """
    return cast("F", numba.njit(nogil=True, cache=True, error_model="numpy")(function))
