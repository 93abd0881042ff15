"""Compilation of kernels by numba."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F) -> F:
    """Returns `function` compiled by numba, with its Python type.

    `nogil`: trainer threads run kernels in parallel. `cache`: compiled once per machine, not per process.
    `error_model="numpy"`: division by zero gives inf or nan; the check that would raise prevents
    vectorisation. With `NUMBA_DISABLE_JIT=1` kernels run as plain Python.
    """
    return cast("F", numba.njit(nogil=True, cache=True, error_model="numpy")(function))
